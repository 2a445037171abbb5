"""Nemotron-3, Nemotron-4 and Minitron, and Jais 2: layer norms, and squared ReLU in an MLP without gates."""

import dataclasses
from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models import starcoder2
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hf_rope import RopeDefaults

_NEMOTRON: Final = FamilyDefaults(
    norm_eps=1e-5,
    norm_offset=1.0,
    rope=RopeDefaults(is_partial=True, partial_factor=0.5),
    bos_token_id=2,
    eos_token_ids=(3,),
    activation="relu2",
    has_gates=False,
    attention_bias=False,
    mlp_bias=False,
    sizes=class_sizes(256000, 6144, 24576, 32, 48, 4096),
)
_JAIS2: Final = dataclasses.replace(
    _NEMOTRON,
    norm_offset=0.0,
    rope=RopeDefaults(),
    bos_token_id=0,
    eos_token_ids=(150024,),
    attention_bias=True,
    mlp_bias=True,
    sizes=class_sizes(150272, 3328, 26624, 32, 26, 8192),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of NemotronForCausalLM, whose norms multiply by 1 + weight, or of Jais2ForCausalLM."""
    if architecture == "Jais2ForCausalLM":
        return read_decoder(fields.with_aliases({"layer_norm_eps": "rms_norm_eps"}), architecture, _JAIS2)
    return read_decoder(fields.with_aliases({"norm_eps": "rms_norm_eps"}), architecture, _NEMOTRON)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module, of StarCoder 2's layers."""
    return starcoder2.build_with(config, scope, ("up_proj", "down_proj"))
