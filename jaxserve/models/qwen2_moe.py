"""Qwen2-MoE: Qwen2 with experts and a gated shared expert in some layers."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_late_windows
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer, read_routing, read_sparse_layers

_DEFAULTS: Final = FamilyDefaults(num_kv_heads=16, bos_token_id=None, eos_token_ids=(), windows=read_late_windows)


def config_from_hf(fields: ConfigFields, architecture: str) -> SparseConfig:
    """Read a config of Qwen2MoeForCausalLM: ``qkv_bias`` is on unless it says otherwise."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    given = dataclasses.replace(base, qkv_bias=fields.flag("qkv_bias", True))
    is_normalized = fields.flag("norm_topk_prob", False)
    return SparseConfig(
        **vars(given),
        routing=read_routing(fields, "num_experts", 60, 4, is_normalized=is_normalized),
        expert_ffn_size=fields.integer("moe_intermediate_size", 1408),
        shared_ffn_size=fields.integer("shared_expert_intermediate_size", 5632),
        sparse_layers=read_sparse_layers(fields, base.num_layers),
    )


def build(config: SparseConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, partial(build_sparse_layer, shared_gate="shared_expert_gate"))
