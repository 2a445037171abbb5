"""Shows tensors that another reader has in other pieces: joined, alternating, transposed or cut from larger ones.

A checkpoint may have a layer's matrices in another arrangement than Hugging Face's: gate and up apart instead of row by
row, queries, keys and values in one matrix. A ``View`` reads a box of a tensor from those that have its elements.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.reader import BaseReader, CheckpointReader
from checkpoints.tensor_info import Bounds, Index, TensorInfo, index_bounds


class View(NamedTuple):
    """A tensor whose elements others have.

    Attributes:
        info: Its shape and dtype.
        sources: Names of the others.
        read: Returns the box between bounds, none of which is empty.
    """

    info: TensorInfo
    sources: tuple[str, ...]
    read: Callable[[Bounds], np.ndarray]


Arrangement = Callable[[CheckpointReader], Mapping[str, View]]
"""Returns the views of a reader's tensors, by name."""


class ArrangedReader(BaseReader):
    """Shows views in place of the tensors that they are made of; the others as they are.

    Attributes:
        inner: The reader of these.
        tensors: Shape and dtype of every tensor.

    Args:
        reader: The tensors; closed with this reader, also if this fails.
        arrange: Returns the views.

    Raises:
        CheckpointError: Tensors are missing, or do not fit together.
    """

    def __init__(self, reader: CheckpointReader, arrange: Arrangement) -> None:
        self.inner = reader
        try:
            self._views = dict(arrange(reader))
        except BaseException:
            reader.close()
            raise
        used = {name for view in self._views.values() for name in view.sources}
        self.tensors: Mapping[str, TensorInfo] = {
            **{name: info for name, info in reader.tensors.items() if name not in used},
            **{name: view.info for name, view in self._views.items()},
        }

    def update(self, names: Collection[str]) -> None:
        """Show some tensors as the inner reader now has them."""
        self.tensors = {**self.tensors, **{name: self.inner.tensors[name] for name in names}}

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new array.

        Args:
            name: The tensor.
            index: One slice of step 1 for each axis.
        """
        view = self._views.get(name)
        if view is None:
            return self.inner.read(name, index)
        bounds = index_bounds(index, view.info.shape)
        shape = tuple(stop - start for start, stop in bounds)
        return view.read(bounds) if 0 not in shape else np.empty(shape, view.info.dtype)

    def read_into(self, name: str, index: Index, result: np.ndarray) -> None:
        """Read a box of a tensor into an array, rounded once to its dtype; see ``BaseReader``."""
        if name in self._views:
            super().read_into(name, index, result)
        else:
            self.inner.read_into(name, index, result)

    def close(self) -> None:
        """Close the files."""
        self.inner.close()


def stored(reader: CheckpointReader, name: str) -> View:
    """Return a tensor as it is, to show it under another name.

    Raises:
        CheckpointError: It is missing.
    """
    info = reader.tensors.get(name)
    if info is None:
        raise CheckpointError(f"tensor {name!r} is missing, which others of its layer need")
    return View(info, (name,), lambda bounds: reader.read(name, tuple(slice(*each) for each in bounds)))


def transposed(view: View) -> View:
    """Return a tensor with its last two axes exchanged."""
    shape = view.info.shape
    if len(shape) < 2:
        raise CheckpointError(f"tensor {view.sources[0]!r} has shape {list(shape)}, expected matrices")
    info = TensorInfo((*shape[:-2], shape[-1], shape[-2]), view.info.dtype, not view.info.is_column_major)
    return View(info, view.sources, lambda at: view.read((*at[:-2], at[-1], at[-2])).swapaxes(-1, -2))


def part(view: View, start: int, stop: int, axis: int) -> View:
    """Return a range of a tensor along an axis, counted from the last one: -1, -2.

    Raises:
        CheckpointError: The range is not inside the tensor.
    """
    shape = list(view.info.shape)
    if len(shape) < -axis or not 0 <= start <= stop <= shape[axis]:
        raise CheckpointError(f"tensor {view.sources[0]!r} has shape {shape}, expected more than {start} to {stop}")
    shape[axis] = stop - start

    def read(bounds: Bounds) -> np.ndarray:
        moved = list(bounds)
        moved[axis] = (moved[axis][0] + start, moved[axis][1] + start)
        return view.read(tuple(moved))

    return View(view.info._replace(shape=tuple(shape)), view.sources, read)


def stacked_rows(view: View) -> View:
    """Return the matrix of the rows of all matrices of a tensor [N, R, C], one after the other."""
    shape = view.info.shape
    if len(shape) != 3:
        raise CheckpointError(f"tensor {view.sources[0]!r} has shape {list(shape)}, expected three axes")
    size = shape[1]

    def read(bounds: Bounds) -> np.ndarray:
        (start, stop), columns = bounds
        first, last = start // size, -(-stop // size)
        whole = view.read(((first, last), (0, size), columns))
        return whole.reshape(-1, whole.shape[-1])[start - first * size : stop - first * size]

    return View(view.info._replace(shape=(shape[0] * size, shape[2])), view.sources, read)


def alternating(views: Sequence[View], units: Sequence[int], axis: int) -> View:
    """Return a tensor that has, along an axis, some elements of the first one, some of the next, and so on again.

    Args:
        views: The tensors.
        units: Elements of each that follow one another.
        axis: The axis, counted from the last one: -1, -2.

    Raises:
        CheckpointError: The tensors do not fit together.
    """
    shapes = [list(view.info.shape) for view in views]
    others = {tuple(shape[:axis] + shape[len(shape) + axis + 1 :]) for shape in shapes}
    lengths = [shape[axis] if len(shape) >= -axis else 0 for shape in shapes]
    counts = {length / unit if unit else 0.0 for length, unit in zip(lengths, units, strict=True)}
    if 0 in lengths or len(others) != 1 or len(counts) != 1 or not (count := counts.pop()).is_integer():
        texts = ", ".join(f"{view.sources[0]!r} {shape}" for view, shape in zip(views, shapes, strict=True))
        raise CheckpointError(f"tensors that belong together have shapes that do not fit: {texts}")
    ends = np.cumsum(units).tolist()
    period = ends[-1]
    shape = shapes[0]
    shape[axis] = int(count) * period
    dtypes = {view.info.dtype for view in views}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)

    def read(bounds: Bounds) -> np.ndarray:
        start, stop = bounds[axis]
        result = np.empty([last - first for first, last in bounds], dtype)
        along = np.moveaxis(result, axis, 0)
        groups, places = np.divmod(np.arange(start, stop), period)
        for view, unit, end in zip(views, units, ends, strict=True):
            own = np.flatnonzero((places >= end - unit) & (places < end))
            if own.size:
                index = groups[own] * unit + places[own] - (end - unit)
                box = list(bounds)
                box[axis] = (int(index[0]), int(index[-1]) + 1)
                along[own] = np.moveaxis(view.read(tuple(box)), axis, 0)
        return result

    sources = tuple(name for view in views for name in view.sources)
    return View(TensorInfo(tuple(shape), dtype), tuple(dict.fromkeys(sources)), read)


def joined(views: Sequence[View], axis: int) -> View:
    """Return tensors one after the other along an axis, as ``alternating`` counts it."""
    return alternating(views, [view.info.shape[axis] if len(view.info.shape) >= -axis else 0 for view in views], axis)
