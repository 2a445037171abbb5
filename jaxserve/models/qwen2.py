"""Qwen2 and Qwen2.5: Llama with query, key and value biases, and sliding windows in late layers if switched on."""

import dataclasses
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_late_windows

_DEFAULTS: Final = FamilyDefaults(num_kv_heads=32, bos_token_id=None, eos_token_ids=(), windows=read_late_windows)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of Qwen2ForCausalLM."""
    return dataclasses.replace(read_decoder(fields, architecture, _DEFAULTS), qkv_bias=True)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope)
