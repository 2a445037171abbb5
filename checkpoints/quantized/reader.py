"""Reads a quantized checkpoint as the float tensors that it stands for."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import numpy as np

from checkpoints.arranged import ArrangedReader
from checkpoints.errors import CheckpointError
from checkpoints.quantized.format import Box, Format, QuantizedTensor
from checkpoints.quantized.planes import Planes
from checkpoints.quantized.records import Kept, Records, logical_index
from checkpoints.reader import BaseReader, CheckpointReader
from checkpoints.tensor_info import Index, TensorInfo, index_bounds

_FLOAT32, _UINT8 = np.dtype(np.float32), np.dtype(np.uint8)
T = TypeVar("T")


class QuantizedReader(BaseReader):
    """Shows the logical tensors of a quantized checkpoint; the others as they are stored.

    Attributes:
        format: The format of its quantized weights.
        tensors: Shape and dtype of every tensor; float32 for those that are stored quantized, and uint8 for those of
            them that are kept as rows of records.
        decode: Writes decoded planes into an array, rounded to its dtype; a faster one may take its place.
        pack: Writes planes into an array as rows of records, likewise.

    Args:
        reader: The stored tensors; closed with this reader, also if this fails.
        format: The format of its quantized weights.

    Raises:
        CheckpointError: Stored tensors are missing or contradict the settings or each other.
    """

    def __init__(self, reader: CheckpointReader, format: Format) -> None:
        self._reader = reader
        self.format = format
        self.decode: Callable[[Planes, np.ndarray], None] = Planes.decode_into
        self.pack: Callable[[Records, Planes, int, np.ndarray], None] = Records.pack_into
        self._kept: dict[str, Kept] = {}
        try:
            self._quantized: dict[str, QuantizedTensor] = {
                name: format.open(name, stored, reader) for name, stored in format.logical_names(reader.tensors).items()
            }
        except BaseException:
            reader.close()
            raise
        used = {stored for tensor in self._quantized.values() for stored in tensor.stored}
        self.tensors: Mapping[str, TensorInfo] = _plain(reader.tensors, used, format) | {
            name: TensorInfo(tensor.shape, _FLOAT32, tensor.is_column_major) for name, tensor in self._quantized.items()
        }

    def check(self) -> None:
        """Check what is otherwise read with the weights.

        Raises:
            CheckpointError: It contradicts the stored tensors.
        """
        for tensor in self._quantized.values():
            if tensor.check is not None:
                tensor.check()

    def leave_out(self, names: Collection[str]) -> None:
        """Show these tensors no longer."""
        self.tensors = {name: info for name, info in self.tensors.items() if name not in names}

    def keep(self, kept: Mapping[str, Kept]) -> None:
        """Show some quantized tensors as rows of records, not decoded."""
        self._kept |= kept
        own = {name: self._info_of_records(name, each) for name, each in kept.items() if name in self.tensors}
        self.tensors = {**self.tensors, **own}

    def _info_of_records(self, name: str, kept: Kept) -> TensorInfo:
        tensor = self._quantized[name]
        is_column_major = tensor.is_column_major != kept.records.is_transposed and kept.records.groups is None
        return TensorInfo(kept.shape(tensor.shape), _UINT8, is_column_major, kept.records.num_bytes(kept.span))

    @property
    def stored(self) -> CheckpointReader:
        """The tensors as they are stored."""
        return self._reader

    @property
    def quantized(self) -> Mapping[str, QuantizedTensor]:
        """The tensors that are stored quantized."""
        return self._quantized

    @property
    def kept(self) -> Mapping[str, Kept]:
        """The tensors that are shown as rows of records."""
        return self._kept

    def num_stored_bytes(self, tensors: Collection[str]) -> int:
        """Return the size of quantized tensors in the files."""
        stored = {name for tensor in tensors for name in self._quantized[tensor].stored}
        return sum(self._reader.tensors[name].num_bytes for name in stored)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new array, in float32 if it is stored quantized and not kept so.

        Args:
            name: The tensor.
            index: One slice of step 1 for each axis.

        Raises:
            CheckpointError: Scales are not finite, or the file cannot be read.
        """
        if name not in self._quantized:
            return self._reader.read(name, index)
        bounds = index_bounds(index, self.tensors[name].shape)
        result = np.empty([stop - start for start, stop in bounds], self.tensors[name].dtype)
        self.read_into(name, index, result)
        return result

    def read_into(self, name: str, index: Index, result: np.ndarray) -> None:
        """Read a box of a tensor into an array, rounded once to its dtype.

        Args:
            name: The tensor.
            index: One slice of step 1 for each axis.
            result: An array of the box's shape.

        Raises:
            CheckpointError: As for ``read``.
        """
        if name not in self._quantized:
            super().read_into(name, index, result)
            return
        if not result.size:
            return
        matrices = (result[place] for place in np.ndindex(result.shape[:-2]))
        if name in self._kept:
            kept = self._kept[name]
            for planes, matrix in zip(self._kept_boxes(name, index, kept), matrices, strict=True):
                self.pack(kept.records, planes, kept.span, matrix)
            return
        for planes, matrix in zip(self._boxes(name, index), matrices, strict=True):
            self.decode(planes, matrix)

    def _kept_boxes(self, name: str, index: Index, kept: Kept) -> Iterator[Planes]:
        """Yield what a box of rows of records holds."""
        box, order = logical_index(index, kept), kept.order
        if order is None:
            for planes in self._boxes(name, box):
                yield planes.transposed if kept.records.is_transposed else planes
            return
        *others, features = box
        columns = order.of_matrix[features]
        places = np.maximum(columns, ~columns)  # of what is filled up, a column of its group
        first, last = int(places.min()), int(places.max()) + 1
        for planes in self._boxes(name, (*others, slice(first, last))):
            yield planes.rearranged(np.where(columns < 0, columns + first, columns - first), kept.span)

    def planes(self, name: str, index: Index) -> Planes:
        """Return a box of a quantized matrix with one code per byte; not an empty one, with one index per leading axis.

        Raises:
            CheckpointError: As for ``read``.
        """
        (planes,) = self._boxes(name, index)
        return planes.unpacked

    def _boxes(self, name: str, index: Index) -> Iterator[Planes]:
        """Yield the matrices of a box, in order of their leading indices."""
        tensor = self._quantized[name]
        *leading, rows, columns = index_bounds(index, tensor.shape)
        for place in np.ndindex(*(stop - start for start, stop in leading)):
            at = tuple(start + offset for (start, _), offset in zip(leading, place, strict=True))
            planes = tensor.planes(Box(at, slice(*rows), slice(*columns)))
            for grid in (planes.scales, planes.biases):
                if grid is not None and not np.isfinite(grid).all():
                    raise CheckpointError(f"tensor {name!r} has scales that are not finite (in {tensor.stored[0]!r})")
            yield planes

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


def quantized_in(reader: CheckpointReader) -> QuantizedReader | None:
    """Return the reader of a checkpoint's quantized tensors; None if it has none."""
    inner = reader.inner if isinstance(reader, ArrangedReader) else reader
    return inner if isinstance(inner, QuantizedReader) else None


def keep_records(reader: CheckpointReader, kept: Mapping[str, Kept]) -> None:
    """Show some quantized tensors of a checkpoint as rows of records, not decoded."""
    inner = quantized_in(reader)
    assert inner is not None, reader
    inner.keep(kept)
    if isinstance(reader, ArrangedReader):
        reader.update(kept)


def logical_names(stored: Collection[str], format: Format) -> list[str]:
    """Return the names of the tensors that the stored ones of an index stand for; the files need not exist."""
    tensors: dict[str, TensorInfo | None] = dict.fromkeys(stored)
    quantized = format.logical_names(tensors)
    used = {name for parts in quantized.values() for name in parts}
    return [*_plain(tensors, used, format), *quantized]


def _plain(tensors: Mapping[str, T], used: Collection[str], format: Format) -> dict[str, T]:
    """Return the tensors that are not part of a quantized one and not ignored."""
    return {name: info for name, info in tensors.items() if name not in used and not format.ignored.fullmatch(name)}
