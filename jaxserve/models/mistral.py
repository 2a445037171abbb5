"""Mistral 7B, Nemo and Small: Llama with one sliding window in all layers, or none."""

from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_one_window

_DEFAULTS: Final = FamilyDefaults(num_kv_heads=8, windows=partial(read_one_window, absent=4096))


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of MistralForCausalLM: a null ``sliding_window`` means none, a missing one 4096."""
    return read_decoder(fields, architecture, _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope)
