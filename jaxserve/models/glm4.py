"""GLM-4-0414 and Z1: GLM-4 with norms before and after each branch."""

from typing import Final

from jaxserve.layers.parallel import Scope
from jaxserve.models import glm
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder, build_mlp
from jaxserve.models.gemma2 import SandwichLayer, build_sandwich_layer
from jaxserve.models.hf_config import ConfigFields

_NORMS: Final = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of Glm4ForCausalLM, which has the fields of GlmForCausalLM."""
    return glm.config_from_hf(fields, architecture)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module; ``post_attention_layernorm`` is the norm before the MLP."""
    return build_decoder(config, scope, _build_layer)


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> SandwichLayer:
    attention = glm.build_glm_attention(config, index, scope.at("self_attn"))
    mlp = build_mlp(config, scope.at("mlp"), glm.GATE_UP)
    return build_sandwich_layer(config, scope, _NORMS, attention, mlp)
