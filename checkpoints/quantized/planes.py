"""The form that all quantized formats share: integer codes, and scales, zeros and biases of groups of them.

An element is its code, or what a table has for the code; minus its zero, times its scale, plus its bias. It is computed
in float32, in this order.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_WORD = 32


class Planes(NamedTuple):
    """A box of a quantized matrix, not decoded.

    Scales, zeros and biases are matrices with an element for each group of elements. A group is a part of some rows and
    some columns; a side without an index has one group for each row or column, or a single one for all.

    Attributes:
        codes: [R, C], uint8 or int8.
        scales: [groups of rows, groups of columns], float32.
        zeros: float32 or integers, like the scales; None for none.
        biases: float32, like the scales; None for none.
        table: float32 value of each code; None: the codes are the values.
        rows: Group of each row, int [R], in the scales' first axis; None: see above.
        columns: Group of each column, int [C], in the scales' second axis.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    biases: np.ndarray | None = None
    table: np.ndarray | None = None
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None

    @property
    def transposed(self) -> "Planes":
        """The planes of the transposed box."""

        def turn(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else array.T

        codes, scales = self.codes.T, self.scales.T
        return Planes(codes, scales, turn(self.zeros), turn(self.biases), self.table, self.columns, self.rows)

    def decode(self) -> np.ndarray:
        """Return the box in float32."""
        if self.codes.flags.f_contiguous and not self.codes.flags.c_contiguous:
            return self.transposed.decode().T
        values = self.codes.astype(np.float32) if self.table is None else np.take(self.table, self.codes, mode="clip")
        steps = ((np.subtract, self.zeros), (np.multiply, self.scales), (np.add, self.biases))
        for operation, grid in steps:
            if grid is not None:
                self._apply(operation, values, grid)
        return values

    def decode_into(self, result: np.ndarray) -> None:
        """Write the box, rounded to the dtype of an array."""
        with np.errstate(over="ignore", invalid="ignore"):
            result[...] = self.decode()

    def _apply(self, operation: Callable[..., object], values: np.ndarray, grid: np.ndarray) -> None:
        """Apply an operation to each element and its group's member of the grid, in place."""
        if self.rows is not None:
            grid = grid[self.rows]
        if self.columns is None:
            operation(values, grid, out=values)
            return
        size = _run_length(self.columns, grid.shape[1])
        if size and values.flags.c_contiguous:
            runs = values.reshape(values.shape[0], grid.shape[1], size)
            operation(runs, grid[:, :, None], out=runs)
        else:
            operation(values, grid[:, self.columns], out=values)


def _run_length(groups: np.ndarray, count: int) -> int:
    """Return the length of the groups if each of the ``count`` groups is a run of one length, in order; else 0."""
    size, rest = divmod(len(groups), max(count, 1))
    if rest or not size or not np.array_equal(groups, np.repeat(np.arange(count), size)):
        return 0
    return size


def read_packed(read: Callable[[slice], np.ndarray], codes: slice, bits: int, num_words: int) -> np.ndarray:
    """Return a range of the codes that rows of 32-bit words hold, packed as for ``unpack``.

    Args:
        read: Returns a range of the words of each row, [R, words].
        codes: The range.
        bits: Bits per code, 1 to 8.
        num_words: Words of a row.

    Returns:
        uint8 [R, codes].
    """
    block = _WORD // math.gcd(bits, _WORD)  # codes after which a word begins anew
    words_per_block = block * bits // _WORD
    first, last = codes.start // block, -(-codes.stop // block)
    words = read(slice(first * words_per_block, min(last * words_per_block, num_words)))
    return unpack(words, bits, codes.stop - first * block)[:, codes.start - first * block :]


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return the codes that rows of words hold: a stream of bits per row, the lowest of each word and code first.

    Args:
        words: Unsigned integers of any size in rows, [R, W].
        bits: Bits per code, 1 to 8.
        count: Codes of each row; further bits are padding.

    Returns:
        uint8 [R, count].
    """
    data = np.ascontiguousarray(words.astype(words.dtype.newbyteorder("<"), copy=False)).view(np.uint8)
    num_rows = data.shape[0]
    if bits == 8:
        return data[:, :count]
    if 8 % bits == 0:
        for width in (4, 2, 1):
            if width >= bits:
                data = _halve(data, width)
        return data[:, :count]
    stream = np.unpackbits(data, axis=1, bitorder="little")[:, : count * bits].reshape(num_rows, count, bits)
    return np.packbits(stream, axis=2, bitorder="little").reshape(num_rows, count)


def _halve(fields: np.ndarray, width: int) -> np.ndarray:
    """Split fields, one in each byte, into two of half their width in a byte each, the lower one first."""
    pairs = fields.astype("<u2")
    pairs |= pairs << np.uint16(8 - width)
    pairs &= np.uint16(((1 << width) - 1) * 0x0101)
    return pairs.view(np.uint8)
