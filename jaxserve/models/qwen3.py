"""Qwen3 dense: an explicit head size, and each query and key head normalized before RoPE."""

from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder, build_layer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_late_windows

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=32,
    head_dim=128,
    bos_token_id=None,
    eos_token_ids=(),
    attention_bias=False,
    windows=read_late_windows,
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of Qwen3ForCausalLM: ``attention_bias`` applies to all four projections."""
    return read_decoder(fields, architecture, _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module, with a norm of each query and key head."""
    return build_decoder(config, scope, partial(build_layer, qk_norm="head"))
