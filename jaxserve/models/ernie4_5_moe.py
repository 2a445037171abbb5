"""ERNIE 4.5 with experts: a softmax router whose choice a bias balances, and shared experts beside them."""

import dataclasses
from typing import Final

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_decoder
from jaxserve.models.ernie4_5 import read_ernie
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer, read_routing

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=4,
    norm_eps=1e-5,
    rope=RopeDefaults(theta=500_000.0),
    tie_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    sizes=class_sizes(103424, 2560, 12288, 28, 20, 131072),
)
_NAMES: Final = ExpertNames(correction="moe_statics.e_score_correction_bias", is_correction_row=True)


def config_from_hf(fields: ConfigFields, architecture: str) -> SparseConfig:
    """Read a config of Ernie4_5_MoeForCausalLM; layers for multi-token prediction are not loaded."""
    fields = fields.with_aliases({"moe_k": "num_experts_per_tok", "num_experts": "moe_num_experts"})
    base = read_ernie(fields, architecture, _DEFAULTS)
    if base.mlp_bias:
        fields.note("use_bias", "expected false for a model with experts")
    routing = read_routing(fields, "moe_num_experts", 64, 6, is_normalized=True)
    expert_ffn_size = fields.integer("moe_intermediate_size", 1536)
    first, every = fields.integer("moe_layer_start_index", 1, minimum=0), fields.integer("moe_layer_interval", 1)
    last = fields.integer("moe_layer_end_index", -1, minimum=-1)
    last = base.num_layers - 1 if last == -1 else last
    return SparseConfig(
        **vars(base),
        routing=dataclasses.replace(routing, is_corrected=True),
        expert_ffn_size=expert_ffn_size,
        shared_ffn_size=expert_ffn_size * fields.integer("moe_num_shared_experts", 2, minimum=0),
        sparse_layers=tuple(first <= layer <= last and (layer + 1) % every == 0 for layer in range(base.num_layers)),
    )


def build(config: SparseConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, _build_layer, ignored=(r"(model\.)?mtp_.*",))


def _build_layer(config: SparseConfig, index: int, scope: Scope) -> PreNormLayer:
    attention = build_attention(config, index, scope.at("self_attn"), paired_dim=config.head_dim)
    return build_sparse_layer(config, index, scope, names=_NAMES, shared="shared_experts", attention=attention)
