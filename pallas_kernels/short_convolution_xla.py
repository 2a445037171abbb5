"""The gated short convolution by XLA. Runs anywhere."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.recurrent_states import Convolution, StateRows, copy_states
from pallas_kernels.recurrent_xla import convolve

__all__ = ["copy_states", "unsupported", "update"]


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return None: it runs everywhere."""
    del platform, device_kind, dtype, sizes
    return None


def update(
    projected: Float[Array, "T width"],
    convolution: Convolution,
    tail: Float[Array, "P history channels"],
    rows: StateRows,
) -> tuple[Float[Array, "T channels"], Float[Array, "P history channels"]]:
    """Compute the layer's tokens and update its tails; see ``ShortConvolutionKernel.update``."""
    b, c, x = jnp.split(projected.astype(jnp.float32), 3, axis=1)
    y, tail = convolve((b * x).astype(tail.dtype), tail, convolution, rows)
    return c * y, tail
