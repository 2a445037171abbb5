"""Llama 2, 3, 3.1, 3.2 and models of the same form (Yi, Vicuna, TinyLlama, SmolLM)."""

from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder

_DEFAULTS: Final = FamilyDefaults(attention_bias=False, mlp_bias=False)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of LlamaForCausalLM: ``attention_bias`` applies to all four projections."""
    return read_decoder(fields, architecture, _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope)
