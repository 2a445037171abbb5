"""Mellum 2: Qwen3-MoE with windows in the layers that the config lists, which have a rotary embedding of their own."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.model_config import RopeConfig
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import (
    FamilyDefaults,
    class_sizes,
    read_decoder,
    read_listed_windows,
    read_local_rope,
)
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer, read_listed_sparse_layers, read_routing

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=4,
    head_dim=128,
    rope=RopeDefaults(theta=500_000.0, layer_type="full_attention"),
    bos_token_id=None,
    eos_token_ids=(),
    attention_bias=False,
    windows=partial(read_listed_windows, absent=1024, slides=False),
    sizes=class_sizes(98304, 2304, 7168, 28, 32, 131072),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MellumConfig(SparseConfig):
    """A decoder of Mellum 2's form.

    Attributes:
        local_rope: Rotary embedding of the layers with a window.
    """

    local_rope: RopeConfig


def config_from_hf(fields: ConfigFields, architecture: str) -> MellumConfig:
    """Read a config of MellumForCausalLM: ``mlp_layer_types`` says which layers are dense, by default none."""
    fields = fields.with_aliases({"num_local_experts": "num_experts"})
    base = read_decoder(fields, architecture, _DEFAULTS)
    return MellumConfig(
        **vars(base),
        routing=read_routing(fields, "num_experts", 64, 8, is_normalized=fields.flag("norm_topk_prob", True)),
        expert_ffn_size=fields.integer("moe_intermediate_size", 896),
        sparse_layers=read_listed_sparse_layers(fields, base.num_layers, num_dense=0),
        local_rope=read_local_rope(fields, base, _DEFAULTS),
    )


def build(config: MellumConfig, scope: Scope) -> CausalLM:
    """Return the module: full layers have the first rotary embedding, layers with a window the second."""
    ropes = (config.rope, config.local_rope)
    return build_decoder(config, scope, _build_layer, ropes=ropes, ignored=(r"mtp\..*",))


def _build_layer(config: MellumConfig, index: int, scope: Scope) -> PreNormLayer:
    rope = int(config.sliding_windows[index] is not None)
    attention = build_attention(config, index, scope.at("self_attn"), qk_norm="head", rope=rope)
    return build_sparse_layer(config, index, scope, attention=attention)
