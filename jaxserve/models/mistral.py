"""Mistral 7B, Nemo and Small: Llama with one sliding window in all layers, or none; Ministral 8B lists the layers."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_listed_windows, read_one_window

_DEFAULTS: Final = FamilyDefaults(num_kv_heads=8, windows=partial(read_one_window, absent=4096))
_MINISTRAL: Final = dataclasses.replace(
    _DEFAULTS,
    windows=partial(read_listed_windows, absent=4096, slides=True),
    sizes=class_sizes(32000, 4096, 14336, 32, 32, 131072),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of MistralForCausalLM or MinistralForCausalLM: a null ``sliding_window`` means none, a missing one
    4096."""
    return read_decoder(fields, architecture, _MINISTRAL if architecture == "MinistralForCausalLM" else _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope)
