"""The gated short convolution in a native kernel for x86 CPUs, called through ``jax.ffi``."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.native_library import target
from pallas_kernels.recurrent_native import copy_states, float32, row_arrays, unsupported
from pallas_kernels.recurrent_states import Convolution, StateRows

__all__ = ["copy_states", "unsupported", "update"]


def update(
    projected: Float[Array, "T width"],
    convolution: Convolution,
    tail: Float[Array, "P history channels"],
    rows: StateRows,
) -> tuple[Float[Array, "T channels"], Float[Array, "P history channels"]]:
    """Compute the layer's tokens and update its tails; see ``ShortConvolutionKernel.update``."""
    result = jax.ShapeDtypeStruct((projected.shape[0], tail.shape[2]), jnp.float32)
    old = jax.ShapeDtypeStruct(tail.shape, tail.dtype)
    y, tail = jax.ffi.ffi_call(target("short_convolution"), (result, old), input_output_aliases={3: 1})(
        projected, float32(convolution.weight), float32(convolution.bias), tail, *row_arrays(rows, projected.shape[0])
    )
    return y, tail
