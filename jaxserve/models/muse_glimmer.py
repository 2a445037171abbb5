"""Muse Glimmer, text: norms before and after each branch, gates of the attention output, normalized embeddings."""

import dataclasses
from typing import Final

from jaxserve.layers.grouped_query_attention import OutputGate
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_mlp, build_norm
from jaxserve.models.gemma2 import SandwichLayer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, Windows, class_sizes, read_decoder, read_repeated_windows

_PATTERN: Final = 4
_GATE: Final = OutputGate("gate_proj", "sigmoid")


def _is_full(index: int, num_layers: int) -> bool:
    """Return whether a layer is full, and does not rotate, by default: each fourth from the last on."""
    return (num_layers - 1 - index) % _PATTERN == 0


def _read_windows(fields: ConfigFields, num_layers: int) -> Windows:
    first = (num_layers - 1) % _PATTERN
    return read_repeated_windows(fields, num_layers, _PATTERN, absent=2048, first_full=first)


_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=2,
    head_dim=128,
    norm_eps=1e-5,
    norm_offset=1.0,
    bos_token_id=200_000,
    eos_token_ids=(200_001,),
    activation_field="hidden_activation",
    attention_bias=False,
    windows=_read_windows,
    sizes=class_sizes(202_048, 6656, 19968, 52, 32, 131_072),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuseGlimmerConfig(DecoderConfig):
    """A decoder of Muse Glimmer's form.

    Attributes:
        query_scale: Factor of queries after their norm.
        post_norm_eps: ``norm_eps`` of the norms after each branch.
        logits_scale: Factor of the logits, before the cap.
        logits_soft_cap: Cap of the logits.
    """

    query_scale: float
    post_norm_eps: float
    logits_scale: float
    logits_soft_cap: float


def config_from_hf(fields: ConfigFields, architecture: str) -> MuseGlimmerConfig:
    """Read the text fields of a config of MuseGlimmerForConditionalGeneration."""
    base = read_decoder(fields, architecture, _DEFAULTS)
    return MuseGlimmerConfig(
        **vars(dataclasses.replace(base, rope_layers=_read_rope_layers(fields, base))),
        query_scale=fields.number("qk_scale_factor", 3.87),
        post_norm_eps=fields.number("post_norm_eps", 1e-8),
        logits_scale=fields.number("output_multiplier", 0.19611613513818404),
        logits_soft_cap=fields.number("final_logit_softcapping", 20.0),
    )


def _read_rope_layers(fields: ConfigFields, base: DecoderConfig) -> tuple[bool, ...]:
    """Read ``layer_rope_theta``, which is 0 for the layers that do not rotate."""
    thetas = fields.items("layer_rope_theta")
    if thetas is None:
        return tuple(not _is_full(index, base.num_layers) for index in range(base.num_layers))
    if len(thetas) != base.num_layers or not {*thetas} <= {0, base.rope.theta}:
        expected = f"expected 0 or rope_theta {base.rope.theta} for each of {base.num_layers} layers"
        fields.note("layer_rope_theta", f"{expected}, got {[*thetas]}")
        return base.rope_layers
    return tuple(theta != 0 for theta in thetas)


def build(config: MuseGlimmerConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    plain = dataclasses.replace(config, norm_offset=0.0)
    return build_decoder(
        config,
        scope,
        _build_layer,
        norm=build_norm(plain, scope.at("model.norm")),
        embed_norm=RMSNorm(config.hidden_size, eps=config.norm_eps, scope=scope, has_weight=False),
        logits_divisor=1.0 / config.logits_scale,
        logits_soft_cap=config.logits_soft_cap,
    )


def _build_layer(config: MuseGlimmerConfig, index: int, scope: Scope) -> SandwichLayer:
    attention = build_attention(
        config,
        index,
        scope.at("self_attn"),
        qk_norm="head",
        norm_offset=0.0,
        has_norm_weights=False,
        scale=config.query_scale * config.head_dim**-0.5,
        gate=_GATE,
    )
    post = dataclasses.replace(config, norm_eps=config.post_norm_eps)
    return SandwichLayer(
        build_norm(config, scope.at("input_layernorm")),
        attention,
        build_norm(config, scope.at("pre_feedforward_layernorm")),
        build_mlp(config, scope.at("mlp")),
        after=(
            build_norm(post, scope.at("post_attention_layernorm")),
            build_norm(post, scope.at("post_feedforward_layernorm")),
        ),
    )
