"""The native kernel decodes weights to the same bits as NumPy does, whatever groups, order and strides they have."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.quantized.planes import Planes, Words
from pallas_kernels import dequantize_native
from pallas_kernels.native_library import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"needs native kernels: {unavailable()}")
LENGTHS = st.one_of(st.integers(1, 40), st.integers(250, 530))


def groups(draw: st.DrawFn, rng: np.random.Generator, length: int) -> tuple[np.ndarray | None, int]:
    """Draw the index of one side, or none, and the number of its groups."""
    kind = draw(st.sampled_from(["one", "each", "runs", "any"]))
    if kind == "one":
        return None, 1
    if kind == "each":
        return None, length
    size = draw(st.integers(1, length))
    index = np.arange(draw(st.integers(0, size)), length + size)[:length] // size
    return rng.permutation(index) if kind == "any" else index, int(index.max()) + 1


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@st.composite
def planes(draw: st.DrawFn) -> Planes:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    rows, columns = draw(LENGTHS), draw(LENGTHS)
    row_index, num_rows = groups(draw, rng, rows)
    column_index, num_columns = groups(draw, rng, columns)
    grid = (num_rows, num_columns)
    size = draw(st.sampled_from([16, 256]))
    dtype: Any = draw(st.sampled_from([np.uint8, np.int8]))
    codes = rng.integers(0, size, (rows, columns)).astype(np.uint8)
    table = normal(rng, size) if draw(st.booleans()) else None
    scales = normal(rng, *grid) * np.float32(10.0 ** draw(st.sampled_from([-41, -3, 0, 37])))
    if column_index is None and row_index is None and draw(st.booleans()):
        scales = scales.T.copy().T
    zeros = draw(st.sampled_from([None, rng.integers(0, 16, grid).astype(np.uint8), normal(rng, *grid)]))
    biases = normal(rng, *grid) if draw(st.booleans()) else None
    codes = codes if table is not None else codes.view(dtype)
    if draw(st.booleans()):
        codes = np.asfortranarray(codes)
    return Planes(codes, scales, zeros, biases, table, row_index, column_index)


@settings(max_examples=150, deadline=None)
@given(planes(), st.sampled_from([np.float32, ml_dtypes.bfloat16]), st.booleans(), st.booleans())
def test_bits_are_those_of_numpy(planes: Planes, dtype: Any, is_transposed: bool, is_part: bool) -> None:
    rows, columns = planes.codes.shape
    whole = np.zeros((rows + 2, columns + 3), dtype)
    whole = whole.T.copy().T if is_transposed else whole
    found, expected = whole.copy(order="K"), whole.copy(order="K")
    box = (slice(1, -1), slice(2, -1)) if is_part else (slice(0, rows), slice(0, columns))
    assert not isinstance(planes.blocks, Words)
    dequantize_native.dequantize(found[box], *planes[:7], planes.blocks)
    planes.decode_into(expected[box])
    bits = np.uint32 if dtype == np.float32 else np.uint16
    np.testing.assert_array_equal(found.view(bits), expected.view(bits))


def test_numbers_that_are_not_finite() -> None:
    codes = np.array([[0, 1, 2, 3]], np.uint8)
    table = np.array([np.nan, -np.nan, np.inf, 3.4e38], np.float32)
    for dtype, bits in ((np.float32, np.uint32), (ml_dtypes.bfloat16, np.uint16)):
        found, expected = np.zeros((2, 1, 4), dtype)
        planes = Planes(codes, np.ones((1, 1), np.float32), table=table)
        dequantize_native.dequantize(found, *planes[:7])
        planes.decode_into(expected)
        np.testing.assert_array_equal(found.view(bits), expected.view(bits))
