"""Grouped matmul in a native kernel for x86 CPUs: each expert's matrix is packed like a weight of ``linear_native``.

Only the matrices of experts that have rows are read, and the threads share their panels evenly. A row's result depends
on the row and its expert's matrix alone, whatever other rows there are and however many threads.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import linear_native
from pallas_kernels.linear_native import packed_shape as packed_shape
from pallas_kernels.native_library import target


def unsupported(platform: str, device_kind: str, dtype: str, *, num_experts: int = 1) -> str | None:
    """Return why it cannot run on such a device, or None."""
    del num_experts
    return linear_native.unsupported(platform, device_kind, dtype)


def pack(
    matrices: Float[np.ndarray, "E outer inner"], is_gated: bool = False
) -> Float[np.ndarray, "E panels steps 32 kp"]:
    """Return the matrices in panels: in their own memory, one after the other, if their panels fill it exactly."""
    num_experts, outer, inner = matrices.shape
    shape = (num_experts, *packed_shape(outer, inner, str(matrices.dtype), is_gated))
    fits = np.prod(shape) == matrices.size and matrices.flags.c_contiguous and matrices.flags.writeable
    packed = matrices.reshape(shape) if fits else linear_native.aligned(shape, matrices.dtype)
    for matrix, panels in zip(matrices, packed, strict=True):
        panels[...] = linear_native.pack(matrix, is_gated)
    return packed


def unpack(
    packed: Float[np.ndarray, "E panels steps 32 kp"], outer: int, inner: int, is_gated: bool = False
) -> Float[np.ndarray, "E outer inner"]:
    """Unpack the matrices, bit for bit."""
    return np.stack([linear_native.unpack(panels, outer, inner, is_gated) for panels in packed])


def grouped_matmul(
    lhs: Float[Array, "T D"],
    rhs: Float[Array, "E panels steps 32 kp"],
    group_sizes: Int[Array, " E"],
    num_out: int,
    *,
    is_gated: bool = False,
) -> Float[Array, "T F"]:
    """Compute ``lhs[t] @ matrix of t's expert.T``; see ``grouped_matmul.GroupedMatmul``. Rows after all experts get
    zeros."""
    result = jax.ShapeDtypeStruct((lhs.shape[0], num_out), jnp.float32)
    call = jax.ffi.ffi_call(target("grouped_matmul"), result)
    return call(lhs.astype(jnp.float32), rhs, group_sizes, is_gated=np.int32(is_gated)).astype(lhs.dtype)
