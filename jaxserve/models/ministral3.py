"""Ministral 3: Llama with YaRN, and queries that grow with the logarithm of their position."""

import dataclasses
from typing import Any, Final

from jaxserve.layers.attention import PositionScale
from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_layer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_one_window
from jaxserve.models.hf_rope import RopeDefaults, rope_fields, with_default_rope

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope=RopeDefaults(theta=1_000_000.0),
    windows=read_one_window,
    sizes=class_sizes(131072, 4096, 14336, 34, 32, 262144),
)
_YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    """A decoder of Ministral 3's form.

    Attributes:
        position_scale: Factor of queries by their position; None for none.
    """

    position_scale: PositionScale | None


def config_from_hf(fields: ConfigFields, architecture: str) -> Ministral3Config:
    """Read a config of Ministral3ForCausalLM, which has the factor of queries among the fields of YaRN."""
    fields = with_default_rope(fields, _YARN)
    base = read_decoder(fields, architecture, _DEFAULTS)
    return Ministral3Config(**vars(base), position_scale=read_position_scale(fields, base))


def read_position_scale(fields: ConfigFields, base: DecoderConfig) -> PositionScale | None:
    """Read ``llama_4_scaling_beta``; the interval is the length that YaRN extends."""
    scaling = rope_fields(fields)
    if not scaling.is_given("llama_4_scaling_beta"):
        return None
    interval = base.rope.original_max_positions or base.rope.max_positions
    return PositionScale(scaling.number("llama_4_scaling_beta", is_zero_allowed=True), interval)


def build(config: Ministral3Config, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, _build_layer)


def _build_layer(config: Ministral3Config, index: int, scope: Scope) -> PreNormLayer:
    attention = build_attention(config, index, scope.at("self_attn"), position_scale=config.position_scale)
    return build_layer(config, index, scope, attention=attention)
