"""GLM-4-0414 and Z1: GLM-4 with norms before and after each branch."""

from jaxserve.layers.parallel import Scope
from jaxserve.models import glm
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder, build_mlp, build_norm
from jaxserve.models.gemma2 import SandwichLayer
from jaxserve.models.hf_config import ConfigFields


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of Glm4ForCausalLM, which has the fields of GlmForCausalLM."""
    return glm.config_from_hf(fields, architecture)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module; ``post_attention_layernorm`` is the norm before the MLP."""
    return build_decoder(config, scope, _build_layer)


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> SandwichLayer:
    names = ("input", "post_self_attn", "post_attention", "post_mlp")
    before, after, before_mlp, after_mlp = (build_norm(config, scope.at(f"{name}_layernorm")) for name in names)
    attention = glm.build_glm_attention(config, index, scope.at("self_attn"))
    mlp = build_mlp(config, scope.at("mlp"), glm.GATE_UP)
    return SandwichLayer(before, attention, before_mlp, mlp, after=(after, after_mlp))
