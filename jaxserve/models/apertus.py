"""Apertus: Llama with norms of each query and key head, and an MLP without gates whose activation has learnt slopes."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from checkpoints import whole
from jaxserve.layers.decoder import PreNormLayer
from jaxserve.layers.mlp import PlainMLP
from jaxserve.layers.parallel import Scope
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.decoder import DecoderConfig, build_decoder, build_layer
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.hf_decoder import FamilyDefaults, class_sizes, read_decoder
from jaxserve.models.hf_rope import RopeDefaults, with_default_rope

_THETA: Final = 12_000_000.0
_DEFAULTS: Final = FamilyDefaults(
    norm_eps=1e-5,
    rope=RopeDefaults(theta=_THETA),
    attention_bias=False,
    sizes=class_sizes(131072, 4096, 14336, 32, 32, 65536),
)
_LLAMA3: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def config_from_hf(fields: ConfigFields, architecture: str) -> DecoderConfig:
    """Read a config of ApertusForCausalLM."""
    if fields.text("hidden_act", "xielu") != "xielu":
        fields.note("hidden_act", f"expected xielu, got {fields.text('hidden_act', 'xielu')!r}")
    fields = with_default_rope(fields, _LLAMA3)
    return read_decoder(fields.replaced({"hidden_act": None}), architecture, _DEFAULTS)


class Xielu(nnx.Module):
    """The activation xIELU (arXiv:2411.13010), whose four numbers are in checkpoints.

    Args:
        scope: Scope of these.
    """

    def __init__(self, scope: Scope):
        self.alpha_p, self.alpha_n = (_number(scope.at(name), (1,)) for name in ("alpha_p", "alpha_n"))
        self.beta, self.eps = (_number(scope.at(name), ()) for name in ("beta", "eps"))

    def __call__(self, x: Float[Array, "T F"]) -> Float[Array, "T F"]:
        """Apply the activation, in float32."""
        wide = x.astype(jnp.float32)
        numbers = (self.alpha_p, self.alpha_n, self.beta, self.eps)
        alpha_p, alpha_n, beta, eps = (each[...].astype(jnp.float32) for each in numbers)
        above = jax.nn.softplus(alpha_p) * wide * wide
        below = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(wide, eps)) - wide)
        return (jnp.where(wide > 0, above, below) + beta * wide).astype(x.dtype)


def _number(scope: Scope, shape: tuple[int, ...]) -> nnx.Param[Any]:
    axes = (None,) * len(shape)
    return nnx.Param(jnp.zeros(shape, scope.policy.weights), axes=axes, recipe=whole(scope.module, shape))


def build(config: DecoderConfig, scope: Scope) -> CausalLM:
    """Return the module."""
    return build_decoder(config, scope, _build_layer)


def _build_layer(config: DecoderConfig, index: int, scope: Scope) -> PreNormLayer:
    inner = scope.at("mlp")
    mlp = PlainMLP(
        config.hidden_size,
        config.ffn_size,
        activation=Xielu(inner.at("act_fn")),
        scope=inner,
        up="up_proj",
        down="down_proj",
        bias=False,
    )
    norms = ("attention_layernorm", "feedforward_layernorm")
    return build_layer(config, index, scope, qk_norm="head", mlp=mlp, norms=norms)
