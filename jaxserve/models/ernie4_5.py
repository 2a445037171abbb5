"""ERNIE 4.5, dense: Llama whose heads rotate in pairs of neighbours."""

from typing import Final

from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_layer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hf_rope import RopeDefaults

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=2,
    head_dim=128,
    norm_eps=1e-5,
    rope=RopeDefaults(theta=500_000.0),
    tie_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    sizes=class_sizes(103424, 1024, 3072, 18, 16, 131072),
)


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of Ernie4_5ForCausalLM: ``use_bias`` is of all projections."""
    return read_ernie(fields, architecture, _DEFAULTS)


def read_ernie(fields: ConfigFields, architecture: str, defaults: FamilyDefaults) -> DecoderConfig:
    """Read the fields that both of ERNIE's families share."""
    has_bias = fields.flag("use_bias", False)
    return read_decoder(fields.replaced({"attention_bias": has_bias, "mlp_bias": has_bias}), architecture, defaults)


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, _build_layer)


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> PreNormLayer:
    attention = build_attention(config, index, scope.at("self_attn"), paired_dim=config.head_dim)
    return build_layer(config, index, scope, attention=attention)
