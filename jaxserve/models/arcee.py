"""Arcee's AFM: Llama with squared ReLU in an MLP without gates."""

from typing import Final

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder, build_layer, build_plain_mlp
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder

_DEFAULTS: Final = FamilyDefaults(
    norm_eps=1e-5,
    bos_token_id=128000,
    eos_token_ids=(128001,),
    activation="relu2",
    has_gates=False,
    attention_bias=False,
    mlp_bias=False,
    sizes=class_sizes(32000, 2560, 18432, 32, 32, 4096),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of ArceeForCausalLM."""
    return read_decoder(fields, architecture, _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, _build_layer)


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> PreNormLayer:
    return build_layer(config, index, scope, mlp=build_plain_mlp(config, scope.at("mlp")))
