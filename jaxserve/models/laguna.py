"""Laguna: Mellum 2 with gates of the attention output, query heads that differ in number, and a shared expert."""

import dataclasses
from functools import partial
from typing import Any, Final

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.grouped_query_attention import OutputGate
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import (
    FamilyDefaults,
    class_sizes,
    read_decoder,
    read_listed_windows,
    read_local_rope,
)
from jaxserve.models.hf_rope import RopeDefaults, with_default_rope
from jaxserve.models.mellum import MellumConfig
from jaxserve.models.sparse_decoder import build_sparse_layer, read_listed_sparse_layers, read_routing

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    head_dim=128,
    rope=RopeDefaults(theta=500_000.0, is_partial=True, layer_type="full_attention"),
    bos_token_id=None,
    eos_token_ids=(),
    attention_bias=False,
    windows=partial(read_listed_windows, absent=512, slides=False),
    sizes=class_sizes(100352, 2048, 8192, 40, 48, 131072),
)
_ROPES: Final[dict[str, Any]] = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_NAMES: Final = ExpertNames(correction="experts.e_score_correction_bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagunaConfig(MellumConfig):
    """A decoder of Laguna's form.

    Attributes:
        layer_heads: N of each layer.
        has_head_gates: Whether there is one gate for each head, rather than for each feature of each head.
    """

    layer_heads: tuple[int, ...]
    has_head_gates: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> LagunaConfig:
    """Read a config of LagunaForCausalLM: ``mlp_layer_types`` says which layers are dense, by default the first."""
    fields = with_default_rope(fields, _ROPES)
    base = read_decoder(fields, architecture, _DEFAULTS)
    gating: object = fields.raw.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        fields.note("gating", f"expected true, per-head or per-element, got {gating!r}")
    if fields.flag("moe_apply_router_weight_on_input", False):
        fields.note("moe_apply_router_weight_on_input", "expected false: weights multiply the experts' outputs")
    routing = dataclasses.replace(
        read_routing(fields, "num_experts", 256, 8, is_normalized=True, scoring="sigmoid"),
        is_corrected=True,
        scale=fields.number("moe_routed_scaling_factor", 1.0),
        logit_cap=fields.number("moe_router_logit_softcapping", 0.0, is_zero_allowed=True) or None,
    )
    return LagunaConfig(
        **vars(base),
        routing=routing,
        expert_ffn_size=fields.integer("moe_intermediate_size", 512),
        shared_ffn_size=fields.integer("shared_expert_intermediate_size", 512),
        sparse_layers=read_listed_sparse_layers(fields, base.num_layers),
        local_rope=read_local_rope(fields, base, _DEFAULTS),
        layer_heads=_read_heads(fields, base),
        has_head_gates=gating != "per-element",
    )


def _read_heads(fields: ConfigFields, base: DecoderConfig) -> tuple[int, ...]:
    """Read N of each layer, which K divides."""
    given, count = fields.items("num_attention_heads_per_layer"), base.num_kv_heads
    if given is None:
        return (base.num_heads,) * base.num_layers
    heads = tuple(each for each in given if isinstance(each, int) and each > 0 and each % count == 0)
    if not len(heads) == len(given) == base.num_layers:
        expected = f"expected {base.num_layers} multiples of the {count} key/value heads, one per layer"
        fields.note("num_attention_heads_per_layer", f"{expected}, got {[*given]}")
        return (base.num_heads,) * base.num_layers
    return heads


def build(config: LagunaConfig, scope: Scope) -> CausalLM:
    """Return the module: full layers have the first rotary embedding, layers with a window the second."""
    return build_decoder(config, scope, _build_layer, ropes=(config.rope, config.local_rope))


def _build_layer(config: LagunaConfig, index: int, scope: Scope) -> PreNormLayer:
    attention = build_attention(
        dataclasses.replace(config, num_heads=config.layer_heads[index]),
        index,
        scope.at("self_attn"),
        qk_norm="head",
        rope=int(config.sliding_windows[index] is not None),
        gate=OutputGate("g_proj", "softplus", is_per_head=config.has_head_gates),
    )
    return build_sparse_layer(config, index, scope, attention=attention, names=_NAMES)
