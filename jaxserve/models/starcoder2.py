"""StarCoder 2 (arXiv:2402.19173): layer norms, a plain MLP, and biases in all of them."""

from functools import partial
from typing import Final

from jaxserve.layers.decoder import LayerNormLayer
from jaxserve.layers.mlp import PlainMLP
from jaxserve.layers.norm import LayerNorm
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_one_window

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=2,
    norm_eps=1e-5,
    tie_embeddings=True,
    bos_token_id=50256,
    eos_token_ids=(50256,),
    activation="gelu_pytorch_tanh",
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
    norm = LayerNorm(config.hidden_size, eps=config.norm_eps, scope=scope.at("model.norm"))
    return build_decoder(config, scope, _build_layer, norm=norm)


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> LayerNormLayer:
    norm = partial(LayerNorm, config.hidden_size, eps=config.norm_eps)
    return LayerNormLayer(
        norm(scope=scope.at("input_layernorm")),
        build_attention(config, index, scope.at("self_attn")),
        norm(scope=scope.at("post_attention_layernorm")),
        PlainMLP(
            config.hidden_size,
            config.ffn_size,
            activation=config.activation,
            scope=scope.at("mlp"),
            up="c_fc",
            down="c_proj",
            bias=config.mlp_bias,
        ),
    )
