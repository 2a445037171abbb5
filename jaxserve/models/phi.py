"""Phi-1, 1.5 and 2: attention and a plain MLP read the same layer norm, with biases in all of them."""

from typing import Final

from jaxserve.layers.decoder import LayerNormLayer
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import (
    DecoderConfig,
    build_decoder,
    build_layer_norm,
    build_layer_norm_layer,
    build_plain_mlp,
)
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hf_rope import RopeDefaults

_DEFAULTS: Final = FamilyDefaults(
    norm_eps=1e-5,
    rope=RopeDefaults(is_partial=True, partial_factor=0.5),
    activation="gelu_new",
    has_gates=False,
    attention_bias=True,
    mlp_bias=True,
    sizes=class_sizes(51200, 2048, 8192, 24, 32, 2048),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of PhiForCausalLM."""
    if fields.flag("qk_layernorm", False):
        fields.note("qk_layernorm", "expected false: queries and keys are not normalized")
    fields = fields.with_aliases({"layer_norm_eps": "rms_norm_eps"})
    return read_decoder(fields.replaced({"attention_bias": None, "mlp_bias": None}), architecture, _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    norm = build_layer_norm(config, scope.at("model.final_layernorm"))
    return build_decoder(config, scope, _build_layer, norm=norm, head_bias=True)


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> LayerNormLayer:
    mlp = build_plain_mlp(config, scope.at("mlp"), "fc1", "fc2")
    return build_layer_norm_layer(config, index, scope, mlp, is_parallel=True, out="dense")
