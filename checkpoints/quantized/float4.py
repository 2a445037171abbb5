"""Four-bit floats in groups along the inputs: MXFP4 and NVFP4, in the forms that tools store them.

A code is sign and magnitude, e2m1. MXFP4 has groups of 32 with a power of two as scale (e8m0); NVFP4 has groups of 16
with a float8 scale and one float32 scale for the whole tensor.
"""

from collections.abc import Callable, Collection

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.format import Box, QuantizedTensor, check_tensor, info_of
from checkpoints.quantized.planes import Factored, Planes, halves_of
from checkpoints.quantized.records import Records
from checkpoints.reader import CheckpointReader

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
"""Value of each code."""
MXFP4_GROUP = 32
NVFP4_GROUP = 16
_BIAS, _NAN = 127, 255


def powers_of_two(exponents: np.ndarray, stored: str) -> np.ndarray:
    """Return the float32 values of e8m0 scales.

    Args:
        exponents: uint8, or e8m0 of ml_dtypes.
        stored: Name of the tensor, for messages.

    Raises:
        CheckpointError: A scale is NaN.
    """
    exponents = exponents.view(np.uint8)
    if (exponents == _NAN).any():
        raise CheckpointError(f"tensor {stored!r} has scales that are not finite")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)


def open_float4(
    reader: CheckpointReader,
    format_name: str,
    packed: str,
    scale: str,
    group: int,
    scale_dtypes: Collection[np.dtype],
    decode_scales: Callable[[np.ndarray], np.ndarray],
    scales: str,
    factor: np.ndarray | None = None,
    divides: bool = False,
) -> QuantizedTensor:
    """Return a matrix of four-bit floats.

    Args:
        reader: The stored tensors.
        format_name: For messages.
        packed: The codes, uint8 [N, K / 2], two in each byte as ``read_float4`` reads them.
        scale: The scales, [N, K / group].
        group: Columns of a group.
        scale_dtypes: Expected dtypes of the scales.
        decode_scales: Converts stored scales to float32.
        scales: Type that holds these exactly.
        factor: A number that multiplies all scales; None: nothing does.
        divides: Whether it divides them instead.

    Raises:
        CheckpointError: Another shape or dtype.
    """
    rows, num_bytes = info_of(reader, format_name, packed).shape
    why = f"{2 * num_bytes} inputs in groups of {group}, {rows} outputs"
    check_tensor(reader, format_name, packed, (rows, num_bytes), (np.dtype(np.uint8),), why)
    check_tensor(reader, format_name, scale, (rows, -(-2 * num_bytes // group)), scale_dtypes, why)

    def read_scales(box_rows: slice, columns: slice) -> np.ndarray:
        return decode_scales(reader.read(scale, (box_rows, columns)))

    def planes(box: Box) -> Planes:
        found = read_float4(lambda r, c: reader.read(packed, (r, c)), read_scales, box.rows, box.columns, group)
        if factor is None:
            return found
        factored = Factored(found.scales, np.broadcast_to(factor, found.scales.shape))
        scales = found.scales / factor if divides else found.scales * factor
        return found._replace(scales=scales, factored=factored)

    records = float4_records(group, scales)
    if factor is not None:
        records = records._replace(factors="float32", divides=divides)
    return QuantizedTensor((rows, 2 * num_bytes), (packed, scale), planes, records=lambda: records)


def float4_records(group: int, scales: str, is_transposed: bool = False) -> Records:
    """Return what rows of records of four-bit floats hold; arguments are those of ``open_float4`` and ``Records``."""
    return Records("uint4", group, scales, table=tuple(map(float, E2M1)), is_transposed=is_transposed)


def read_float4(
    read_bytes: Callable[[slice, slice], np.ndarray],
    read_scales: Callable[[slice, slice], np.ndarray],
    rows: slice,
    columns: slice,
    group: int,
) -> Planes:
    """Return a box of a matrix whose rows are bytes of two codes, the even one in the low half.

    Args:
        read_bytes: Returns a box of bytes, uint8 [rows, K / 2].
        read_scales: Returns a box of scales, float32 [rows, K / group].
        rows: Rows of the box.
        columns: Columns of the box.
        group: Columns of a group.
    """
    first, last = columns.start // group, -(-columns.stop // group)
    data = read_bytes(rows, slice(columns.start // 2, -(-columns.stop // 2)))
    codes, blocks = halves_of(data, columns.start % 2, columns.stop - columns.start)
    return Planes(
        codes,
        read_scales(rows, slice(first, last)),
        table=E2M1,
        columns=np.arange(columns.start, columns.stop) // group - first,
        blocks=blocks,
    )
