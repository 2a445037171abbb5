"""Show a parameter in memory as the tensors of the checkpoint that it was made of."""

from collections.abc import Sequence

import numpy as np

from checkpoints import Index, Piece, TensorInfo, TensorRecipe, index_bounds
from checkpoints.reader import BaseReader
from jaxserve.models.abstract import LogicalParam
from pallas_kernels.quantized import with_columns, with_span


class RecordReader(BaseReader):
    """Shows rows of records as another layout has them: of another number of features, or in another order of them.

    Args:
        reader: The rows.
        old: The weight that they are.
        new: The weight in the other layout.
    """

    def __init__(self, reader: "ParameterReader", old: LogicalParam, new: LogicalParam):
        self._reader, self._forms, self._kept = reader, old.forms, (old.kept, new.kept)
        assert new.span is not None, new
        self._span, shapes = new.span, dict(new.recipe.sources)
        self.tensors = {name: TensorInfo(shapes[name], info.dtype) for name, info in reader.tensors.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new array; all of its rows are read."""
        form, whole = self._forms[name], self._reader.tensors[name].shape
        rows = self._reader.read(name, (*index[:-1], slice(0, whole[-1])))
        rows_of_records = rows.reshape(-1, whole[-1])
        if name in self._kept[0]:
            found = with_columns(rows_of_records, form, self._span, self._columns(name))
        else:
            found = with_span(rows_of_records, form, self._span)
        return np.ascontiguousarray(found.reshape(*rows.shape[:-1], -1)[..., index[-1]])

    def _columns(self, name: str) -> np.ndarray:
        """Return the column of the old records that each one of the new is, or its complement; see ``ColumnOrder``."""
        old, new = (kept[name].order for kept in self._kept)
        assert old is not None and new is not None, name
        columns = old.of_matrix
        places = np.empty(old.own * len(old.columns), np.int32)
        places[columns[columns >= 0]] = np.flatnonzero(columns >= 0)
        columns = new.of_matrix
        return np.where(columns < 0, ~places[~columns], places[columns])

    def close(self) -> None:
        """Do nothing."""


class ParameterReader(BaseReader):
    """A ``CheckpointReader`` of the tensors that one parameter was made of.

    Args:
        recipe: How the parameter was made.
        whole: The parameter.
    """

    def __init__(self, recipe: TensorRecipe, whole: np.ndarray):
        self._whole = whole
        self._pieces: dict[str, list[Piece]] = {}
        for piece in {(piece.source, piece.source_start, piece.shape): piece for piece in recipe.pieces}.values():
            self._pieces.setdefault(piece.source, []).append(piece)
        self.tensors = {name: TensorInfo(shape, whole.dtype) for name, shape in recipe.sources}

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new contiguous array."""
        bounds = index_bounds(index, self.tensors[name].shape)
        box = np.empty([stop - start for start, stop in bounds], self._whole.dtype)
        num_found = 0
        for piece in self._pieces[name]:
            ends = [start + length for start, length in zip(piece.source_start, piece.source_shape, strict=True)]
            starts = [max(start, first) for start, (first, _) in zip(piece.source_start, bounds, strict=True)]
            stops = [min(end, stop) for end, (_, stop) in zip(ends, bounds, strict=True)]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            part = box[
                tuple(slice(a - first, b - first) for a, b, (first, _) in zip(starts, stops, bounds, strict=True))
            ]
            part[...] = _target_box(self._whole, piece, starts, stops).reshape(part.shape)
            num_found += part.size
        assert num_found == box.size, f"{name}: the parameter has {num_found} of {box.size} elements"
        return box

    def close(self) -> None:
        """Do nothing."""


def _target_box(whole: np.ndarray, piece: Piece, starts: Sequence[int], stops: Sequence[int]) -> np.ndarray:
    """Return the part of a parameter that comes from a box of a piece's source, with the source's order of axes."""
    extra = len(piece.source_start) - len(piece.shape)
    order = -1 if piece.is_transposed else 1
    skips = [a - start for a, start in zip(starts[extra:], piece.source_start[extra:], strict=True)][::order]
    lengths = [b - a for a, b in zip(starts[extra:], stops[extra:], strict=True)][::order]
    begins = [target + skip for target, skip in zip(piece.target_start, skips, strict=True)]
    box = whole[tuple(slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True))]
    return box.T if piece.is_transposed else box
