"""Matrix multiplication in a native kernel for x86 CPUs, called through ``jax.ffi``.

Weights are stored in panels of 32 outputs, ``[panels, inner / kp, 32, kp]`` with kp = 1 for float32 and 2 for bfloat16;
see ``pallas_kernels/native/linear.h``. A row's result depends on the row and the weight alone, whatever the number of
rows and threads. Activations are rounded to bfloat16 only where the processor multiplies that itself (AMX); elsewhere
weights in bfloat16 are widened in registers.
"""

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.linear import Fused
from pallas_kernels.native_library import library, target, unavailable

_PANEL_BITS = 5
_PANEL = 1 << _PANEL_BITS
_GATES = 16  # of a gated weight's panel; then come the outputs that they multiply
_PAIRS_MULTIPLE = 32  # of features in bfloat16, so that tiles are whole
_ALIGNMENT_BYTES = 64
ACTIVATION_CODES = {None: 0, "silu": 1, "gelu": 2, "gelu_new": 3, "gelu_pytorch_tanh": 3, "relu": 4}
_DTYPES = ("float32", "bfloat16")


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why it cannot run on such a device, or None."""
    del device_kind, sizes
    if platform != "cpu":
        return "native kernels run on CPUs"
    if dtype not in _DTYPES:
        return f"weights must be {' or '.join(_DTYPES)}, not {dtype}"
    return unavailable()


def packed_shape(outer: int, inner: int, dtype: str, is_gated: bool = False) -> tuple[int, ...]:
    """Return the shape of a packed weight; see ``linear.LinearKernel``."""
    panels = num_panels(outer, is_gated)
    if jnp.dtype(dtype) == jnp.float32:
        return panels, inner, _PANEL, 1
    return panels, -(-inner // _PAIRS_MULTIPLE) * _PAIRS_MULTIPLE // 2, _PANEL, 2


def num_panels(outer: int, is_gated: bool) -> int:
    """Return the panels of a weight with ``outer`` outputs."""
    return -(-outer // 2 // _GATES) if is_gated else -(-outer // _PANEL)


def pack(weight: Float[np.ndarray, "outer inner"], is_gated: bool = False) -> Float[np.ndarray, "panels steps 32 kp"]:
    """Return a weight in panels, aligned so that XLA uses it without a copy."""
    weight = np.ascontiguousarray(weight)
    outer, inner = weight.shape
    packed = aligned(packed_shape(outer, inner, str(weight.dtype), is_gated), weight.dtype)
    _convert(weight, packed, weight.shape, packed.shape, is_gated, is_inverse=False)
    return packed


def unpack(
    packed: Float[np.ndarray, "panels steps 32 kp"], outer: int, inner: int, is_gated: bool = False
) -> Float[np.ndarray, "outer inner"]:
    """Unpack a weight, bit for bit."""
    packed = np.ascontiguousarray(packed)
    weight = aligned((outer, inner), packed.dtype)
    _convert(packed, weight, weight.shape, packed.shape, is_gated, is_inverse=True)
    return weight


def rows(packed: Float[Array, "panels steps 32 kp"], indices: Int[Array, " T"], inner: int) -> Float[Array, "T inner"]:
    """Return rows of a packed weight."""
    found = packed[indices >> _PANEL_BITS, :, indices & (_PANEL - 1)]
    return found.reshape(len(indices), -1)[:, :inner]


def matmul(
    x: Float[Array, "T inner"],
    packed: Float[Array, "panels steps 32 kp"],
    outer: int,
    *,
    fused: Fused,
    num_rows: Int[Array, ""] | None = None,
) -> Float[Array, "T results"]:
    """Compute ``x @ weight.T`` and what is fused with it; see ``linear.LinearKernel``."""
    return call("linear", x, (packed,), outer, fused, num_rows, x.shape[1])


def call(
    operation: str,
    x: Float[Array, "T features"],
    weight: tuple[Array, ...],
    outer: int,
    fused: Fused,
    num_rows: Int[Array, ""] | None,
    inner: int,
    **attributes: Any,
) -> Float[Array, "T results"]:
    """Call the handler of a matmul with a packed weight.

    Args:
        operation: Name of the handler.
        x: Activations.
        weight: The packed weight, and what the handler takes last.
        outer: Number of its outputs; with an activation the result has half as many.
        fused: The fused operations.
        num_rows: Rows in use; None: all.
        inner: The weight's features.
        attributes: What the handler is told besides.
    """
    nothing = jnp.zeros(0, jnp.float32)
    residual = nothing if fused.residual is None else fused.residual.astype(jnp.float32)
    result = jax.ShapeDtypeStruct((x.shape[0], outer if fused.activation is None else outer // 2), jnp.float32)
    found = jax.ffi.ffi_call(target(operation), result)(
        x.astype(jnp.float32),
        weight[0],
        nothing if fused.norm is None else fused.norm.weight,
        nothing if fused.bias is None else fused.bias,
        residual,
        jnp.int32(x.shape[0]) if num_rows is None else num_rows,
        *weight[1:],
        num_in=np.int32(inner),
        activation=np.int32(ACTIVATION_CODES[fused.activation]),
        eps=np.float32(0.0 if fused.norm is None else fused.norm.eps),
        scale=np.float32(fused.scale),
        **attributes,
    )
    return found if fused.residual is None else found.astype(fused.residual.dtype)


def _convert(
    source: np.ndarray,
    result: np.ndarray,
    plain: tuple[int, ...],
    packed: tuple[int, ...],
    is_gated: bool,
    is_inverse: bool,
) -> None:
    library().jaxserve_pack(
        ctypes.c_void_p(source.ctypes.data),
        ctypes.c_void_p(result.ctypes.data),
        *(ctypes.c_int64(size) for size in (*plain, packed[1] * packed[3])),
        ctypes.c_int(source.dtype.itemsize),
        ctypes.c_int(is_gated),
        ctypes.c_int(is_inverse),
    )


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialized array that XLA uses without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)
