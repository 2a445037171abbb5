"""Matrix multiplication by quantized weights in a native kernel for x86 CPUs, called through ``jax.ffi``.

Weights are stored in panels of 32 outputs, ``[panels, blocks, bytes]``: see ``pallas_kernels/native/quantized.h``.
Rows that the form rounds are multiplied as integers, whose sums are exact on every instruction set; others stay in
float32, with one chain of sums in each group. A row's result depends on the row and the weight alone, whatever the
number of rows and threads.
"""

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.linear import Fused
from pallas_kernels.linear_native import aligned, call, num_panels
from pallas_kernels.native_library import library, target, unavailable
from pallas_kernels.quantized import FLOATS, ROUNDED, VALUES, Form

_VALUES = {"int8": 1, "uint8": 2, "uint4": 3, "int6": 4, "float8_e4m3fn": 5, "float8_e5m2": 6}
_NUMBERS = {
    None: 0,
    **{"float32": 1, "float16": 2, "bfloat16": 3, "float8_e8m0fnu": 4, "float8_e4m3fn": 5, "float8_e5m2": 6},
    **{"uint8": 7, "int8": 8},
}
_ACTIVATIONS = {None: 0, "bfloat16": 1, "row": 2, "group": 3}
_PLAIN = tuple(float(code) for code in range(16))
_MOST_SUMMED = 66_000  # features whose products of 8 bits an int32 holds


def unsupported(platform: str, device_kind: str, dtype: str, *, form: Form | None = None) -> str | None:
    """Return why it cannot run on such a device, or with weights of a form, or None."""
    del device_kind
    if platform != "cpu":
        return "native kernels run on CPUs"
    if dtype not in VALUES:
        return f"codes must be {', '.join(VALUES)}, not {dtype}"
    return unavailable() if form is None else _unsupported_form(form) or unavailable()


def _unsupported_form(form: Form) -> str | None:
    numbers = (form.scales, form.zeros, form.biases, form.factors)
    unknown = [kind for kind in numbers if kind not in _NUMBERS]
    if unknown:
        return f"scales, zeros, biases and factors must be {', '.join(filter(None, _NUMBERS))}, not {unknown[0]}"
    if form.activations in ROUNDED and form.values in FLOATS:
        return f"activations that are rounded to int8 need integer codes, not {form.values}"
    if form.activations in ROUNDED and form.table not in (None, _PLAIN) and not _is_whole(form):
        return "activations that are rounded to int8 need codes whose values, or these twice, are integers of 8 bits"
    if form.values == "int6" and form.span % 8:
        return f"records of int6 codes must have a multiple of 8 features, not {form.span}"
    if form.values == "uint4" and form.activations in ROUNDED and not 0 <= form.zero < 16:
        return f"the zero of uint4 codes must be 0 to 15, not {form.zero}"
    return None


def _is_whole(form: Form) -> bool:
    """Whether the values of codes, or these twice, are integers that rounded rows can be multiplied with."""
    values = np.array(form.table)
    is_whole = any((np.abs(values * power) <= 127).all() and (values * power % 1 == 0).all() for power in (1, 2))
    return is_whole and form.zero == 0 and form.zeros is None


def packed_shape(outer: int, inner: int, form: Form, is_gated: bool = False) -> tuple[int, ...]:
    """Return the shape of a packed weight; see ``quantized_linear.QuantizedLinear``."""
    if form.activations in ROUNDED and form.shared(inner) > _MOST_SUMMED:
        raise ValueError(f"{inner} features have too many in a group for sums in int32; at most {_MOST_SUMMED} can")
    block_bytes = _pack(None, None, outer, inner, form, is_gated, is_inverse=False)
    return num_panels(outer, is_gated), inner // _block(form, inner), block_bytes


def pack(
    records: UInt8[np.ndarray, "outer bytes"], form: Form, is_gated: bool = False
) -> UInt8[np.ndarray, "panels blocks of_block"]:
    """Return a weight in panels, aligned so that XLA uses it without a copy."""
    shape = packed_shape(len(records), form.inner(records.shape[1]), form, is_gated)
    packed = aligned(shape, np.dtype(np.uint8))
    pack_into(packed, records, form, is_gated)
    return packed


def pack_into(
    packed: UInt8[np.ndarray, "panels blocks of_block"],
    records: UInt8[np.ndarray, "outer bytes"],
    form: Form,
    is_gated: bool,
) -> None:
    """Write a weight in panels to an array of their shape."""
    records = np.ascontiguousarray(records)
    assert packed.flags.c_contiguous
    _pack(records, packed, len(records), form.inner(records.shape[1]), form, is_gated, is_inverse=False)


def unpack(
    packed: UInt8[np.ndarray, "panels blocks of_block"], outer: int, inner: int, form: Form, is_gated: bool = False
) -> UInt8[np.ndarray, "outer bytes"]:
    """Unpack to rows of records, bit for bit."""
    packed = np.ascontiguousarray(packed)
    assert packed.shape == packed_shape(outer, inner, form, is_gated), packed.shape
    records = aligned((outer, form.row_bytes(inner)), np.dtype(np.uint8))
    _pack(records, packed, outer, inner, form, is_gated, is_inverse=True)
    return records


def rows(
    packed: UInt8[Array, "panels blocks of_block"], indices: Int[Array, " T"], inner: int, form: Form
) -> Float[Array, "T inner"]:
    """Return rows of the weight, as ``quantized.decode`` computes them."""
    result = jax.ShapeDtypeStruct((len(indices), inner), jnp.float32)
    return jax.ffi.ffi_call(target("quantized_rows"), result)(
        packed, indices.astype(jnp.int32), **attributes(form, inner)
    )


def matmul(
    x: Float[Array, "T features"],
    packed: UInt8[Array, "panels blocks of_block"],
    outer: int,
    form: Form,
    *,
    fused: Fused,
    num_rows: Int[Array, ""] | None = None,
    order: Int[Array, " inner"] | None = None,
) -> Float[Array, "T results"]:
    """Compute ``x @ weight.T`` and what is fused with it; see ``quantized_linear.QuantizedLinear``."""
    inner = x.shape[1] if order is None else order.shape[0]
    indices = jnp.zeros(0, jnp.int32) if order is None else order.astype(jnp.int32)
    return call("quantized_linear", x, (packed, indices), outer, fused, num_rows, inner, **attributes(form, inner))


def attributes(form: Form, inner: int) -> dict[str, Any]:
    """Return what handlers are told about a form."""
    return {"form": _numbers_of(form, inner), "table": np.array(form.table or _PLAIN, np.float32)}


def _block(form: Form, inner: int) -> int:
    """Return the features of a block: those that share factors, or those that share a scale if there are no factors."""
    return form.shared(inner) if form.factors is None else form.shared_factors(inner)


def _numbers_of(form: Form, inner: int) -> np.ndarray:
    """Return the struct ``Form`` of ``native/quantized.h``."""
    kinds = [_NUMBERS[kind] for kind in (form.scales, form.zeros, form.biases, form.factors)]
    groups = [form.span, form.shared(inner), _block(form, inner)]
    numbers = [_VALUES[form.values], *groups, form.zero, _ACTIVATIONS[form.activations], *kinds, form.divides]
    return np.array(numbers, np.int32)


def _pack(
    records: np.ndarray | None,
    packed: np.ndarray | None,
    outer: int,
    inner: int,
    form: Form,
    is_gated: bool,
    is_inverse: bool,
) -> int:
    """Pack or unpack, where there are arrays; return the bytes of a block."""
    convert = library().jaxserve_quantized_pack
    convert.restype = ctypes.c_int64
    numbers = _numbers_of(form, inner)
    block_bytes = convert(
        *(ctypes.c_void_p(None if array is None else array.ctypes.data) for array in (records, packed, numbers)),
        *(ctypes.c_int64(size) for size in (outer, inner)),
        *(ctypes.c_int(flag) for flag in (is_gated, is_inverse)),
    )
    assert block_bytes > 0, (form, inner)
    return block_bytes
