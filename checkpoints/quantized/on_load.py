"""Float weights that are quantized while they are loaded, row by row, to what rows of records hold.

Weights are rounded to the nearest code. Scales are symmetric: the largest magnitude of a row, a group of features, a
block or the whole matrix becomes the largest code.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.planes import Planes
from checkpoints.quantized.records import Kept, Records, logical_index
from checkpoints.reader import BaseReader, CheckpointReader
from checkpoints.tensor_info import Index, TensorInfo, index_bounds

GROUP: Final = 128
"""Features of a group of four-bit codes, and rows and columns of a block of 8-bit floats."""
_CHUNK_BYTES = 8 << 20
_ZERO = 8


class Method(NamedTuple):
    """A way to quantize.

    Attributes:
        text: What it does, for users.
        values: Type of the codes; see ``Records``.
        columns: Columns that share a scale; 0: all of a row.
        rows: Rows that share a scale; 0: all.
        scales: Type of the scales.
        rounds_activations: Whether the rows that such weights multiply are rounded to 8 bits too.
    """

    text: str
    values: str
    columns: int = 0
    rows: int = 1
    scales: str = "float32"
    rounds_activations: bool = False

    def records(self, inner: int) -> Records:
        """Return what rows of ``inner`` features are quantized to; groups may be smaller, so that they divide it."""
        group = math.gcd(self.columns, inner) if self.columns else 0
        zero = _ZERO if self.values == "uint4" else 0
        return Records(self.values, group, self.scales, zero, rounds_activations=self.rounds_activations)


METHODS: Final[Mapping[str, Method]] = {
    "int8_w8a8": Method("8-bit integers with a scale per output, activations too", "int8", rounds_activations=True),
    "int8_per_channel_weight_only": Method("8-bit integers with a scale per output", "int8"),
    "int4_group": Method("4-bit integers in groups of 128", "uint4", GROUP, scales="bfloat16"),
    "fp8_per_tensor": Method("8-bit floats with one scale for a matrix", "float8_e4m3fn", rows=0),
    "fp8_per_channel": Method("8-bit floats with a scale per output", "float8_e4m3fn"),
    "fp8_per_block": Method("8-bit floats in blocks of 128 × 128", "float8_e4m3fn", GROUP, GROUP),
}
"""By the name that vLLM has for them."""
SHORT_NAMES: Final[Mapping[str, str]] = {"fp8": "fp8_per_tensor", "int8": "int8_w8a8"}


class Made(NamedTuple):
    """A float tensor that is read as rows of records."""

    method: Method
    kept: Kept


class OnLoadReader(BaseReader):
    """Shows some float matrices of a checkpoint as rows of records.

    Attributes:
        made: These matrices.

    Args:
        reader: The checkpoint; closed with this reader.
        made: The matrices.
    """

    def __init__(self, reader: CheckpointReader, made: Mapping[str, Made]) -> None:
        self.inner, self.made = reader, made
        self._largest: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        own = {
            name: TensorInfo(
                each.kept.shape(reader.tensors[name].shape),
                np.dtype(np.uint8),
                unit=each.kept.records.num_bytes(each.kept.span),
            )
            for name, each in made.items()
        }
        self.tensors: Mapping[str, TensorInfo] = {**reader.tensors, **own}

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new array.

        Args:
            name: The tensor.
            index: One slice of step 1 for each axis.

        Raises:
            CheckpointError: A weight is not finite, or the file cannot be read.
        """
        if name not in self.made:
            return self.inner.read(name, index)
        shape = [stop - start for start, stop in index_bounds(index, self.tensors[name].shape)]
        result = np.empty(shape, np.uint8)
        self.read_into(name, index, result)
        return result

    def read_into(self, name: str, index: Index, result: np.ndarray) -> None:
        """Read a box of a tensor into an array; see ``BaseReader``."""
        if name not in self.made:
            self.inner.read_into(name, index, result)
            return
        if not result.size:
            return
        made = self.made[name]
        *leading, rows, columns = logical_index(index, made.kept._replace(records=_upright(made.kept.records)))
        for place, matrix in zip(_places(leading), (result[at] for at in np.ndindex(result.shape[:-2])), strict=True):
            floats = self._rows(name, place, rows)
            codes, scales, groups = self._quantized(name, place, rows, floats)
            planes = Planes(codes[:, columns], scales, columns=groups[columns])
            matrix[...] = _upright(made.kept.records).pack(planes, made.kept.span)

    def codes_and_scales(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a matrix's codes, [rows, columns], and its scales in float32, [rows, groups]."""
        rows = slice(0, self.inner.tensors[name].shape[0])
        codes, scales, _ = self._quantized(name, (), rows, self._rows(name, (), rows))
        return codes, scales

    def close(self) -> None:
        """Close the checkpoint."""
        self.inner.close()

    def _rows(self, name: str, place: tuple[int, ...], rows: slice) -> np.ndarray:
        """Return whole rows of a matrix in float32."""
        shape, is_transposed = self.inner.tensors[name].shape, self.made[name].kept.records.is_transposed
        box = (slice(0, shape[-2]), rows) if is_transposed else (rows, slice(0, shape[-1]))
        found = self.inner.read(name, (*(slice(at, at + 1) for at in place), *box)).astype(np.float32)
        found = found.reshape(found.shape[-2:])
        if not np.isfinite(found).all():
            raise CheckpointError(f"tensor {name!r} has weights that are not finite, which cannot be quantized")
        return found.T if is_transposed else found

    def _quantized(
        self, name: str, place: tuple[int, ...], rows: slice, floats: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return codes of rows, their scales [rows, groups], and the group of each column."""
        method = self.made[name].method
        group = self.made[name].kept.records.group or floats.shape[1]
        groups = np.arange(floats.shape[1]) // group
        largest = self._largest_magnitudes(name, place, rows, floats, group)
        dtype = np.dtype(getattr(ml_dtypes, method.scales, method.scales))
        scales = np.where(largest == 0, 1, largest / _largest_code(method)).astype(dtype).astype(np.float32)
        scaled = floats.reshape(len(floats), -1, group) / scales[:, :, None]
        return _codes(scaled.reshape(floats.shape), method), scales, groups

    def _largest_magnitudes(
        self, name: str, place: tuple[int, ...], rows: slice, floats: np.ndarray, group: int
    ) -> np.ndarray:
        """Return the largest magnitude of those that share a scale, [rows, groups]."""
        size = self.made[name].method.rows
        if size == 1:
            return np.abs(floats).reshape(len(floats), -1, group).max(axis=2)
        key = (name, place)
        if key not in self._largest:
            self._largest[key] = self._of_blocks(name, place, size, group)
        blocks = self._largest[key]
        return blocks[np.arange(rows.start, rows.stop) // size] if size else np.repeat(blocks, len(floats), axis=0)

    def _of_blocks(self, name: str, place: tuple[int, ...], size: int, group: int) -> np.ndarray:
        """Return the largest magnitude of each block of rows and group of columns."""
        num_rows = self.tensors[name].shape[-2]
        step = size or max(1, _CHUNK_BYTES // (4 * group))
        found = [
            np.abs(self._rows(name, place, slice(start, min(start + step, num_rows)))).max(axis=0)
            for start in range(0, num_rows, step)
        ]
        grid = np.stack(found).reshape(len(found), -1, group).max(axis=2)
        return grid if size else grid.max(axis=0, keepdims=True)


def _upright(records: Records) -> Records:
    return records._replace(is_transposed=False)


def _places(leading: list[slice]) -> Iterator[tuple[int, ...]]:
    for offsets in np.ndindex(*(each.stop - each.start for each in leading)):
        yield tuple(each.start + offset for each, offset in zip(leading, offsets, strict=True))


def _largest_code(method: Method) -> float:
    """Return the code that the largest magnitude becomes: of four bits one between 7, the largest, and 8, the least."""
    return {"int8": 127.0, "uint4": 7.5}.get(method.values, 448.0)


def _codes(scaled: np.ndarray, method: Method) -> np.ndarray:
    """Return the codes nearest to weights that were divided by their scales."""
    if method.values == "int8":
        return np.rint(scaled).clip(-127, 127).astype(np.int8)
    if method.values == "uint4":
        return np.rint(scaled).clip(-_ZERO, _ZERO - 1).astype(np.int8)  # records add the zero
    return scaled.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
