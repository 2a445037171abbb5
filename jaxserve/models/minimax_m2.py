"""MiniMax M2: queries and keys normalized over all heads, half of each head rotates, and experts in every layer."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.layers.sparse_mlp import ExpertNames
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_decoder, extra_layers
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_layer_list
from jaxserve.models.hf_rope import RopeDefaults
from jaxserve.models.sparse_decoder import SparseConfig, build_sparse_layer, read_routing

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    head_dim=128,
    rope=RopeDefaults(theta=5_000_000.0, is_partial=True),
    bos_token_id=200034,
    eos_token_ids=(200020,),
    sizes=class_sizes(200064, 3072, 1536, 62, 48, 196608),
)
_NAMES: Final = ExpertNames(("experts.{}.w1", "experts.{}.w3"), "experts.{}.w2", correction="e_score_correction_bias")


def config_from_hf(fields: ConfigFields, architecture: str) -> SparseConfig:
    """Read a config of MiniMaxM2ForCausalLM: ``rotary_dim`` is the number of features of a head that rotate."""
    if fields.is_given("rotary_dim") and not fields.is_given("partial_rotary_factor"):
        share = fields.integer("rotary_dim") / fields.integer("head_dim", _DEFAULTS.head_dim)
        fields = fields.with_defaults({"partial_rotary_factor": share})
    base = read_decoder(fields, architecture, _DEFAULTS)
    routing = read_routing(fields, "num_local_experts", 256, 8, is_normalized=True, scoring="sigmoid")
    read_layer_list(fields, "attn_type_list", base.num_layers, (1,))  # 0: linear attention, of MiniMax-01
    modules = fields.integer("num_mtp_modules", 0, minimum=0)
    return SparseConfig(
        **vars(base),
        routing=dataclasses.replace(routing, is_corrected=True),
        expert_ffn_size=base.ffn_size,
        sparse_layers=(True,) * base.num_layers,
        num_extra_layers=modules * fields.integer("mtp_transformer_layers", 1),
    )


def build(config: SparseConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    layer = partial(build_sparse_layer, qk_norm="width", module="block_sparse_moe", names=_NAMES)
    return build_decoder(config, scope, layer, ignored=extra_layers(config.num_layers, config.num_extra_layers))
