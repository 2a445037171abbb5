"""StarCoder 2 (arXiv:2402.19173): layer norms, a plain MLP, and biases in all of them."""

from functools import partial
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
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_one_window

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=2,
    norm_eps=1e-5,
    tie_embeddings=True,
    bos_token_id=50256,
    eos_token_ids=(50256,),
    activation="gelu_pytorch_tanh",
    has_gates=False,
    attention_bias=True,
    mlp_bias=True,
    windows=read_one_window,
    sizes=class_sizes(49152, 3072, 12288, 30, 24, 4096),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of Starcoder2ForCausalLM: ``use_bias`` is of all projections."""
    has_bias = fields.flag("use_bias", True)
    given = fields.with_aliases({"norm_epsilon": "rms_norm_eps"})
    return read_decoder(given.replaced({"attention_bias": has_bias, "mlp_bias": has_bias}), architecture, _DEFAULTS)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_with(config, scope, ("c_fc", "c_proj"))


def build_with(config: DecoderConfig, scope: Scope, mlp: tuple[str, str]) -> CausalLM:
    """Build a model with layer norms; ``mlp`` are the names of the MLP's two projections."""
    norm = build_layer_norm(config, scope.at("model.norm"))
    return build_decoder(config, scope, partial(_build_layer, mlp=mlp), norm=norm)


def _build_layer(config: DecoderConfig, index: int, scope: Scope, *, mlp: tuple[str, str]) -> LayerNormLayer:
    return build_layer_norm_layer(config, index, scope, build_plain_mlp(config, scope.at("mlp"), *mlp))
