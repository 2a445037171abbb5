"""Hy3: Qwen3's attention, and experts whose choice a bias balances, with a shared one beside them."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder, extra_layers
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.sparse_decoder import (
    SparseConfig,
    build_sparse_layer,
    read_listed_sparse_layers,
    read_routing,
)

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope=RopeDefaults(theta=11_158_840.0),
    bos_token_id=None,
    eos_token_ids=(),
    attention_bias=False,
    mlp_bias=False,
    sizes=class_sizes(120832, 4096, 13312, 80, 64, 131072),
)
_NAMES: Final = ExpertNames(router="router.gate", correction="expert_bias")


def config_from_hf(fields: ConfigFields, architecture: str) -> SparseConfig:
    """Read a config of HYV3ForCausalLM: ``mlp_layer_types`` says which layers are dense, by default the first."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    count = "num_local_experts" if fields.is_given("num_local_experts") else "num_experts"
    routing = read_routing(fields, count, 192, 8, is_normalized=True, scoring="sigmoid")
    expert_ffn_size = fields.integer("moe_intermediate_size", 1536)
    return SparseConfig(
        **vars(base),
        routing=dataclasses.replace(routing, is_corrected=True, scale=fields.number("router_scaling_factor", 2.826)),
        expert_ffn_size=expert_ffn_size,
        shared_ffn_size=expert_ffn_size * fields.integer("num_shared_experts", 1, minimum=0),
        sparse_layers=read_listed_sparse_layers(fields, base.num_layers),
        num_extra_layers=fields.integer("num_nextn_predict_layers", 1, minimum=0),
    )


def build(config: SparseConfig, scope: Scope) -> CausalLM:
    """Return the module, with a norm of each query and key head."""
    layer = partial(build_sparse_layer, qk_norm="head", names=_NAMES, shared="shared_mlp")
    return build_decoder(config, scope, layer, ignored=extra_layers(config.num_layers, config.num_extra_layers))
