"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434): latent attention, and experts in groups with shared ones beside them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from jaxserve.layers.attention import PositionScale
from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.latent_attention import MultiHeadLatentAttention
from jaxserve.layers.model_config import RopeConfig
from jaxserve.layers.parallel import Scope
from jaxserve.layers.rope import yarn_mscale
from jaxserve.layers.routing import Routing
from jaxserve.layers.sparse_latent_attention import IndexConfig, SparseLatentAttention, SparseLatentLayer
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder, extra_layers
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer, read_routing

_DEFAULTS: Final = FamilyDefaults(head_dim=64, attention_bias=False)
_METHODS: Final = ("greedy", "group_limited_greedy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekConfig(SparseConfig):
    """A decoder with latent attention; ``head_dim`` is the rotated part of a head.

    Attributes:
        query_rank: Size of the queries' latent; None for none.
        rank: Size of the latent of keys and values.
        plain_dim: Features of a head that are not rotated.
        value_dim: Features of a head's value.
        attention_scale: Factor of query-key scores.
        is_interleaved: Whether neighbouring features rotate in pairs.
        position_scale: Factor of queries by their position; None for none.
        index: The index of the tokens that layers attend to; None: they attend to all.
        index_layers: For each layer, the layer whose index selects its tokens; empty without an index.
    """

    query_rank: int | None
    rank: int
    plain_dim: int
    value_dim: int
    attention_scale: float
    is_interleaved: bool
    position_scale: PositionScale | None = None
    index: IndexConfig | None = None
    index_layers: tuple[int, ...] = ()


def config_from_hf(fields: ConfigFields, architecture: str) -> DeepseekConfig:
    """Read a config of DeepseekV2ForCausalLM."""
    return read_deepseek(fields, architecture, _DEFAULTS, _read_routing, dense_layers=0)


def read_deepseek(
    fields: ConfigFields,
    architecture: str,
    defaults: FamilyDefaults,
    routing: Callable[[ConfigFields], Routing],
    *,
    dense_layers: int,
    is_interleaved: bool = True,
    num_extra_layers: int = 0,
) -> DeepseekConfig:
    """Read the fields that DeepSeek's families share; ``qk_rope_head_dim`` replaces ``head_dim``, as in transformers.

    Args:
        fields: Fields of config.json.
        architecture: Name in ``architectures``.
        defaults: Defaults of the family.
        routing: Reads the routing.
        dense_layers: ``first_k_dense_replace`` if that is missing.
        is_interleaved: As in ``DeepseekConfig``.
        num_extra_layers: As in ``DeepseekConfig``.
    """
    fields = fields.replaced({"head_dim": fields.raw.get("qk_rope_head_dim")})
    base = read_decoder(fields, architecture, defaults)
    given = dataclasses.replace(base, num_kv_heads=base.num_heads)
    plain_dim, ffn_size = fields.integer("qk_nope_head_dim", 128), fields.integer("moe_intermediate_size", 1407)
    dense, every = fields.integer("first_k_dense_replace", dense_layers, minimum=0), fields.integer("moe_layer_freq", 1)
    return DeepseekConfig(
        **vars(given),
        routing=routing(fields),
        expert_ffn_size=ffn_size,
        shared_ffn_size=ffn_size * fields.integer("n_shared_experts", 2, minimum=0),
        sparse_layers=tuple(index >= dense and index % every == 0 for index in range(base.num_layers)),
        query_rank=fields.nullable_integer("q_lora_rank", 1536),
        rank=fields.integer("kv_lora_rank", 512),
        plain_dim=plain_dim,
        value_dim=fields.integer("v_head_dim", 128),
        attention_scale=_attention_scale(plain_dim + base.head_dim, base.rope),
        is_interleaved=is_interleaved,
        num_extra_layers=num_extra_layers,
    )


def _attention_scale(query_dim: int, rope: RopeConfig) -> float:
    """Return the factor of scores: with YaRN, ``mscale_all_dim`` raises it by the square of the attention factor."""
    factor = yarn_mscale(rope.factor, rope.mscale_all_dim)
    return query_dim**-0.5 * factor * factor


def _read_routing(fields: ConfigFields) -> Routing:
    """Read the routing of V2: a softmax; groups, if any, are rated by their best expert."""
    method = fields.text("topk_method", "greedy")
    if method not in _METHODS:
        fields.note("topk_method", f"expected {' or '.join(_METHODS)}, got {method!r}")
    if fields.flag("norm_topk_prob", False):
        fields.note("norm_topk_prob", "expected false: the weights of this architecture's experts are not normalized")
    base = read_routing(fields, "n_routed_experts", 64, 6, is_normalized=False)
    routing = dataclasses.replace(base, scale=fields.number("routed_scaling_factor", 1.0))
    return read_groups(fields, routing, (1, 1)) if method == "group_limited_greedy" else routing


def read_groups(fields: ConfigFields, routing: Routing, absent: tuple[int, int]) -> Routing:
    """Add the groups of experts.

    Args:
        fields: Fields of config.json.
        routing: The routing without groups.
        absent: ``n_group`` and ``topk_group`` if they are missing.
    """
    groups, chosen = fields.integer("n_group", absent[0]), fields.integer("topk_group", absent[1])
    if routing.num_experts % groups:
        fields.note("n_group", f"expected a divisor of the {routing.num_experts} experts, got {groups}")
        return routing
    size = routing.num_experts // groups
    if chosen > groups:
        fields.note("topk_group", f"expected at most the {groups} groups, got {chosen}")
    elif chosen * size < routing.experts_per_token:
        fields.note("topk_group", f"{chosen} groups of {size} experts are too few for {routing.experts_per_token}")
    if size < routing.experts_per_group_score:
        fields.note("n_group", f"expected groups of at least {routing.experts_per_group_score} experts, got {size}")
    return dataclasses.replace(routing, num_groups=groups, groups_per_token=chosen)


def build(config: DeepseekConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    ignored = extra_layers(config.num_layers, config.num_extra_layers)
    return build_decoder(config, scope, _build_layer, ignored=ignored)


def _build_layer(config: DeepseekConfig, index: int, scope: Scope) -> PreNormLayer:
    inner = scope.at("self_attn")
    if config.index is None:
        attention = build_latent_attention(config, inner)
        return build_sparse_layer(config, index, scope, shared="shared_experts", attention=attention)
    selects_as = config.index_layers[index]
    attention = SparseLatentAttention(
        config.hidden_size,
        config.num_heads,
        index=config.index,
        selects_as=None if selects_as == index else selects_as,
        **_latent_options(config, inner),
    )
    layer = SparseLatentLayer
    return build_sparse_layer(config, index, scope, shared="shared_experts", attention=attention, layer=layer)


def build_latent_attention(config: DeepseekConfig, scope: Scope, **options: Any) -> MultiHeadLatentAttention:
    """Build the attention of a layer; ``options`` are further options of ``Attention``."""
    sizes = (config.hidden_size, config.num_heads)
    return MultiHeadLatentAttention(*sizes, **_latent_options(config, scope), **options)


def _latent_options(config: DeepseekConfig, scope: Scope) -> dict[str, Any]:
    return {
        "query_rank": config.query_rank,
        "rank": config.rank,
        "plain_dim": config.plain_dim,
        "rotated_dim": config.head_dim,
        "value_dim": config.value_dim,
        "bias": config.qkv_bias,
        "is_interleaved": config.is_interleaved,
        "scale": config.attention_scale,
        "position_scale": config.position_scale,
        "scope": scope,
    }
