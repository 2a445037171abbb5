"""GLM-4 (9B, 2024): half of each head rotates, in pairs of neighbours; gate and up are one tensor in checkpoints."""

import dataclasses
from typing import Final

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.grouped_query_attention import GroupedQueryAttention
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_layer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hf_rope import RopeDefaults

GATE_UP: Final = ("gate_up_proj",)
_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=2,
    head_dim=128,
    norm_eps=1.5625e-7,
    rope=RopeDefaults(is_partial=True, partial_factor=0.5),
    bos_token_id=None,
    eos_token_ids=(151329, 151336, 151338),
    attention_bias=True,
    sizes=class_sizes(151552, 4096, 13696, 40, 32, 131072),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of GlmForCausalLM or Glm4ForCausalLM: ``attention_bias`` is of queries, keys and values alone."""
    return dataclasses.replace(read_decoder(fields, architecture, _DEFAULTS), out_bias=False)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, _build_layer)


def build_glm_attention(config: DecoderConfig, index: int, scope: Scope) -> GroupedQueryAttention:
    """Build attention whose features rotate in pairs of neighbours."""
    return build_attention(config, index, scope, paired_dim=config.rope.rotary_dim)


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> PreNormLayer:
    attention = build_glm_attention(config, index, scope.at("self_attn"))
    return build_layer(config, index, scope, gate_up=GATE_UP, attention=attention)
