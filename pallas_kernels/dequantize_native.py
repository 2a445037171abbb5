"""Decoding of quantized weights in a native kernel for x86 CPUs, called through ``ctypes`` without Python's lock.

It runs while weights are loaded, on the host: NumPy arrays go in and out, and XLA is not involved.
"""

import ctypes

import ml_dtypes
import numpy as np

from pallas_kernels.native_library import library

RESULT_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
Fields = tuple[int, int, int]
"""Offset of bit fields in a block, bits of each, bytes that hold the lowest field of each before the next of each."""
Blocks = tuple[Fields, Fields, int, int, int, int, int]
"""Low and high fields, the zero that is subtracted, bytes and codes of a block, first code and columns of the box."""
_TABLE_SIZES = (16, 256)
_MOST_LANES = 16
_SHORT_RUN = 8  # columns on average; with shorter runs, each column has its group
_NO_ZERO, _NO_BIAS = np.zeros((1, 1), np.float32), np.full((1, 1), -0.0, np.float32)  # adding -0.0 changes no number


class _Grid(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_void_p), ("row", ctypes.c_int64), ("column", ctypes.c_int64)]


class _Fields(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("offset", "width", "run")]


class BlocksStruct(ctypes.Structure):
    _fields_ = [
        *[("low", _Fields), ("high", _Fields)],
        *[(name, ctypes.c_int64) for name in ("zero", "num_bytes", "num_codes", "first")],
    ]


class _Job(ctypes.Structure):
    """The arguments of the kernel; see ``native/dequantize.h``."""

    _fields_ = [
        *[("codes", ctypes.c_void_p), ("code_row", ctypes.c_int64), ("blocks", BlocksStruct)],
        *[("num_rows", ctypes.c_int64), ("num_columns", ctypes.c_int64)],
        *[("table", ctypes.c_void_p), ("table_size", ctypes.c_int64), ("is_signed", ctypes.c_int64)],
        *[(name, ctypes.c_void_p) for name in ("row_groups", "run_starts", "run_groups", "column_groups")],
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
    blocks: Blocks | None = None,
) -> None:
    """Write ``(value - zero) * scale + bias`` of each element, computed in float32 in this order and rounded once.

    Zeros, scales and biases are matrices with an element for each group of elements; a group is a part of some rows and
    some columns. A side without an index has one group for each row or column, or a single one for all.

    Args:
        result: [R, C], float32 or bfloat16, of any strides.
        codes: [R, C], uint8 or int8; or uint8 [R, bytes], rows of blocks.
        scales: [groups of rows, groups of columns], float32.
        zeros: Numbers like the scales; None for none.
        biases: float32 like the scales; None for none.
        table: float32 value of each code, at most 256; None: the codes are the values.
        rows: Group of each row, int [R].
        columns: Group of each column, int [C].
        blocks: How the rows of blocks hold the codes, which are int8: in a low field, with a high one of some width or
            0 above it, minus a number.

    Raises:
        NotImplementedError: The native kernels cannot run in this process.
    """
    if blocks is None and codes.strides[1] != 1 and codes.strides[0] == 1:  # columns are contiguous
        zeros, biases = (None if grid is None else grid.T for grid in (zeros, biases))
        return dequantize(result.T, codes.T, scales.T, zeros, biases, table, columns, rows)
    if not codes.size:
        return None
    codes = codes if codes.strides[1] == 1 else np.ascontiguousarray(codes)
    if table is not None:
        size = next(size for size in _TABLE_SIZES if len(table) <= size)
        table = np.pad(np.asarray(table, np.float32), (0, size - len(table)), mode="edge")
    num_rows, num_columns = result.shape
    numbers = (_NO_ZERO if zeros is None else zeros, scales, _NO_BIAS if biases is None else biases)
    starts, run_groups = _runs(columns, num_columns, max(grid.shape[1] for grid in numbers))
    has_runs = num_columns >= _SHORT_RUN * len(run_groups)
    grids = [np.asarray(grid, np.float32, order="C" if has_runs else "F") for grid in numbers]
    row_groups = None if rows is None else np.ascontiguousarray(rows, np.int32)
    column_groups = None if has_runs else np.pad(_groups(columns, num_columns), (0, _MOST_LANES))
    job = _Job(
        *(codes.ctypes.data, codes.strides[0], BlocksStruct(*blocks[:-1]) if blocks else BlocksStruct()),
        *(num_rows, num_columns),
        *(_address(table), 0 if table is None else len(table)),
        blocks is not None or codes.dtype == np.int8,
        *(_address(row_groups), _address(starts), _address(run_groups), _address(column_groups)),
        *map(_grid, grids),
        *(result.ctypes.data, *(stride // result.itemsize for stride in result.strides)),
        result.dtype != np.float32,
    )
    library().jaxserve_dequantize(ctypes.byref(job))
    return None


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def _groups(index: np.ndarray | None, length: int) -> np.ndarray:
    """Return the group of each column; a column is a group where there is no index."""
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
