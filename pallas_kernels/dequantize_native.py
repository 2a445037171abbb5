"""Decoding of quantized weights in a native kernel for x86 CPUs, called through ``ctypes`` without Python's lock.

It runs while weights are loaded, on the host: NumPy arrays go in and out, and XLA is not involved.
"""

import ctypes

import ml_dtypes
import numpy as np

from pallas_kernels.native_library import library

RESULT_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
_NUM_CODES = 256
_NO_ZERO, _NO_BIAS = np.zeros((1, 1), np.float32), np.full((1, 1), -0.0, np.float32)  # adding -0.0 changes no number


class _Grid(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_void_p), ("row", ctypes.c_int64), ("column", ctypes.c_int64)]


class _Job(ctypes.Structure):
    """The arguments of the kernel; see ``native/dequantize.h``."""

    _fields_ = [
        *[("codes", ctypes.c_void_p), ("code_row", ctypes.c_int64)],
        *[("num_rows", ctypes.c_int64), ("num_columns", ctypes.c_int64)],
        *[("table", ctypes.c_void_p), ("is_signed", ctypes.c_int64)],
        *[(name, ctypes.c_void_p) for name in ("row_groups", "run_starts", "run_groups")],
        *[(name, _Grid) for name in ("zeros", "scales", "biases")],
        *[("result", ctypes.c_void_p), ("result_row", ctypes.c_int64), ("result_column", ctypes.c_int64)],
        ("is_bf16", ctypes.c_int64),
    ]


def dequantize(
    result: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None = None,
    biases: np.ndarray | None = None,
    table: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> None:
    """Write ``(value - zero) * scale + bias`` of each element, computed in float32 in this order and rounded once.

    Zeros, scales and biases are matrices with an element for each group of elements; a group is a part of some rows and
    some columns. A side without an index has one group for each row or column, or a single one for all.

    Args:
        result: [R, C], float32 or bfloat16, of any strides.
        codes: [R, C], uint8 or int8.
        scales: [groups of rows, groups of columns], float32.
        zeros: Numbers like the scales; None for none.
        biases: float32 like the scales; None for none.
        table: float32 value of each code, at most 256; None: the codes are the values.
        rows: Group of each row, int [R].
        columns: Group of each column, int [C].

    Raises:
        NotImplementedError: The native kernels cannot run in this process.
    """
    if codes.strides[1] != 1 and codes.strides[0] == 1:  # columns are contiguous
        zeros, biases = (None if grid is None else grid.T for grid in (zeros, biases))
        return dequantize(result.T, codes.T, scales.T, zeros, biases, table, columns, rows)
    if not codes.size:
        return None
    codes = codes if codes.strides[1] == 1 else np.ascontiguousarray(codes)
    if table is not None:
        table = np.pad(np.asarray(table, np.float32), (0, _NUM_CODES - len(table)), mode="edge")
    grids = [
        np.asarray(grid, np.float32)
        for grid in (_NO_ZERO if zeros is None else zeros, scales, _NO_BIAS if biases is None else biases)
    ]
    row_groups = _groups(rows, codes.shape[0])
    starts, run_groups = _runs(columns, codes.shape[1], max(grid.shape[1] for grid in grids))
    job = _Job(
        *(codes.ctypes.data, codes.strides[0], *codes.shape),
        *(None if table is None else table.ctypes.data, codes.dtype == np.int8),
        *(row_groups.ctypes.data, starts.ctypes.data, run_groups.ctypes.data),
        *map(_grid, grids),
        *(result.ctypes.data, *(stride // result.itemsize for stride in result.strides)),
        result.dtype != np.float32,
    )
    library().jaxserve_dequantize(ctypes.byref(job))
    return None


def _groups(index: np.ndarray | None, length: int) -> np.ndarray:
    """Return the group of each row; a row is a group where there is no index."""
    return np.ascontiguousarray(np.arange(length) if index is None else index, np.int32)


def _runs(index: np.ndarray | None, length: int, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first column of each run of columns of one group, with their end, and the group of each run."""
    if index is None and num_groups == 1:
        return np.array([0, length], np.int32), np.zeros(1, np.int32)
    groups = _groups(index, length)
    starts = np.flatnonzero(np.diff(groups, prepend=-1)).astype(np.int32)
    return np.append(starts, np.int32(length)), groups[starts]


def _grid(numbers: np.ndarray) -> _Grid:
    """Describe a matrix of numbers; an axis of one number has it for all groups."""
    steps = (
        0 if length == 1 else stride // numbers.itemsize
        for stride, length in zip(numbers.strides, numbers.shape, strict=True)
    )
    return _Grid(numbers.ctypes.data, *steps)
