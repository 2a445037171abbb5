"""HyperCLOVA X: Granite's constants, and norms before and after each branch."""

import dataclasses
from typing import Final

from jaxserve.layers.decoder import RMSNormLayer
from jaxserve.layers.parallel import Scope
from jaxserve.models import granite
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import build_attention, build_layer, build_mlp
from jaxserve.models.gemma2 import build_sandwich_layer
from jaxserve.models.granite import GraniteConfig
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import class_sizes

_SIZES: Final = class_sizes(32000, 4096, 11008, 32, 32, 2048)
_NORMS: Final = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperClovaXConfig(GraniteConfig):
    """A decoder of HyperCLOVA X's form.

    Attributes:
        has_post_norms: Whether norms follow each branch.
    """

    has_post_norms: bool


def config_from_hf(fields: ConfigFields, architecture: str) -> HyperClovaXConfig:
    """Read a config of HyperCLOVAXForCausalLM: ``logits_scaling`` is a factor, a divisor in Granite."""
    base = granite.config_from_hf(fields.with_defaults(_SIZES), architecture)
    scale = fields.number("attention_multiplier", base.head_dim**-0.5)
    base = dataclasses.replace(base, attention_scale=scale, logits_divisor=1.0 / base.logits_divisor)
    return HyperClovaXConfig(**vars(base), has_post_norms=fields.flag("use_post_norm", True))


def build(config: HyperClovaXConfig, scope: Scope) -> CausalLM:
    """Return the module, with the config's constants."""
    return granite.build_with(config, scope, _build_layer)


def _build_layer(
    config: HyperClovaXConfig, index: int, scope: Scope, *, scale: float, residual_multiplier: float
) -> RMSNormLayer:
    if not config.has_post_norms:
        return build_layer(config, index, scope, scale=scale, residual_multiplier=residual_multiplier)
    attention = build_attention(config, index, scope.at("self_attn"), scale=scale)
    mlp = build_mlp(config, scope.at("mlp"))
    return build_sandwich_layer(config, scope, _NORMS, attention, mlp, residual_multiplier=residual_multiplier)
