"""Boxes of strided arrays read from a file equal numpy's own indexing."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import file_ranges
from checkpoints.errors import CheckpointError
from checkpoints.file_ranges import RangeFile, StridedLayout, full_layout, num_spanned


@pytest.fixture
def numbers(tmp_path: Path) -> RangeFile:
    path = tmp_path / "numbers"
    path.write_bytes(b"x" * 3 + np.arange(4096, dtype=np.int32).tobytes())
    return RangeFile(path)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    strides = tuple(draw(st.integers(0, 60)) for _ in shape)
    index = []
    for length in shape:
        start = draw(st.integers(0, length))
        index.append(slice(start, draw(st.integers(start, length))))
    return shape, strides, tuple(index)


@pytest.mark.parametrize("scratch_bytes", [1, 64, file_ranges.SCRATCH_BYTES])
@pytest.mark.parametrize("min_gap_bytes", [1, 16, file_ranges.MIN_GAP_BYTES])
@given(box=boxes())
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_box_of_any_strides(
    numbers: RangeFile,
    monkeypatch: pytest.MonkeyPatch,
    scratch_bytes: int,
    min_gap_bytes: int,
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]],
) -> None:
    monkeypatch.setattr(file_ranges, "SCRATCH_BYTES", scratch_bytes)
    monkeypatch.setattr(file_ranges, "MIN_GAP_BYTES", min_gap_bytes)
    shape, strides, index = box
    layout = StridedLayout(3 + 4 * 7, np.dtype(np.int32), shape, strides)
    storage = np.arange(7, 4096, dtype=np.int32)
    expected = np.lib.stride_tricks.as_strided(storage, shape, [4 * stride for stride in strides])[index]
    got = numbers.read_box(layout, index)
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, expected)


def test_reads_only_the_rows_it_needs(numbers: RangeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []
    preadv = os.preadv

    def spy(descriptor: int, buffers: list[memoryview], start: int) -> int:
        ranges.append((start, len(buffers[0])))
        return preadv(descriptor, buffers, start)

    monkeypatch.setattr(os, "preadv", spy)
    layout = full_layout(3, np.dtype(np.int32), (64, 64))
    numbers.read_box(layout, (slice(10, 12), slice(0, 64)))
    assert ranges == [(3 + 10 * 256, 512)]
    ranges.clear()
    numbers.read_box(layout, (slice(10, 13), slice(8, 48)))
    assert ranges == [(3 + (row * 64 + 8) * 4, 160) for row in (10, 11, 12)]
    ranges.clear()
    numbers.read_box(layout, (slice(10, 13), slice(8, 60)))
    assert ranges == [(3 + (10 * 64 + 8) * 4, 2 * 256 + 52 * 4)]


def test_spanned_elements() -> None:
    assert num_spanned((3, 2), (10, 1)) == 22
    assert num_spanned((), ()) == 1
    assert num_spanned((0, 5), (5, 1)) == 0


def test_a_file_cut_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    file = RangeFile(path)
    os.truncate(path, 50)
    with pytest.raises(CheckpointError, match="file: the file ends at byte 100, expected 40 bytes from 60"):
        file.read_bytes(60, 40)


def test_an_error_while_reading(numbers: RangeFile) -> None:
    numbers.close()
    numbers.close()
    with pytest.raises(CheckpointError, match="numbers: cannot be read: Bad file descriptor"):
        numbers.read_bytes(0, 4)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        RangeFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        RangeFile(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="absent: cannot be opened: No such file"):
        RangeFile(tmp_path / "absent")


def test_index_of_wrong_rank_or_step(numbers: RangeFile) -> None:
    layout = full_layout(3, np.dtype(np.int32), (8, 8))
    with pytest.raises(ValueError, match="expected an index of 2 slices"):
        numbers.read_box(layout, (slice(0, 4),))
    with pytest.raises(ValueError, match="expected slices of step 1"):
        numbers.read_box(layout, (slice(0, 4), slice(0, 4, 2)))


def test_an_empty_box_that_no_array_can_be(numbers: RangeFile) -> None:
    layout = full_layout(0, np.dtype(np.float32), (0, 1 << 61))
    with pytest.raises(CheckpointError, match=r"\[0, 2305843009213693952\] is not the shape of a tensor"):
        numbers.read_box(layout, (slice(0, 0), slice(0, 1 << 61)))
