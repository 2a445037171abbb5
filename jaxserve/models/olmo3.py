"""OLMo-3: OLMo-2 with windows in three of four layers, and a rotary embedding of their own in the others."""

import dataclasses
from functools import partial
from typing import Final

from jaxserve.layers.model_config import RopeConfig
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder, read_repeated_windows
from jaxserve.models.hf_rope import RopeDefaults, read_rope
from jaxserve.models.olmo2 import PostNormLayer, build_post_norm_layer

_THETA: Final = 500_000.0
_DEFAULTS: Final = FamilyDefaults(
    norm_eps=1e-5,
    rope=RopeDefaults(theta=_THETA, layer_type="full_attention"),
    bos_token_id=None,
    eos_token_ids=(50279,),
    attention_bias=False,
    windows=partial(read_repeated_windows, pattern=4),
    sizes=class_sizes(50304, 4096, 11008, 32, 32, 2048),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo3Config(DecoderConfig):
    """A decoder of OLMo-3's form.

    Attributes:
        local_rope: Rotary embedding of the layers with a window.
    """

    local_rope: RopeConfig


def config_from_hf(fields: ConfigFields, architecture: str) -> Olmo3Config:
    """Read a config of Olmo3ForCausalLM: ``rope_scaling`` and ``rope_theta`` of older files are of the full layers."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    local = RopeConfig(theta=_THETA, rotary_dim=base.head_dim, max_positions=base.rope.max_positions)
    if fields.nested("rope_parameters").is_given("sliding_attention"):
        defaults = RopeDefaults(theta=_THETA, layer_type="sliding_attention")
        local = read_rope(fields.with_defaults(_DEFAULTS.sizes), base.head_dim, defaults)
    return Olmo3Config(**vars(base), local_rope=local)


def build(config: Olmo3Config, scope: Scope) -> CausalLM:
    """Return the module: full layers have the first rotary embedding, layers with a window the second."""
    return build_decoder(config, scope, _build_layer, ropes=(config.rope, config.local_rope))


def _build_layer(config: Olmo3Config, index: int, scope: Scope) -> PostNormLayer:
    rope = int(config.sliding_windows[index] is not None)
    return build_post_norm_layer(config, index, scope, qk_norm="width", rope=rope)
