"""VaultGemma: Gemma 2 without the norms after each branch."""

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.parallel import Scope
from jaxserve.models import gemma, gemma2
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_decoder, build_layer
from jaxserve.models.gemma2 import Gemma2Config
from jaxserve.models.hf_config import ConfigFields


def config_from_hf(fields: ConfigFields, architecture: str) -> Gemma2Config:
    """Read a config of VaultGemmaForCausalLM, which has the fields of Gemma2ForCausalLM."""
    return gemma2.config_from_hf(fields, architecture)


def build(config: Gemma2Config, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(
        config,
        scope,
        _build_layer,
        embedding_multiplier=gemma.embedding_scale(config, scope),
        logits_soft_cap=config.logits_soft_cap,
    )


def _build_layer(config: Gemma2Config, index: int, scope: Scope) -> PreNormLayer:
    attention = build_attention(
        config, index, scope.at("self_attn"), scale=config.attention_scale, soft_cap=config.attention_soft_cap
    )
    norms = ("input_layernorm", "pre_feedforward_layernorm")
    return build_layer(config, index, scope, attention=attention, norms=norms)
