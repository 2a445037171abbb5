"""Falcon-H1: attention and Mamba-2 side by side in every layer, and constants that scale each of their parts."""

import dataclasses
from typing import Any, Final

from jaxserve.layers.mamba2 import Mamba2, Mamba2Options
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.parallel import Scope
from jaxserve.layers.recurrent_decoder import BranchScales, ParallelMixersLayer
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_attention, build_decoder, build_norm
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hybrid import no_windows, read_mamba
from pallas_kernels.mamba2 import Mamba2Sizes

_DEFAULTS: Final = FamilyDefaults(
    num_kv_heads=8,
    norm_eps=1e-5,
    attention_bias=False,
    mlp_bias=False,
    windows=no_windows,
    sizes=class_sizes(128000, 4096, 14336, 32, 32, 8192),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """Falcon-H1.

    Attributes:
        mamba: Heads of the recurrent mixers, and their options.
        score_scale: Factor of query-key scores.
        scales: Factors of the branches.
        gate_scale: Factor of the MLP's gates before their activation.
        embedding_multiplier: Factor of the embeddings.
        logits_divisor: Divisor of the logits.
    """

    mamba: tuple[Mamba2Sizes, Mamba2Options]
    score_scale: float
    scales: BranchScales
    gate_scale: float
    embedding_multiplier: float
    logits_divisor: float


def config_from_hf(fields: ConfigFields, architecture: str) -> FalconH1Config:
    """Read a config of FalconH1ForCausalLM.

    The factor of the attention's input is one of queries, keys and values: its square scales scores, and it scales
    what attention adds.
    """
    base = read_decoder(fields, architecture, _DEFAULTS)
    inner = fields.nullable_integer("mamba_d_ssm", 1024)
    has_norm = fields.flag("mamba_rms_norm", False)
    attended, ssm = fields.number("attention_in_multiplier", 1.0), fields.number("ssm_in_multiplier", 1.0)
    for field, factor, what in (
        ("attention_bias", attended, "attention_in_multiplier"),
        ("mamba_proj_bias", ssm, "ssm_in_multiplier"),
    ):
        if factor != 1.0 and fields.flag(field, False):
            fields.note(field, f"expected false with {what} {factor}, which biases do not have")
    parts = _numbers(fields, "ssm_multipliers", 5)
    gate, down = _numbers(fields, "mlp_multipliers", 2)
    options: dict[str, Any] = {
        "norm_eps": base.norm_eps if has_norm else None,
        **({} if has_norm else {"norm_groups": 1}),
        "is_norm_before_gate": fields.flag("mamba_norm_before_gate", True),
        "out_bias": fields.flag("projectors_bias", False),
        "multipliers": None if {ssm, *parts} == {1.0} else tuple(ssm * part for part in parts),
    }
    return FalconH1Config(
        **vars(base),
        mamba=read_mamba(fields, base, 128, inner=inner, **options),
        score_scale=base.head_dim**-0.5 * attended**2 * fields.number("key_multiplier", 1.0),
        scales=BranchScales(
            fields.number("attention_out_multiplier", 1.0) * attended, fields.number("ssm_out_multiplier", 1.0), down
        ),
        gate_scale=gate,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_divisor=1.0 / fields.number("lm_head_multiplier", 1.0),
    )


def _numbers(fields: ConfigFields, field: str, count: int) -> tuple[float, ...]:
    """Return the numbers of a field; ones if it is missing."""
    return fields.numbers(field, count) if fields.is_given(field) else (1.0,) * count


def build(config: FalconH1Config, scope: Scope) -> CausalLM:
    """Return the module, with the config's constants."""
    return build_decoder(
        config,
        scope,
        _build_layer,
        norm=build_norm(config, scope.at("model.final_layernorm")),
        embedding_multiplier=config.embedding_multiplier,
        logits_divisor=config.logits_divisor,
    )


def _build_layer(config: FalconH1Config, index: int, scope: Scope) -> ParallelMixersLayer:
    mlp = GatedMLP(
        config.hidden_size,
        config.ffn_size,
        activation=config.activation,
        bias=config.mlp_bias,
        scope=scope.at("feed_forward"),
        gate_scale=config.gate_scale,
    )
    return ParallelMixersLayer(
        build_norm(config, scope.at("input_layernorm")),
        build_attention(config, index, scope.at("self_attn"), scale=config.score_scale),
        Mamba2(config.hidden_size, *config.mamba, scope=scope.at("mamba")),
        build_norm(config, scope.at("pre_ff_layernorm")),
        mlp,
        config.scales,
    )
