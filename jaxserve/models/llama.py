"""Llama 2, 3, 3.1, 3.2 and models of the same form (Yi, Vicuna, TinyLlama, SmolLM)."""

import dataclasses
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder, read_one_window

_DEFAULTS: Final = FamilyDefaults()


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of LlamaForCausalLM: ``attention_bias`` applies to all four projections."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    has_bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        base,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        sliding_windows=read_one_window(fields, None, base.num_layers),
    )


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope)
