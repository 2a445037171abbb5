"""Granite 3 and 4 dense: Llama with constants that scale embeddings, attention, residual branches and logits."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Final

from jaxserve.layers.decoder import Layer
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder, build_layer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, read_decoder

_DEFAULTS: Final = FamilyDefaults(attention_bias=False, mlp_bias=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """A dense decoder with Granite's constants.

    Attributes:
        attention_scale: Factor of query-key scores, replacing 1 / sqrt(H).
        embedding_multiplier: Factor of the embeddings.
        residual_multiplier: Factor of each branch before it is added.
        logits_divisor: Divisor of the logits.
    """

    attention_scale: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float


def config_from_hf(fields: ConfigFields, architecture: str) -> GraniteConfig:
    """Read a config of GraniteForCausalLM; ``attention_multiplier`` replaces 1 / sqrt(H)."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    return GraniteConfig(
        **vars(base),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )


def build(config: GraniteConfig, scope: Scope) -> CausalLM:
    """Return the module, with the config's constants."""
    return build_with(config, scope, build_layer)


def build_with(config: GraniteConfig, scope: Scope, build: Callable[..., Layer]) -> CausalLM:
    """Return the module whose layers ``build`` builds."""
    layer = partial(build, scale=config.attention_scale, residual_multiplier=config.residual_multiplier)
    return build_decoder(
        config,
        scope,
        layer,
        embedding_multiplier=config.embedding_multiplier,
        logits_divisor=config.logits_divisor,
    )
