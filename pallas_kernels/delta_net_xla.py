"""The update of a gated delta net by XLA. Runs anywhere; states lie as matrices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.delta_net import UNIT_EPS, DeltaNetSizes, DeltaNetWeights
from pallas_kernels.recurrent_states import StateRows, States, copy_states
from pallas_kernels.recurrent_xla import convolve, from_layout, state_shape, to_layout, update_states

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
    num_tokens, (key_heads, heads, key_dim, value_dim) = projected.shape[0], sizes
    mixed, *others = jnp.split(projected, np.cumsum([sizes.num_channels, sizes.inner, heads]), axis=1)
    z, b, a = (x.astype(jnp.float32) for x in others)
    mixed, tail = convolve(mixed, states.tail, weights.convolution, rows)
    query, key, value = jnp.split(jax.nn.silu(mixed), [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    query, key = (_unit(x.reshape(num_tokens, key_heads, key_dim)) for x in (query, key))
    rate = -jnp.exp(weights.a_log.astype(jnp.float32))
    decay = jnp.exp(rate * jax.nn.softplus(a + weights.dt_bias.astype(jnp.float32)))
    values = value.reshape(num_tokens, heads, value_dim)
    tokens = query * key_dim**-0.5, key, values, jax.nn.sigmoid(b), decay
    o, state = update_states(_step, tokens, states.state, rows)
    o = o * lax.rsqrt(jnp.mean(jnp.square(o), -1, keepdims=True) + eps) * weights.norm.astype(jnp.float32)
    return (o * jax.nn.silu(z).reshape(o.shape)).reshape(num_tokens, -1), States(tail, state)


def _unit(x: Float[Array, "T heads keys"]) -> Float[Array, "T heads keys"]:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + UNIT_EPS)


def _step(
    state: Float[Array, "heads keys values"], token: tuple[Array, ...]
) -> tuple[Float[Array, "heads keys values"], Float[Array, "heads values"]]:
    """Apply the delta rule of one token; sums run over keys, elementwise for all values."""
    query, key, value, beta, decay = token
    group = state.shape[0] // key.shape[0]
    query, key = (jnp.repeat(x, group, axis=0)[:, :, None] for x in (query, key))
    state = state * decay[:, None, None]
    delta = beta[:, None] * (value - jnp.sum(state * key, axis=1))
    state = state + key * delta[:, None]
    return state, jnp.sum(state * query, axis=1)
