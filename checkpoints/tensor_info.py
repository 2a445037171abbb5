"""Shapes and dtypes of stored tensors, and index arithmetic shared by readers and the loader."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]


class TensorInfo(NamedTuple):
    """Shape and dtype of a stored tensor; bfloat16 and float8 types are those of ml_dtypes.

    ``is_column_major`` says that the last axis is the cheap one to cut: its elements are far apart in the file. That
    axis is cut only at multiples of ``unit``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_column_major: bool = False
    unit: int = 1

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def index_bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """Return start and stop along each axis of a tuple of slices.

    Args:
        index: one slice of step 1 for each axis; open ends allowed.
        shape: shape of the indexed array.

    Raises:
        ValueError: the index does not have the rank of the shape, or has a step other than 1.
    """
    if len(index) != len(shape):
        raise ValueError(f"expected an index of {len(shape)} slices for shape {list(shape)}, got {len(index)}")
    bounds: list[tuple[int, int]] = []
    for part, length in zip(index, shape, strict=True):
        start, stop, step = part.indices(length)
        if step != 1:
            raise ValueError(f"expected slices of step 1, got {part}")
        bounds.append((start, max(start, stop)))
    return tuple(bounds)


def whole_index(shape: Sequence[int]) -> Index:
    """Return the index that selects a whole array of this shape."""
    return tuple(slice(0, length) for length in shape)
