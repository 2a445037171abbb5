"""Rows of records of quantized weights, made in a native kernel for x86 CPUs, called through ``ctypes``.

It runs while weights are loaded, on the host and without Python's lock: NumPy arrays go in and out.
"""

import ctypes
from collections.abc import Sequence

import numpy as np

from pallas_kernels.dequantize_native import Blocks, BlocksStruct
from pallas_kernels.native_library import library

_MOST_NUMBERS = 5


class _Numbers(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_void_p), *[(name, ctypes.c_int64) for name in ("size", "row", "column")]]


class _Job(ctypes.Structure):
    """The arguments of the kernel; see ``Records`` in ``native/records.h``."""

    _fields_ = [
        *[("codes", ctypes.c_void_p), ("code_row", ctypes.c_int64), ("blocks", BlocksStruct)],
        *[(name, ctypes.c_int64) for name in ("num_rows", "num_columns", "span", "added", "is_halves")],
        *[("row_groups", ctypes.c_void_p), ("record_groups", ctypes.c_void_p)],
        ("numbers", _Numbers * _MOST_NUMBERS),
        *[("columns", ctypes.c_void_p), ("whole", ctypes.c_void_p), ("num_given", ctypes.c_int64)],
        *[("result", ctypes.c_void_p), ("result_row", ctypes.c_int64), ("record_bytes", ctypes.c_int64)],
    ]


class _Turn(ctypes.Structure):
    """The arguments of ``turned``; see ``native/records.h``."""

    _fields_ = [
        ("words", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("word_row", "num_columns", "num_words")],
        *[("place", ctypes.c_int64 * 8), ("result", ctypes.c_void_p)],
    ]


def pack(
    result: np.ndarray,
    codes: np.ndarray,
    blocks: Blocks | None,
    added: int,
    is_halves: bool,
    span: int,
    numbers: Sequence[np.ndarray],
    rows: np.ndarray | None,
    records: np.ndarray | None,
    columns: np.ndarray | None = None,
) -> None:
    """Write a box of a quantized matrix as rows of records.

    Args:
        result: uint8 [R, C / span * bytes of a record], the bytes of a row contiguous.
        codes: [R, C], uint8 or int8; or uint8 [R, bytes], rows of blocks.
        blocks: How rows of blocks hold the codes, as for ``dequantize``; None: ``codes`` has them.
        added: Added to each code, modulo 256.
        is_halves: Whether a record has two codes in a byte, of which four bits each count.
        span: Columns of a record.
        numbers: What a record has after its codes: [groups of rows, groups of columns], each in its type.
        rows: Group of each row, int [R]; None: each is one, or there is one for all.
        records: Group of each record, int [C / span]; likewise.
        columns: The column of the codes that each is, int [C]; below 0 for one that is filled up, whose code is 0.
            None: they are the same.

    Raises:
        NotImplementedError: The native kernels cannot run in this process.
    """
    if not result.size:
        return
    assert result.strides[1] == 1, result.strides
    codes = codes if codes.strides[1] == 1 else np.ascontiguousarray(codes)
    num_given = codes.shape[1] if blocks is None else blocks[-1]
    num_columns, whole = num_given if columns is None else len(columns), np.empty(num_given, np.uint8)
    row_groups, record_groups, order = (
        None if each is None else np.ascontiguousarray(each, np.int32) for each in (rows, records, columns)
    )
    record_bytes = (span // 2 if is_halves else span) + sum(each.itemsize for each in numbers)
    assert result.shape == (len(codes), num_columns // span * record_bytes), (result.shape, codes.shape)
    job = _Job(
        *(codes.ctypes.data, codes.strides[0], BlocksStruct(*blocks[:-1]) if blocks else BlocksStruct()),
        *(len(codes), num_columns, span, added, is_halves),
        *(None if each is None else each.ctypes.data for each in (row_groups, record_groups)),
        (_Numbers * _MOST_NUMBERS)(*map(_numbers, numbers)),
        *(None if order is None else order.ctypes.data, whole.ctypes.data, num_given),
        *(result.ctypes.data, result.strides[0], record_bytes),
    )
    library().jaxserve_records(ctypes.byref(job))


def _numbers(grid: np.ndarray) -> _Numbers:
    """Describe a matrix of numbers; an axis of one number has it for all groups."""
    steps = (0 if length == 1 else stride for stride, length in zip(grid.strides, grid.shape, strict=True))
    return _Numbers(grid.ctypes.data, grid.itemsize, *steps)


def turned(words: np.ndarray, places: Sequence[int]) -> np.ndarray:
    """Return the codes of rows that words have along them, two in each byte, the first in the lower half.

    Args:
        words: 32 bits each, [C, words]: a code of four bits for each of eight rows.
        places: The row of each code of a word, the lowest first, among the eight.

    Returns:
        uint8 [rows, (C + 1) / 2].

    Raises:
        NotImplementedError: The native kernels cannot run in this process.
    """
    words = words if words.strides[1] == words.itemsize else np.ascontiguousarray(words)
    num_columns, num_words = words.shape
    result = np.empty((8 * num_words, (num_columns + 1) // 2), np.uint8)
    job = _Turn(
        *(words.ctypes.data, words.strides[0], num_columns, num_words),
        *((ctypes.c_int64 * 8)(*places), result.ctypes.data),
    )
    library().jaxserve_turn(ctypes.byref(job))
    return result
