"""Command R and R7B, Aya Expanse, Command A: attention and MLP read the same norm.

In Cohere 2 (R7B and A) layers with a window rotate, full ones do not; those of Cohere (R and Aya) are full and rotate.
"""

import dataclasses
from typing import Final

from jaxserve.layers.decoder import LayerNormLayer
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_layer_norm, build_mlp
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import (
    FamilyDefaults,
    Windows,
    class_sizes,
    read_decoder,
    read_repeated_windows,
    rotate_within_windows,
    same_windows,
)
from jaxserve.models.hf_rope import RopeDefaults


def _read_windows(fields: ConfigFields, num_layers: int) -> Windows:
    return read_repeated_windows(fields, num_layers, fields.integer("sliding_window_pattern", 4))


DEFAULTS: Final = FamilyDefaults(
    norm_eps=1e-5,
    tie_embeddings=True,
    bos_token_id=5,
    eos_token_ids=(255001,),
    attention_bias=False,
    windows=_read_windows,
    sizes=class_sizes(256000, 8192, 22528, 40, 64, 8192),
)
_COHERE: Final = dataclasses.replace(DEFAULTS, rope=RopeDefaults(theta=500_000.0), windows=same_windows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohere2Config(DecoderConfig):
    """A decoder of Cohere 2's form.

    Attributes:
        logits_scale: Factor of the logits.
    """

    logits_scale: float


def config_from_hf(fields: ConfigFields, architecture: str) -> Cohere2Config:
    """Read a config of CohereForCausalLM or Cohere2ForCausalLM; ``model_max_length`` of Command R is its context."""
    fields = fields.with_aliases({"layer_norm_eps": "rms_norm_eps"})
    if fields.is_given("model_max_length"):
        fields = fields.replaced({"max_position_embeddings": fields.integer("model_max_length")})
    if architecture == "CohereForCausalLM":
        base = read_decoder(fields, architecture, _COHERE)
        if fields.flag("use_qk_norm", False):
            fields.note("use_qk_norm", "expected false: queries and keys are not normalized (Command R+ does so)")
    else:
        base = rotate_within_windows(read_decoder(fields, architecture, DEFAULTS))
    return Cohere2Config(**vars(base), logits_scale=fields.number("logit_scale", 0.0625))


def build(config: Cohere2Config, scope: Scope) -> CausalLM:
    """Return the module."""
    norm = build_layer_norm(config, scope.at("model.norm"), has_bias=False)
    return build_decoder(config, scope, _build_layer, norm=norm, logits_divisor=1.0 / config.logits_scale)


def _build_layer(config: Cohere2Config, index: int, scope: Scope) -> LayerNormLayer:
    paired_dim = config.head_dim if config.rope_layers[index] else 0
    return LayerNormLayer(
        build_layer_norm(config, scope.at("input_layernorm"), has_bias=False),
        build_attention(config, index, scope.at("self_attn"), paired_dim=paired_dim),
        None,
        build_mlp(config, scope.at("mlp")),
        is_parallel=True,
    )
