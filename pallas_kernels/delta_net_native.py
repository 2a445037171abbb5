"""The update of a gated delta net in a native kernel for x86 CPUs, called through ``jax.ffi``."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.delta_net import DeltaNetSizes, DeltaNetWeights
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
    weights: DeltaNetWeights,
    states: States,
    rows: StateRows,
    *,
    sizes: DeltaNetSizes,
    eps: float,
) -> tuple[Float[Array, "T inner"], States]:
    """Compute the layer's tokens and update its states; see ``DeltaNetKernel.update``."""
    result = jax.ShapeDtypeStruct((projected.shape[0], sizes.inner), jnp.float32)
    old = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in states)
    y, tail, state = jax.ffi.ffi_call(target("delta_net"), (result, *old), input_output_aliases={6: 1, 7: 2})(
        projected,
        float32(weights.convolution.weight),
        float32(weights.convolution.bias),
        float32(weights.a_log),
        float32(weights.dt_bias),
        float32(weights.norm),
        *states,
        *row_arrays(rows, projected.shape[0]),
        key_heads=np.int32(sizes.num_key_heads),
        key_dim=np.int32(sizes.key_dim),
        value_dim=np.int32(sizes.value_dim),
        has_key_decays=np.int32(sizes.has_key_decays),
        eps=np.float32(eps),
    )
    return y, States(tail, state)
