"""Mamba-2 without attention: no layer has keys and values."""

import dataclasses
from typing import Final

from jaxserve.layers.embedding import VocabEmbedding
from jaxserve.layers.mamba2 import Mamba2, Mamba2Options
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.recurrent_decoder import RecurrentLayer
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import MAX_LAYERS, read_activation, read_dtype
from jaxserve.models.hybrid import read_time_limits
from pallas_kernels.mamba2 import Mamba2Sizes

_MAX_POSITIONS: Final = 1 << 17
"""Longest context. A state has no bound; the tables of an engine have one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config(ModelConfig):
    """Mamba-2.

    Attributes:
        mamba: Heads, and their options.
        norm_eps: Added to the mean square in every norm of the hidden size.
    """

    mamba: tuple[Mamba2Sizes, Mamba2Options]
    norm_eps: float


def config_from_hf(fields: ConfigFields, architecture: str) -> Mamba2Config:
    """Read a config of Mamba2ForCausalLM."""
    hidden_size, heads = fields.integer("hidden_size", 4096), fields.integer("num_heads", 128)
    head_dim, groups = fields.integer("head_dim", 64), fields.integer("n_groups", 8)
    if heads * head_dim != fields.integer("expand", 2) * hidden_size:
        expected = fields.integer("expand", 2) * hidden_size
        fields.note("num_heads", f"expected heads of {head_dim} features with {expected} in all, got {heads}")
    if heads % groups:
        fields.note("n_groups", f"expected a divisor of the {heads} heads, got {groups}")
    if read_activation(fields, "hidden_act", "silu") != "silu":
        fields.note("hidden_act", f"expected silu, got {fields.text('hidden_act', 'silu')!r}")
    has_bias, eps = fields.flag("use_bias", False), fields.number("layer_norm_epsilon", 1e-5)
    options = Mamba2Options(
        taps=fields.integer("conv_kernel", 4, minimum=2),
        limits=read_time_limits(fields, "time_step_limit"),
        norm_eps=eps,
        norm_groups=groups,
        conv_bias=fields.flag("use_conv_bias", True),
        proj_bias=has_bias,
        out_bias=has_bias,
    )
    return Mamba2Config(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 32768),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers", 64, maximum=MAX_LAYERS),
        max_positions=fields.integer("max_position_embeddings", _MAX_POSITIONS),
        rope=None,
        bos_token_id=fields.nullable_integer("bos_token_id", 0, minimum=0),
        eos_token_ids=fields.token_ids("eos_token_id", (2,)),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=read_dtype(fields),
        mamba=(Mamba2Sizes(heads, head_dim, groups, fields.integer("state_size", 128)), options),
        norm_eps=eps,
    )


def build(config: Mamba2Config, scope: Scope) -> CausalLM:
    """Return the module."""
    sizes, inner = (config.vocab_size, config.hidden_size), scope.at("backbone")
    model = CausalLM(
        config,
        embed=VocabEmbedding(*sizes, scope=inner.at("embeddings")),
        layers=[_build_layer(config, inner.at(f"layers.{index}")) for index in range(config.num_layers)],
        norm=RMSNorm(config.hidden_size, eps=config.norm_eps, scope=inner.at("norm_f")),
        head=None if config.tie_embeddings else VocabEmbedding(*sizes, scope=scope.at("lm_head")),
        optional_prefix="backbone.",
    )
    model.prefixes = (("model.", ""),)
    return model


def _build_layer(config: Mamba2Config, scope: Scope) -> RecurrentLayer:
    norm = RMSNorm(config.hidden_size, eps=config.norm_eps, scope=scope.at("norm"))
    return RecurrentLayer(norm, Mamba2(config.hidden_size, *config.mamba, scope=scope.at("mixer")))
