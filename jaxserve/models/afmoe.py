"""Trinity (AFMoE): norms before and after each branch, gates of the attention output, experts after dense layers."""

import dataclasses
from typing import Final

from jaxserve.layers.grouped_query_attention import OutputGate
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_decoder, build_mlp, build_norm
from jaxserve.models.gemma2 import SandwichLayer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, Windows, class_sizes, read_decoder, read_repeated_windows
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_mlp, read_routing


def _read_windows(fields: ConfigFields, num_layers: int) -> Windows:
    return read_repeated_windows(fields, num_layers, fields.integer("global_attn_every_n_layers", 4), absent=1024)


_DEFAULTS: Final = FamilyDefaults(
    head_dim=128,
    norm_eps=1e-5,
    bos_token_id=None,
    eos_token_ids=(),
    attention_bias=False,
    windows=_read_windows,
    sizes=class_sizes(200192, 2048, 6144, 32, 16, 16384),
)
_NAMES: Final = ExpertNames(router="router.gate", correction="expert_bias")
_GATE: Final = OutputGate("gate_proj", "sigmoid")
_NORMS: Final = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AfmoeConfig(SparseConfig):
    """A decoder of Trinity's form.

    Attributes:
        scales_embeddings: Whether embeddings are multiplied by the square root of D.
    """

    scales_embeddings: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> AfmoeConfig:
    """Read a config of AfmoeForCausalLM: only layers with a window rotate."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    routing = dataclasses.replace(
        read_routing(fields, "num_experts", 64, 6, is_normalized=True, scoring="sigmoid"),
        is_corrected=True,
        scale=fields.number("route_scale", 1.0),
    )
    dense, expert_ffn_size = (
        fields.integer("num_dense_layers", 1, minimum=0),
        fields.integer("moe_intermediate_size", 1408),
    )
    return AfmoeConfig(
        **vars(dataclasses.replace(base, rope_layers=tuple(window is not None for window in base.sliding_windows))),
        routing=routing,
        expert_ffn_size=expert_ffn_size,
        shared_ffn_size=expert_ffn_size * fields.integer("num_shared_experts", 2, minimum=0),
        sparse_layers=tuple(index >= dense for index in range(base.num_layers)),
        scales_embeddings=fields.flag("mup_enabled", False),
    )


def build(config: AfmoeConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    multiplier = config.hidden_size**0.5 if config.scales_embeddings else 1.0
    return build_decoder(config, scope, _build_layer, embedding_multiplier=multiplier)


def _build_layer(config: AfmoeConfig, index: int, scope: Scope) -> SandwichLayer:
    before, after, before_mlp, after_mlp = (build_norm(config, scope.at(name)) for name in _NORMS)
    attention = build_attention(config, index, scope.at("self_attn"), qk_norm="head", gate=_GATE)
    inner = scope.at("mlp")
    if config.sparse_layers[index]:
        mlp = build_sparse_mlp(config, inner, names=_NAMES, shared="shared_experts")
    else:
        mlp = build_mlp(config, inner)
    return SandwichLayer(before, attention, before_mlp, mlp, after=(after, after_mlp))
