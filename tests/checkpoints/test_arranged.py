"""Views of tensors in another arrangement: every box is that of the whole, assembled in plain NumPy."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import CheckpointError, Index, TensorInfo
from checkpoints.arranged import (
    ArrangedReader,
    View,
    alternating,
    joined,
    part,
    stacked_rows,
    stored,
    transposed,
)
from checkpoints.reader import BaseReader, CheckpointReader


class Arrays(BaseReader):
    """A checkpoint in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays, self.is_closed = arrays, False
        self.tensors = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        return self.arrays[name][index]

    def close(self) -> None:
        self.is_closed = True


def numbered(*shape: int, start: float = 0) -> np.ndarray:
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)


ARRAYS = {
    "gate": numbered(3, 4, 5),
    "up": numbered(3, 4, 5, start=1000),
    "k": numbered(2, 6, 3),
    "v": numbered(2, 4, 6, start=1000),
    "qkv": numbered(14, 5),
    "kept": numbered(3),
}


def arrange(reader: CheckpointReader) -> dict[str, View]:
    gate, up, qkv = stored(reader, "gate"), stored(reader, "up"), stored(reader, "qkv")
    heads = (stacked_rows(transposed(stored(reader, "k"))), stacked_rows(stored(reader, "v")))
    return {
        "rows in turn": alternating((gate, up), (1, 1), -2),
        "columns in turn": alternating((gate, up), (1, 1), -1),
        "turned": transposed(alternating((gate, up), (2, 2), -2)),
        "one after the other": joined((gate, up), -2),
        "heads": alternating(heads, (3, 4), -2),
        "part": part(qkv, 8, 11, -2),
    }


def expected() -> dict[str, np.ndarray]:
    gate, up = ARRAYS["gate"], ARRAYS["up"]
    pairs = np.stack([gate.reshape(3, 2, 2, 5), up.reshape(3, 2, 2, 5)], axis=2).reshape(3, 8, 5)
    return {
        "rows in turn": np.stack([gate, up], axis=2).reshape(3, 8, 5),
        "columns in turn": np.stack([gate, up], axis=-1).reshape(3, 4, 10),
        "turned": pairs.swapaxes(1, 2),
        "one after the other": np.concatenate([gate, up], axis=1),
        "heads": np.concatenate([ARRAYS["k"].swapaxes(1, 2), ARRAYS["v"]], axis=1).reshape(14, 6),
        "part": ARRAYS["qkv"][8:11],
        "kept": ARRAYS["kept"],
    }


@pytest.mark.parametrize("name", expected())
def test_boxes(name: str) -> None:
    array = expected()[name]

    def bounds(length: int) -> st.SearchStrategy[slice]:
        pairs = st.tuples(st.integers(0, length), st.integers(0, length))
        return pairs.map(lambda pair: slice(min(pair), max(pair)))

    with ArrangedReader(Arrays(ARRAYS), arrange) as reader:
        assert set(reader.tensors) == set(expected()) and reader.tensors[name].shape == array.shape
        assert reader.tensors["turned"].is_column_major and not reader.tensors["heads"].is_column_major

        @settings(max_examples=30)
        @given(st.tuples(*map(bounds, array.shape)))
        def check(index: Index) -> None:
            np.testing.assert_array_equal(reader.read(name, index), array[index])

        check()


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (lambda r: stored(r, "down"), "tensor 'down' is missing, which others of its layer need"),
        (lambda r: transposed(stored(r, "kept")), r"tensor 'kept' has shape \[3\], expected matrices"),
        (lambda r: part(stored(r, "qkv"), 3, 20, -2), r"'qkv' has shape \[14, 5\], expected more than 3 to 20"),
        (lambda r: stacked_rows(stored(r, "qkv")), r"tensor 'qkv' has shape \[14, 5\], expected three axes"),
        (lambda r: joined((stored(r, "gate"), stored(r, "v")), -2), r"do not fit: 'gate' \[3, 4, 5\], 'v' \[2, 4, 6\]"),
        (lambda r: alternating((stored(r, "k"),), (4,), -2), r"do not fit: 'k' \[2, 6, 3\]"),
    ],
)
def test_what_does_not_fit_is_named(view: Callable[[CheckpointReader], View], message: str) -> None:
    arrays = Arrays(ARRAYS)
    with pytest.raises(CheckpointError, match=message):
        ArrangedReader(arrays, lambda reader: {"x": view(reader)})
    assert arrays.is_closed
