"""Grouped matmul with quantized matrices in a native kernel for x86 CPUs: each expert's matrix is packed like a weight
of ``quantized_linear_native``.

Only the matrices of experts that have rows are read. A row's result depends on the row and its expert's matrix alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels import quantized_linear_native
from pallas_kernels.linear_native import aligned
from pallas_kernels.native_library import target
from pallas_kernels.quantized import Form
from pallas_kernels.quantized_linear_native import packed_shape as packed_shape


def unsupported(
    platform: str, device_kind: str, dtype: str, *, form: Form | None = None, num_experts: int = 1
) -> str | None:
    """Return why it cannot run on such a device, or with a form, or None."""
    del num_experts
    return quantized_linear_native.unsupported(platform, device_kind, dtype, form=form)


def pack(
    records: UInt8[np.ndarray, "E outer bytes"], form: Form, is_gated: bool = False
) -> UInt8[np.ndarray, "E panels blocks of_block"]:
    """Return the matrices in panels, one after the other."""
    num_experts, outer, row_bytes = records.shape
    shape = packed_shape(outer, form.inner(row_bytes), form, is_gated)
    packed = aligned((num_experts, *shape), np.dtype(np.uint8))
    for matrix, panels in zip(records, packed, strict=True):
        quantized_linear_native.pack_into(panels, matrix, form, is_gated)
    return packed


def unpack(
    packed: UInt8[np.ndarray, "E panels blocks of_block"], outer: int, inner: int, form: Form, is_gated: bool = False
) -> UInt8[np.ndarray, "E outer bytes"]:
    """Unpack to rows of records, bit for bit."""
    return np.stack([quantized_linear_native.unpack(panels, outer, inner, form, is_gated) for panels in packed])


def grouped_matmul(
    lhs: Float[Array, "T D"],
    rhs: UInt8[Array, "E panels blocks of_block"],
    group_sizes: Int[Array, " E"],
    num_out: int,
    form: Form,
    *,
    is_gated: bool = False,
) -> Float[Array, "T F"]:
    """Compute ``lhs[t] @ matrix of t's expert.T``; see ``quantized_grouped_matmul.QuantizedGroupedMatmul``. Rows after
    all experts get zeros."""
    result = jax.ShapeDtypeStruct((lhs.shape[0], num_out), jnp.float32)
    call = jax.ffi.ffi_call(target("quantized_grouped_matmul"), result)
    settings = quantized_linear_native.attributes(form, lhs.shape[1])
    return call(lhs.astype(jnp.float32), rhs, group_sizes, is_gated=np.int32(is_gated), **settings).astype(lhs.dtype)
