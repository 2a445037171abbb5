"""Matrix multiplication by XLA. Runs anywhere; weights are stored as checkpoints have them, [out, in].

Operands are rounded to the weight's dtype; norms and activations give the dtype of the activations.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.linear import Fused, finished
from pallas_kernels.qkv_write import normed


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return None: it runs everywhere."""
    del platform, device_kind, dtype, sizes
    return None


def packed_shape(outer: int, inner: int, dtype: str, is_gated: bool = False) -> tuple[int, ...]:
    """Return the weight's own shape."""
    del dtype, is_gated
    return outer, inner


def pack(weight: Float[np.ndarray, "outer inner"], is_gated: bool = False) -> Float[np.ndarray, "outer inner"]:
    """Return the weight itself."""
    del is_gated
    return weight


def unpack(
    packed: Float[np.ndarray, "outer inner"], outer: int, inner: int, is_gated: bool = False
) -> Float[np.ndarray, "outer inner"]:
    """Return the weight itself."""
    del is_gated
    assert packed.shape == (outer, inner), packed.shape
    return packed


def rows(packed: Float[Array, "outer inner"], indices: Int[Array, " T"], inner: int) -> Float[Array, "T inner"]:
    """Return rows of the weight."""
    del inner
    return packed[indices]


def matmul(
    x: Float[Array, "T inner"],
    packed: Float[Array, "outer inner"],
    outer: int,
    *,
    fused: Fused,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "T results"]:
    """Compute ``x @ weight.T`` and what is fused with it; see ``linear.LinearKernel``."""
    del outer, num_rows
    if fused.norm is not None:
        x = normed(x, *fused.norm)
    y = lax.dot_general(
        x.astype(packed.dtype),
        packed,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if packed.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return finished(y, fused, x.dtype)
