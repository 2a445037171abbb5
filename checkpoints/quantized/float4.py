"""Four-bit floats in groups along the inputs: MXFP4 and NVFP4, in the forms that tools store them.

A code is sign and magnitude, e2m1. MXFP4 has groups of 32 with a power of two as scale (e8m0); NVFP4 has groups of 16
with a float8 scale and one float32 scale for the whole tensor.
"""

from collections.abc import Callable

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.planes import Planes, unpack

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
    skip = columns.start % 2
    return Planes(
        unpack(data, 4, skip + columns.stop - columns.start)[:, skip:],
        read_scales(rows, slice(first, last)),
        table=E2M1,
        columns=np.arange(columns.start, columns.stop) // group - first,
    )
