"""Columns of weights whose groups are not runs of columns (act-order): sorted by group, so that records hold them.

Where devices share the columns, each sorts its own, and its part of a group is filled up to whole records.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np


class ColumnOrder(NamedTuple):
    """The sorted columns of a matrix.

    Attributes:
        columns: For each device's part the column that each sorted one is, counted from the part's first, int32 [parts,
            sorted columns of a part]. One that is filled up is the complement, ``~column``, of one of its group.
        group: Columns that share a scale, which all groups of a part have: a record's, or those of the file.
        own: Columns of a part before they are sorted.
    """

    columns: np.ndarray
    group: int
    own: int

    @property
    def indices(self) -> np.ndarray:
        """The column that each sorted one is; the number of a part's columns for one that is filled up."""
        return np.where(self.columns < 0, np.int32(self.own), self.columns)

    @property
    def of_matrix(self) -> np.ndarray:
        """The same columns, counted from the matrix's first, int32 [columns of all parts]."""
        first = self.own * np.arange(len(self.columns), dtype=np.int32)[:, None]
        return np.where(self.columns < 0, self.columns - first, self.columns + first).reshape(-1)


def unordered(groups: np.ndarray, size: int) -> bytes | None:
    """Return the groups of columns, int32, in a form that is quickly compared; None if they are runs of ``size``."""
    return None if np.array_equal(groups, np.arange(len(groups)) // size) else groups.astype(np.int32).tobytes()


@lru_cache(maxsize=256)
def column_order(groups: bytes, span: int, parts: int, size: int) -> ColumnOrder:
    """Return the order in which columns are stored.

    Args:
        groups: The group of each column; see ``unordered``.
        span: Columns of a record.
        parts: Devices that share the columns.
        size: Columns of a group in the file.
    """
    each = np.frombuffer(groups, np.int32).reshape(parts, -1)
    found = [_sorted(part, span) for part in each]
    width = max(len(columns) for columns in found)
    own = each.shape[1]
    columns = np.full((parts, width), ~(own - 1), np.int32)
    for row, part in zip(columns, found, strict=True):
        row[: len(part)] = part
    is_whole = size % span == 0 and all((np.unique(part, return_counts=True)[1] == size).all() for part in each)
    return ColumnOrder(columns, size if is_whole else span, own)


def _sorted(groups: np.ndarray, span: int) -> np.ndarray:
    """Return the columns of a part, group by group, each group filled up to whole records."""
    order = np.argsort(groups, kind="stable").astype(np.int32)
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    pieces: list[np.ndarray] = []
    for piece in np.split(order, starts[1:]):
        pieces += [piece, np.full(-len(piece) % span, ~piece[0], np.int32)]
    return np.concatenate(pieces)
