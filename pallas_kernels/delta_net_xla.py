"""The update of a gated delta net by XLA. Runs anywhere; states lie as matrices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.delta_net import UNIT_EPS, DeltaNetSizes, DeltaNetWeights
from pallas_kernels.recurrent_states import StateRows, States, copy_states
from pallas_kernels.recurrent_xla import (
    RuleTokens,
    UpdateStates,
    convolve,
    from_layout,
    state_shape,
    to_layout,
    update_states,
)

__all__ = ["copy_states", "from_layout", "state_shape", "to_layout", "unsupported", "update"]


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return None: it runs everywhere."""
    del platform, device_kind, dtype, sizes
    return None


def update(
    projected: Float[Array, "T width"],
    weights: DeltaNetWeights,
    states: States,
    rows: StateRows,
    *,
    sizes: DeltaNetSizes,
    eps: float,
) -> tuple[Float[Array, "T inner"], States]:
    """Compute the layer's tokens and update its states; see ``DeltaNetKernel.update``."""
    return update_by(update_states, projected, weights, states, rows, sizes, eps)


def update_by(
    update_states: UpdateStates,
    projected: Float[Array, "T width"],
    weights: DeltaNetWeights,
    states: States,
    rows: StateRows,
    sizes: DeltaNetSizes,
    eps: float,
) -> tuple[Float[Array, "T inner"], States]:
    """Compute everything but the rule of the states in XLA; see ``DeltaNetKernel.update``."""
    num_tokens, (key_heads, heads, key_dim, value_dim, has_key_decays) = projected.shape[0], sizes
    mixed, *others = jnp.split(projected, np.cumsum([sizes.num_channels, sizes.inner, heads]), axis=1)
    z, b, a = (x.astype(jnp.float32) for x in others)
    mixed, tail = convolve(mixed, states.tail, weights.convolution, rows)
    query, key, value = jnp.split(jax.nn.silu(mixed), [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    query, key = (_unit(x.reshape(num_tokens, key_heads, key_dim)) for x in (query, key))
    rate = -jnp.exp(weights.a_log.astype(jnp.float32))[:, None]
    steps = jax.nn.softplus(a + weights.dt_bias.astype(jnp.float32))
    steps = steps.reshape(num_tokens, heads, sizes.num_decays // heads)
    values = value.reshape(num_tokens, heads, value_dim)
    tokens = RuleTokens(query * key_dim**-0.5, key, values, jax.nn.sigmoid(b), jnp.exp(rate * steps))
    o, state = update_states(tokens, states.state, rows, is_delta=True)
    o = o * lax.rsqrt(jnp.mean(jnp.square(o), -1, keepdims=True) + eps) * weights.norm.astype(jnp.float32)
    gate = jax.nn.sigmoid(z) if has_key_decays else jax.nn.silu(z)
    return (o * gate.reshape(o.shape)).reshape(num_tokens, -1), States(tail, state)


def _unit(x: Float[Array, "T heads keys"]) -> Float[Array, "T heads keys"]:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + UNIT_EPS)
