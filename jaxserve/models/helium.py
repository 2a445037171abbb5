"""Helium: Llama whose features rotate in pairs of neighbours."""

import dataclasses
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models import ernie4_5
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hf_rope import RopeDefaults

_DEFAULTS: Final = FamilyDefaults(
    head_dim=128,
    norm_eps=1e-8,
    rope=RopeDefaults(theta=100_000.0),
    attention_bias=False,
    mlp_bias=False,
    sizes=class_sizes(48000, 2560, 7040, 24, 20, 4096),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of HeliumForCausalLM: ``attention_bias`` is of queries, keys and values alone."""
    return dataclasses.replace(read_decoder(fields, architecture, _DEFAULTS), out_bias=False)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module, of ERNIE's layers."""
    return ernie4_5.build(config, scope)
