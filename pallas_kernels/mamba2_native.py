"""The update of a Mamba-2 layer in a native kernel for x86 CPUs, called through ``jax.ffi``."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.mamba2 import GroupNorm, Mamba2Sizes, Mamba2Weights, StepLimits
from pallas_kernels.native_library import target
from pallas_kernels.recurrent_native import (
    copy_states,
    float32,
    from_layout,
    row_arrays,
    state_shape,
    to_layout,
    unsupported,
)
from pallas_kernels.recurrent_states import StateRows, States

__all__ = ["copy_states", "from_layout", "state_shape", "to_layout", "unsupported", "update"]


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
    result = jax.ShapeDtypeStruct((projected.shape[0], sizes.inner), jnp.float32)
    old = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in states)
    y, tail, state = jax.ffi.ffi_call(target("mamba2"), (result, *old), input_output_aliases={7: 1, 8: 2})(
        projected,
        float32(weights.convolution.weight),
        float32(weights.convolution.bias),
        float32(weights.a_log),
        float32(weights.dt_bias),
        float32(weights.d),
        float32(None if norm is None else norm.weight),
        *states,
        *row_arrays(rows, projected.shape[0]),
        head_dim=np.int32(sizes.head_dim),
        groups=np.int32(sizes.num_groups),
        state_dim=np.int32(sizes.state_dim),
        norm_groups=np.int32(0 if norm is None else norm.num_groups),
        is_before_gate=np.int32(norm is not None and norm.is_before_gate),
        is_gated=np.int32(is_gated),
        eps=np.float32(0 if norm is None else norm.eps),
        least=np.float32(limits.least),
        most=np.float32(limits.most),
    )
    return y, States(tail, state)
