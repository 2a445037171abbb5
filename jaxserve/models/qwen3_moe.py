"""Qwen3-MoE: Qwen3 with experts in some layers."""

from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, Windows, read_decoder, same_windows
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer, read_routing, read_sparse_layers


def _read_windows(fields: ConfigFields, num_layers: int) -> Windows:
    is_sliding = fields.flag("use_sliding_window", False)
    return same_windows(fields, num_layers, fields.nullable_integer("sliding_window", 4096) if is_sliding else None)


_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=4, bos_token_id=None, eos_token_ids=(), attention_bias=False, windows=_read_windows
)


def config_from_hf(fields: ConfigFields, architecture: str) -> SparseConfig:
    """Read a config of Qwen3MoeForCausalLM: ``attention_bias`` is of all four projections, a window of all layers."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    count = "num_local_experts" if fields.is_given("num_local_experts") else "num_experts"
    return SparseConfig(
        **vars(base),
        routing=read_routing(fields, count, 128, 8, is_normalized=fields.flag("norm_topk_prob", False)),
        expert_ffn_size=fields.integer("moe_intermediate_size", 768),
        sparse_layers=read_sparse_layers(fields, base.num_layers),
    )


def build(config: SparseConfig, scope: Scope) -> CausalLM:
    """Return the module, with a norm of each query and key head."""
    return build_decoder(config, scope, partial(build_sparse_layer, qk_norm="head"))
