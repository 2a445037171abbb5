"""The update of a Mamba-2 layer by XLA. Runs anywhere; states lie as matrices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.mamba2 import GroupNorm, Mamba2Sizes, Mamba2Weights, StepLimits
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
    weights: Mamba2Weights,
    states: States,
    rows: StateRows,
    *,
    sizes: Mamba2Sizes,
    limits: StepLimits,
    norm: GroupNorm | None,
    is_gated: bool = True,
) -> tuple[Float[Array, "T inner"], States]:
    """Compute the layer's tokens and update its states; see ``Mamba2Kernel.update``."""
    return update_by(update_states, projected, weights, states, rows, sizes, limits, norm, is_gated)


def update_by(
    update_states: UpdateStates,
    projected: Float[Array, "T width"],
    weights: Mamba2Weights,
    states: States,
    rows: StateRows,
    sizes: Mamba2Sizes,
    limits: StepLimits,
    norm: GroupNorm | None,
    is_gated: bool,
) -> tuple[Float[Array, "T inner"], States]:
    """Compute everything but the rule of the states in XLA; see ``Mamba2Kernel.update``."""
    assert is_gated or norm is None, "a norm is followed or preceded by the gate"
    num_tokens = projected.shape[0]
    z, mixed, dt = jnp.split(projected, np.cumsum([sizes.inner, sizes.num_channels]), axis=1)
    mixed, tail = convolve(mixed, states.tail, weights.convolution, rows)
    groups = sizes.num_groups * sizes.state_dim
    x, b, c = jnp.split(jax.nn.silu(mixed), np.cumsum([sizes.inner, groups]), axis=1)
    x = x.reshape(num_tokens, sizes.num_heads, sizes.head_dim)
    b, c = (part.reshape(num_tokens, sizes.num_groups, sizes.state_dim) for part in (b, c))
    a_log, dt_bias, d = (x.astype(jnp.float32) for x in (weights.a_log, weights.dt_bias, weights.d))
    dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + dt_bias), *limits)
    tokens = RuleTokens(c, b, x, dt, jnp.exp(-jnp.exp(a_log) * dt)[:, :, None])
    y, state = update_states(tokens, states.state, rows, is_delta=False)
    y, gate = (y + d[:, None] * x).reshape(num_tokens, -1), jax.nn.silu(z.astype(jnp.float32))
    is_before = norm is not None and norm.is_before_gate
    y = y * gate if is_gated and not is_before else y
    y = y if norm is None else _normed(y, norm)
    return y * gate if is_before else y, States(tail, state)


def _normed(y: Float[Array, "T inner"], norm: GroupNorm) -> Float[Array, "T inner"]:
    by_group = y.reshape(y.shape[0], norm.num_groups, -1)
    by_group = by_group * lax.rsqrt(jnp.mean(jnp.square(by_group), -1, keepdims=True) + norm.eps)
    return by_group.reshape(y.shape) * norm.weight.astype(jnp.float32)
