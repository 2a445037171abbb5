"""Quantized tensors as rows of records: read without decoding, and cut as freely as decoded ones.

A record holds ``span`` features of a row: their codes, a byte each or half of one (the lower half first), then the
numbers that they share, in the file's own types: scale, zero, bias, factor of the scale, factor of the bias. Records of
one group repeat its numbers.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from checkpoints.quantized.column_order import ColumnOrder, column_order
from checkpoints.quantized.planes import Planes
from checkpoints.tensor_info import Index

SPANS = (32, 16, 8)
"""Features that a record may hold."""


class Records(NamedTuple):
    """What a quantized tensor holds. An element is ``(value - zero) * scale + bias``.

    Attributes:
        values: Type of the codes: "uint4", "int6" (bytes from -32 to 31), "uint8", "int8", "float8_e4m3fn" or
            "float8_e5m2".
        group: Features that share scale, zero and bias; 0: all of a row.
        scales: A float type that holds the scales exactly.
        zero: Subtracted from every code.
        zeros: Type of the zeros of groups; None: they have none.
        biases: Type of the biases of groups; None: they have none.
        table: Value of each of the 16 codes of uint4; None: the codes are the values.
        factors: Float type of what scales and biases, which are then integers, are multiplied by; None: nothing.
        factor_group: Features that share factors.
        is_transposed: Whether rows are the tensor's columns.
        divides: Whether scales are divided by their factors, in place of multiplied; there are no biases then.
        rounds_activations: Whether the format also rounds activations to 8 bits, each row by its largest magnitude.
        groups: The group of each feature where groups are not runs of features; see ``column_order.unordered``. Rows
            of records then have the features in another order.
    """

    values: str
    group: int = 0
    scales: str = "float32"
    zero: int = 0
    zeros: str | None = None
    biases: str | None = None
    table: tuple[float, ...] | None = None
    factors: str | None = None
    factor_group: int = 0
    is_transposed: bool = False
    rounds_activations: bool = False
    divides: bool = False
    groups: bytes | None = None

    def order(self, span: int, parts: int) -> ColumnOrder:
        """Return the order of features, which ``parts`` devices share, in rows of records."""
        assert self.groups is not None, self
        return column_order(self.groups, span, parts, self.group)

    def num_bytes(self, span: int) -> int:
        """Bytes of a record."""
        kinds = (self.scales, self.zeros, self.biases, self.factors, self.factors if self.biases else None)
        numbers = sum(_dtype(kind).itemsize for kind in kinds if kind is not None)
        return (span // 2 if self.values == "uint4" else span) + numbers

    def pack(self, planes: Planes, span: int) -> np.ndarray:
        """Return a box as rows of records.

        Args:
            planes: The box; it begins and ends between two records.
            span: Features of a record.

        Returns:
            uint8 [R, C / span * bytes of a record].
        """
        planes = planes.unpacked
        added, codes = self.added(planes), np.ascontiguousarray(planes.codes).view(np.uint8)
        codes = codes + np.uint8(added) if added else codes  # wraps
        if self.values == "uint4":
            codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
        num_rows, num_records = len(codes), planes.codes.shape[1] // span
        found = np.empty((num_rows, num_records, self.num_bytes(span)), np.uint8)
        at = codes.shape[1] // num_records if num_records else 0
        found[..., :at] = codes.reshape(num_rows, num_records, at)
        for grid in self.numbers(planes):
            numbers = np.empty((num_rows, num_records), grid.dtype)
            numbers[...] = _of_records(planes, grid, span)
            found[..., at : at + grid.itemsize] = numbers.view(np.uint8).reshape(num_rows, num_records, -1)
            at += grid.itemsize
        return found.reshape(num_rows, -1)

    def pack_into(self, planes: Planes, span: int, result: np.ndarray) -> None:
        """Write a box as rows of records; see ``pack``."""
        result[...] = self.pack(planes, span)

    def added(self, planes: Planes) -> int:
        """Return what is added to the codes of planes, modulo 256: those of blocks have lost their zero."""
        return self.zero if planes.zeros is None else 0

    def numbers(self, planes: Planes) -> list[np.ndarray]:
        """Return the numbers after the codes of records, in their types: grids like the planes' scales, in order."""
        return [
            grid.astype(_dtype(kind), copy=False) for kind, grid in self._grids(planes) if kind and grid is not None
        ]

    def _grids(self, planes: Planes) -> list[tuple[str | None, np.ndarray | None]]:
        """Return the numbers after the codes, and their types, in order."""
        if self.factors is None:
            grids = [(self.scales, planes.scales), (self.zeros, planes.zeros), (self.biases, planes.biases)]
        else:
            own = planes.factored
            assert own is not None and self.zeros is None, self
            grids = [(self.scales, own.scales), (self.biases, own.biases), (self.factors, own.scale_factors)]
            grids = grids if self.biases is None else [*grids, (self.factors, own.bias_factors)]
        assert all(grid is not None for kind, grid in grids if kind), self
        return grids


def _dtype(kind: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, kind, kind))


def _of_records(planes: Planes, grid: np.ndarray, span: int) -> np.ndarray:
    """Return a grid's member for each row and record, or one for all of either."""
    grid = grid if planes.rows is None else grid[planes.rows]
    return grid if planes.columns is None else grid[:, planes.columns[::span]]


class Kept(NamedTuple):
    """A tensor that is read as rows of records.

    Attributes:
        records: What they hold.
        span: Features of a record.
        parts: Devices that share the features, which each sorts by group where groups are not runs of them.
    """

    records: Records
    span: int
    parts: int = 1

    @property
    def order(self) -> ColumnOrder | None:
        """The order of features in rows of records; None: they are in order."""
        return None if self.records.groups is None else self.records.order(self.span, self.parts)

    def shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the rows of records of a tensor."""
        *leading, rows, columns = logical
        if self.records.is_transposed:
            rows, columns = columns, rows
        columns = columns if self.order is None else self.order.columns.size
        return (*leading, rows, columns // self.span * self.records.num_bytes(self.span))


def logical_index(index: Index, kept: Kept) -> Index:
    """Return the box of a quantized tensor that a box of its rows of records holds, in their order of features."""
    *leading, rows, columns = index
    size = kept.records.num_bytes(kept.span)
    assert columns.start % size == 0 and columns.stop % size == 0, (columns, kept)
    features = slice(columns.start // size * kept.span, columns.stop // size * kept.span)
    return (*leading, features, rows) if kept.records.is_transposed else (*leading, rows, features)
