"""Seed-OSS: Llama with biases of queries, keys and values, and an explicit head size."""

import dataclasses
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    head_dim=128,
    bos_token_id=0,
    attention_bias=True,
    mlp_bias=False,
    sizes=class_sizes(155136, 4096, 27648, 64, 80, 524288),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of SeedOssForCausalLM: ``attention_out_bias`` is of the output projection."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    return dataclasses.replace(base, out_bias=fields.flag("attention_out_bias", False))


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope)
