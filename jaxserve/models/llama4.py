"""Llama 4: layers without a rotary embedding among those with one, and experts whose input is weighted.

Layers that rotate attend within chunks of ``attention_chunk_size`` tokens, the others to the whole context.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final

from jaxserve.layers.attention import PositionScale
from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames, SharedExpert, SparseMLP
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_decoder, build_layer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_layer_indices, read_layer_list
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.smollm3 import read_rope_layers
from jaxserve.models.sparse_decoder import SparseConfig, read_routing

_CHUNK: Final = 8192
_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope=RopeDefaults(theta=500_000.0),
    attention_bias=False,
    windows=lambda _, num_layers: (None,) * num_layers,
    sizes=class_sizes(202048, 5120, 8192, 48, 40, 131072),
)
_NAMES: Final = ExpertNames(router="router")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama4Config(SparseConfig):
    """A decoder of Llama 4's form; ``ffn_size`` is that of the layers without experts.

    Attributes:
        has_qk_norm: Whether query and key heads of the layers that rotate are normalized.
        position_scale: Factor of queries of the layers that do not rotate, by their position; None for none.
        chunks: For each layer, the tokens of the chunks within which it attends; None for the whole context.
    """

    has_qk_norm: bool
    position_scale: PositionScale | None
    chunks: tuple[int | None, ...]


def config_from_hf(fields: ConfigFields, architecture: str) -> Llama4Config:
    """Read a config of Llama4ForCausalLM; in ``no_rope_layers`` a 1 is a layer *with* a rotary embedding."""
    if fields.raw.get("no_rope_layers") == []:
        fields = fields.replaced({"no_rope_layers": None})
    base = read_decoder(fields.replaced({"layer_types": None}), architecture, _DEFAULTS)
    is_tuned = fields.flag("attn_temperature_tuning", True)
    scale = PositionScale(fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192), offset=1)
    routing = read_routing(fields, "num_local_experts", 16, 1, is_normalized=False, scoring="sigmoid")
    rotates = read_rope_layers(fields, base.num_layers)
    return Llama4Config(
        **{
            **vars(base),
            "ffn_size": fields.integer("intermediate_size_mlp", 16384),
            "rope_layers": rotates,
        },
        routing=dataclasses.replace(routing, weighs_inputs=True),
        expert_ffn_size=base.ffn_size,
        shared_ffn_size=base.ffn_size,
        sparse_layers=_read_sparse_layers(fields, base.num_layers),
        has_qk_norm=fields.flag("use_qk_norm", True),
        position_scale=scale if is_tuned else None,
        chunks=_read_chunks(fields, rotates),
    )


def _read_chunks(fields: ConfigFields, rotates: Sequence[bool]) -> tuple[int | None, ...]:
    """Return the tokens of each layer's chunks: of those that ``layer_types`` names, or of those that rotate."""
    chunk = fields.nullable_integer("attention_chunk_size", _CHUNK)
    types = read_layer_list(fields, "layer_types", len(rotates), ("full_attention", "chunked_attention"))
    is_chunked = rotates if types is None else [each == "chunked_attention" for each in types]
    return tuple(chunk if each else None for each in is_chunked)


def _read_sparse_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: those of ``moe_layers``, or every ``interleave_moe_layer_step``-th."""
    step = fields.integer("interleave_moe_layer_step", 1)
    every = tuple((layer + 1) % step == 0 for layer in range(num_layers))
    return read_layer_indices(fields, "moe_layers", num_layers) or every


def build(config: Llama4Config, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, _build_layer)


def _build_layer(config: Llama4Config, index: int, scope: Scope) -> PreNormLayer:
    """Build a layer; queries and keys may be normalized before they rotate, because their norms have no weights."""
    rotates = config.rope_layers[index]
    attention = build_attention(
        config,
        index,
        scope.at("self_attn"),
        qk_norm="head" if config.has_qk_norm and rotates else "none",
        has_norm_weights=False,
        paired_dim=config.head_dim if rotates else 0,
        position_scale=None if rotates else config.position_scale,
        chunk=config.chunks[index],
    )
    inner = scope.at("feed_forward")
    if not config.sparse_layers[index]:
        dense = GatedMLP(config.hidden_size, config.ffn_size, activation=config.activation, scope=inner)
        return build_layer(config, index, scope, attention=attention, mlp=dense)
    sizes = (config.hidden_size, config.expert_ffn_size)
    shared = SharedExpert(GatedMLP(*sizes, activation=config.activation, scope=inner.at("shared_expert")), None)
    sparse = SparseMLP(*sizes, config.routing, scope=inner, names=_NAMES, shared=shared)
    return build_layer(config, index, scope, attention=attention, mlp=sparse)
