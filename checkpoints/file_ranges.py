"""Reads boxes of strided arrays out of a file by byte range, with `preadv` and bounded scratch memory.

No memory map: a column slice through one would touch every page of the tensor and keep them in the process's RSS.
"""

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.tensor_info import index_bounds

SCRATCH_BYTES = 2 << 20
MIN_GAP_BYTES = 64
"""Shortest gap between two rows that is not read. A call for each row takes about a microsecond, as long as some
kilobytes, but of a model that many processes share, the gaps would be most of its bytes."""
_PAGE_BYTES = 4096


class StridedLayout(NamedTuple):
    """Position of an array in a file: first byte, dtype, shape, and strides counted in elements."""

    start_byte: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_spanned(self) -> int:
        """Number of elements from the first to the last, both included; 0 for an empty array."""
        return num_spanned(self.shape, self.strides)


def num_spanned(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one of a strided array, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous row-major array."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


class RangeFile:
    """A regular file opened for reading byte ranges; safe to use from several threads.

    Args:
        path: the file.

    Raises:
        CheckpointError: the path is missing, unreadable or not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        self.num_bytes = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read_bytes(self, start: int, count: int) -> bytes:
        """Return `count` bytes from position `start`.

        Args:
            start: first byte.
            count: number of bytes.

        Raises:
            CheckpointError: the file ends earlier, or cannot be read.
        """
        buffer = bytearray(count)
        self._read_into(start, memoryview(buffer))
        return bytes(buffer)

    def read_box(self, layout: StridedLayout, index: Sequence[slice]) -> np.ndarray:
        """Read a box of a strided array into a new contiguous array.

        Bytes outside the box are read only where fewer than 64 are between two of its rows; scratch memory is at most
        2 MiB.

        Args:
            layout: where the array lies.
            index: one slice of step 1 for each axis.

        Raises:
            CheckpointError: the file ends before the box does, cannot be read, or no array can have the box's shape.
        """
        bounds = index_bounds(index, layout.shape)
        lengths = tuple(stop - start for start, stop in bounds)
        if 0 in lengths:
            return self._empty(lengths, layout.dtype)
        first = sum(start * stride for (start, _), stride in zip(bounds, layout.strides, strict=True))
        # Walk the storage in its own order (a transposed view becomes row-major); a repeated axis is read once.
        order = sorted(range(len(lengths)), key=lambda axis: -layout.strides[axis])
        strides = tuple(layout.strides[axis] for axis in order)
        read_shape = tuple(lengths[axis] if layout.strides[axis] else 1 for axis in order)
        read = np.empty(read_shape, layout.dtype)
        self._fill(read, layout.start_byte + first * layout.dtype.itemsize, strides)
        back = sorted(range(len(order)), key=lambda axis: order[axis])
        result = np.broadcast_to(read.transpose(back), lengths)
        return result if result.flags.c_contiguous else np.ascontiguousarray(result)

    def _empty(self, lengths: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array without elements, of which a damaged header may give impossible lengths."""
        try:
            return np.empty(lengths, dtype)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {list(lengths)} is not the shape of a tensor: {error}") from error

    def _fill(self, out: np.ndarray, start_byte: int, strides: tuple[int, ...]) -> None:
        """Fill the contiguous `out` from a strided box whose strides descend."""
        if _is_contiguous(out.shape, strides):
            self._read_into(start_byte, out.reshape(-1).view(np.uint8).data)
            return
        itemsize = out.dtype.itemsize
        spanned = num_spanned(out.shape, strides)
        is_dense = _widest_gap(out.shape, strides) * itemsize < MIN_GAP_BYTES
        if is_dense and spanned * itemsize <= SCRATCH_BYTES:
            scratch = np.empty(spanned, out.dtype)
            self._read_into(start_byte, scratch.view(np.uint8).data)
            byte_strides = tuple(stride * itemsize for stride in strides)
            out[...] = np.ndarray(out.shape, out.dtype, scratch, strides=byte_strides)
        elif out.shape[0] == 1:
            self._fill(out[0], start_byte, strides[1:])
        elif not is_dense and _is_contiguous(out.shape[1:], strides[1:]):
            self._read_rows(out, start_byte, strides[0] * itemsize)
        else:
            # At most half of the rows, since those of an overlapping view can span more than their stride.
            most = max(1, SCRATCH_BYTES // (strides[0] * itemsize)) if is_dense else 1
            step = min(most, (out.shape[0] + 1) // 2)
            for row in range(0, out.shape[0], step):
                self._fill(out[row : row + step], start_byte + row * strides[0] * itemsize, strides)

    def _read_rows(self, out: np.ndarray, start: int, stride: int) -> None:
        """Fill `out` from contiguous rows that begin `stride` bytes after each other.

        The system reads a device in pages, far ahead, but only where a program reads on: it is told what comes.
        """
        rows = out.reshape(len(out), -1).view(np.uint8)
        length = rows.shape[1]
        if stride - length < _PAGE_BYTES:  # every page has a part of a row
            self._expect(start, (len(rows) - 1) * stride + length)
        else:
            for row in range(len(rows)):
                self._expect(start + row * stride, length)
        for row, buffer in enumerate(rows):
            self._read_into(start + row * stride, buffer.data)

    def _expect(self, start: int, count: int) -> None:
        """Let the system begin to read bytes from the device; how it does is its own affair."""
        with contextlib.suppress(OSError, AttributeError):  # not every system and file system has it
            os.posix_fadvise(self._descriptor, start, count, os.POSIX_FADV_WILLNEED)

    def _read_into(self, start: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], start + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: the file ends at byte {self.num_bytes}, expected {len(buffer)} bytes from {start}"
                )
            done += count


def _widest_gap(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the most elements between two that follow each other in a strided array, whose strides descend."""
    gaps = [
        stride - num_spanned(shape[axis + 1 :], strides[axis + 1 :])
        for axis, (length, stride) in enumerate(zip(shape, strides, strict=True))
        if length > 1
    ]
    return max(gaps, default=0)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = row_major_strides(shape)
    return all(length == 1 or stride == dense for length, stride, dense in zip(shape, strides, expected, strict=True))


def full_layout(start_byte: int, dtype: np.dtype, shape: Sequence[int]) -> StridedLayout:
    """Return the layout of a contiguous row-major array.

    Args:
        start_byte: position of the first element in the file.
        dtype: element type.
        shape: shape of the array.
    """
    return StridedLayout(start_byte, dtype, tuple(shape), row_major_strides(shape))
