"""The form that all quantized formats share: integer codes, and scales, zeros and biases of groups of them.

An element is its code, or what a table has for the code; minus its zero, times its scale, plus its bias. It is computed
in float32, in this order.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_WORD = 32


class Fields(NamedTuple):
    """Bit fields of bytes of a block: runs of bytes hold the lowest field of each, then the next field of each.

    Attributes:
        offset: The first byte.
        width: Bits of a field; 0 if there are none.
        run: Bytes of a run; 0 for low fields of a block of eight that run on from byte to byte.
    """

    offset: int
    width: int
    run: int


class Blocks(NamedTuple):
    """How rows of blocks of bytes hold codes: a code is a low field, with a high one above it, minus the zero.

    Attributes:
        low: The low fields.
        high: The high fields.
        zero: Subtracted from each code.
        num_bytes: Bytes of a block.
        num_codes: Codes of a block.
        first: Codes of the first block that do not belong to the box.
        num_columns: Codes of a row of the box.
    """

    low: Fields
    high: Fields = Fields(0, 0, 0)
    zero: int = 0
    num_bytes: int = 0
    num_codes: int = 0
    first: int = 0
    num_columns: int = 0

    def unpack(self, data: np.ndarray) -> np.ndarray:
        """Return the codes of a box.

        Args:
            data: uint8 [R, bytes], whole blocks.

        Returns:
            int8 [R, num_columns].
        """
        if not self.low.run:
            return unpack(data, self.low.width, self.first + self.num_columns)[:, self.first :].view(np.int8)
        blocks = data.reshape(-1, self.num_bytes)
        codes = self._read(blocks, self.low)
        if self.high.width:
            codes |= self._read(blocks, self.high) << np.uint8(self.low.width)
        codes -= np.uint8(self.zero)  # wraps
        return codes.view(np.int8).reshape(len(data), -1)[:, self.first : self.first + self.num_columns]

    def _read(self, blocks: np.ndarray, fields: Fields) -> np.ndarray:
        end = fields.offset + self.num_codes * fields.width // 8
        return bit_fields(blocks[:, fields.offset : end], fields.width, fields.run)


class Words(NamedTuple):
    """How 32-bit words, [C, words], hold the codes of a box: each has one of four bits for each of eight rows.

    Attributes:
        places: The row of each code of a word, the lowest first, among the eight.
        first: Rows of the first words that do not belong to the box.
        num_rows: Rows of the box.
    """

    places: tuple[int, ...]
    first: int
    num_rows: int

    def unpack(self, words: np.ndarray) -> np.ndarray:
        """Return the codes of a box, uint8 [num_rows, C]."""
        turned = np.ascontiguousarray(words.view(np.uint32).T)
        codes = np.empty((len(turned), len(self.places), turned.shape[1]), np.uint8)
        for code, place in enumerate(self.places):
            codes[:, place] = (turned >> np.uint32(4 * code)) & np.uint32(15)
        return codes.reshape(-1, turned.shape[1])[self.first : self.first + self.num_rows]


class Factored(NamedTuple):
    """Scales and biases of a box as integers and the factors of groups of them, from which they are computed.

    Attributes:
        scales: Integers, [R, groups of columns].
        scale_factors: Floats, [R, groups of columns]: that of each scale.
        biases: Integers, like the scales; None for none.
        bias_factors: Floats, like the scales; None for none.
    """

    scales: np.ndarray
    scale_factors: np.ndarray
    biases: np.ndarray | None = None
    bias_factors: np.ndarray | None = None

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> "Factored":
        """Return what a function makes of each array."""
        rest = (None if each is None else function(each) for each in (self.biases, self.bias_factors))
        return Factored(function(self.scales), function(self.scale_factors), *rest)


class Planes(NamedTuple):
    """A box of a quantized matrix, not decoded.

    Scales, zeros and biases are matrices with an element for each group of elements. A group is a part of some rows and
    some columns; a side without an index has one group for each row or column, or a single one for all.

    Attributes:
        codes: [R, C], uint8 or int8; or blocks or words that hold them.
        scales: [groups of rows, groups of columns], float32.
        zeros: float32 or integers, like the scales; None for none.
        biases: float32, like the scales; None for none.
        table: float32 value of each code; None: the codes are the values.
        rows: Group of each row, int [R], in the scales' first axis; None: see above.
        columns: Group of each column, int [C], in the scales' second axis.
        blocks: How ``codes``, uint8 [R, bytes] or words, holds the codes; None: it is the codes.
        factored: What scales and biases were computed from; None: they are stored themselves.
        order: The column of ``codes`` that each column is, below 0 for one that is filled up, whose code is 0; None:
            they are the same.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    biases: np.ndarray | None = None
    table: np.ndarray | None = None
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    blocks: Blocks | Words | None = None
    factored: Factored | None = None
    order: np.ndarray | None = None

    @property
    def unpacked(self) -> "Planes":
        """The planes with one code per byte, in order."""
        found = self if self.blocks is None else self._replace(codes=self.blocks.unpack(self.codes), blocks=None)
        if found.order is None:
            return found
        codes = np.take(found.codes, found.order, axis=1, mode="clip")
        codes[:, found.order < 0] = 0
        return found._replace(codes=codes, order=None)

    @property
    def transposed(self) -> "Planes":
        """The planes of the transposed box, with one code per byte."""
        if self.blocks is not None or self.order is not None:
            return self.unpacked.transposed

        def turn(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else array.T

        codes, scales = self.codes.T, self.scales.T
        return Planes(codes, scales, turn(self.zeros), turn(self.biases), self.table, self.columns, self.rows)

    def rearranged(self, columns: np.ndarray, span: int) -> "Planes":
        """Return some columns in another order.

        Args:
            columns: The column that each is; the complement of one of its group for one that is filled up, whose code
                is 0.
            span: Columns that have one group.
        """
        places = np.maximum(columns, ~columns)
        groups = None if self.columns is None else np.repeat(self.columns[places[::span]], span)
        return self._replace(order=columns, columns=groups)

    def decode(self) -> np.ndarray:
        """Return the box in float32."""
        if self.blocks is not None or self.order is not None:
            return self.unpacked.decode()
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


def bit_fields(data: np.ndarray, width: int, run: int) -> np.ndarray:
    """Return the bit fields of bytes; see ``Fields``.

    Args:
        data: uint8 [N, bytes].
        width: Bits of a field.
        run: Bytes of a run.
    """
    if run == 1:
        return unpack(data, width, data.shape[1] * 8 // width)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    fields = data.reshape(len(data), -1, 1, run) >> shifts
    fields &= np.uint8((1 << width) - 1)
    return fields.reshape(len(data), -1)


def pairs_of(num_columns: int, first: int = 0) -> Blocks:
    """Return how rows of bytes hold two codes each, the first in the lower half."""
    return Blocks(Fields(0, 4, 1), num_bytes=1, num_codes=2, first=first, num_columns=num_columns)


def halves_of(data: np.ndarray, first: int, num_columns: int) -> tuple[np.ndarray, Blocks]:
    """Return rows of bytes of two codes, the first in the low half, as ``codes`` and ``blocks`` of ``Planes``."""
    return data, pairs_of(num_columns, first)


def read_packed(read: Callable[[slice], np.ndarray], codes: slice, bits: int, num_words: int) -> np.ndarray:
    """Return a range of the codes that rows of 32-bit words hold, uint8 [R, codes]; arguments are ``read_codes``'s."""
    found, blocks = read_codes(read, codes, bits, num_words)
    return found if blocks is None else blocks.unpack(found).view(np.uint8)


def read_codes(
    read: Callable[[slice], np.ndarray], codes: slice, bits: int, num_words: int
) -> tuple[np.ndarray, Blocks | None]:
    """Return a range of the codes that rows of 32-bit words hold, packed as for ``unpack``; they are unpacked if a
    byte has one, four or eight of them.

    Args:
        read: Returns a range of the words of each row, [R, words].
        codes: The range.
        bits: Bits per code, 1 to 8.
        num_words: Words of a row.

    Returns:
        ``codes`` and ``blocks`` of ``Planes``.
    """
    block = _WORD // math.gcd(bits, _WORD)  # codes after which a word begins anew
    words_per_block = block * bits // _WORD
    first, last = codes.start // block, -(-codes.stop // block)
    words = read(slice(first * words_per_block, min(last * words_per_block, num_words)))
    skip = codes.start - first * block
    count = codes.stop - codes.start
    if bits == 4:
        return halves_of(_bytes_of(words), skip, count)
    if 8 % bits == 0:
        return unpack(words, bits, skip + count)[:, skip:], None
    data = _bytes_of(words)
    missing = -(-(skip + count) // 8) * bits - data.shape[1]  # of the last block of eight
    data = np.pad(data, ((0, 0), (0, missing))) if missing > 0 else data
    return data, Blocks(Fields(0, bits, 0), num_bytes=bits, num_codes=8, first=skip, num_columns=count)


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return the codes that rows of words hold: a stream of bits per row, the lowest of each word and code first.

    Args:
        words: Unsigned integers of any size in rows, [R, W].
        bits: Bits per code, 1 to 8.
        count: Codes of each row; further bits are padding.

    Returns:
        uint8 [R, count].
    """
    data = _bytes_of(words)
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


def _bytes_of(words: np.ndarray) -> np.ndarray:
    """Return the bytes of rows of words, the lowest of each word first."""
    return np.ascontiguousarray(words.astype(words.dtype.newbyteorder("<"), copy=False)).view(np.uint8)


def _halve(fields: np.ndarray, width: int) -> np.ndarray:
    """Split fields, one in each byte, into two of half their width in a byte each, the lower one first."""
    pairs = fields.astype("<u2")
    pairs |= pairs << np.uint16(8 - width)
    pairs &= np.uint16(((1 << width) - 1) * 0x0101)
    return pairs.view(np.uint8)
