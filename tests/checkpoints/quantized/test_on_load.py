"""Float weights that are quantized while they are loaded: how near they are, and what shares a scale."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import CheckpointError, open_checkpoint
from checkpoints.quantized.on_load import METHODS, Made, OnLoadReader
from checkpoints.quantized.records import Kept
from checkpoints.tensor_info import whole_index
from jaxserve.layers.weight_forms import form_of_records
from pallas_kernels.quantized import decode, parts_of

STEPS = {"int8": 1 / 254, "uint4": 1 / 14.9, "float8_e4m3fn": 1 / 16}
"""Largest error as a share of the largest magnitude, or for floats of the weight."""


def opened(folder: Path, weights: np.ndarray, method: str, *, is_transposed: bool = False) -> OnLoadReader:
    save_file({"w": np.ascontiguousarray(weights)}, folder / "model.safetensors")
    how = METHODS[method]
    records = how.records(weights.shape[-2 if is_transposed else -1])._replace(is_transposed=is_transposed)
    return OnLoadReader(open_checkpoint(folder), {"w": Made(how, Kept(records, 16))})


def read(reader: OnLoadReader) -> np.ndarray:
    made, shape = reader.made["w"], reader.tensors["w"].shape
    form = form_of_records(made.kept.records, made.kept.span)
    return np.asarray(decode(reader.read("w", whole_index(shape)), form))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_codes_are_the_nearest(method: str, dtype: type, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((150, 192)) * rng.uniform(0.1, 4, (150, 1))).astype(dtype)
    how, floats = METHODS[method], weights.astype(np.float32)
    with opened(tmp_path, weights, method) as reader:
        found = read(reader)
        step = STEPS[how.values]
        if how.values == "float8_e4m3fn":
            largest = np.abs(floats).max(axis=None if how.rows == 0 else 1, keepdims=True)
            allowed = np.maximum(
                np.abs(floats) * step, largest * 2.0**-9 if how.rows != 128 else np.abs(floats).max() / 448
            )
        else:
            size = reader.made["w"].kept.records.group or 192
            largest = np.abs(floats).reshape(150, -1, size).max(axis=2)
            allowed = np.repeat(largest, size, axis=1) * step * 1.08  # scales of four bits are rounded too
        assert (np.abs(found - floats) <= allowed).all()
        assert np.abs(found - floats).max() > 0


@pytest.mark.parametrize(
    ("method", "num_scales"), [("fp8_per_tensor", 1), ("fp8_per_channel", 150), ("fp8_per_block", 6)]
)
def test_what_shares_a_scale(method: str, num_scales: int, tmp_path: Path) -> None:
    """Blocks of 128 rows and 64 columns, since 128 does not divide 192."""
    weights = np.random.default_rng(1).standard_normal((150, 192)).astype(np.float32)
    with opened(tmp_path, weights, method) as reader:
        made = reader.made["w"]
        rows = reader.read("w", whole_index(reader.tensors["w"].shape))
        scales = parts_of(rows, form_of_records(made.kept.records, made.kept.span))["scale"]
    assert len(np.unique(scales)) == num_scales
    assert scales.max() == pytest.approx(np.abs(weights).max() / 448)


@pytest.mark.parametrize("method", METHODS)
def test_boxes_are_those_of_the_whole(method: str, tmp_path: Path) -> None:
    """Also of experts' matrices, and of one whose rows are the file's columns."""
    weights = np.random.default_rng(2).standard_normal((3, 64, 96)).astype(np.float32)
    with opened(tmp_path, weights, method) as reader:
        shape = reader.tensors["w"].shape
        whole = reader.read("w", whole_index(shape))
        size = shape[-1] // 6
        box = (slice(1, 3), slice(5, 40), slice(size, 4 * size))
        np.testing.assert_array_equal(reader.read("w", box), whole[box])
    turned = tmp_path / "turned"
    turned.mkdir()
    with opened(turned, weights.swapaxes(1, 2), method, is_transposed=True) as reader:
        np.testing.assert_array_equal(reader.read("w", whole_index(shape)), whole)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weights = np.ones((4, 32), np.float32)
    weights[2, 3] = np.nan
    with (
        opened(tmp_path, weights, "int8_w8a8") as reader,
        pytest.raises(CheckpointError, match="'w' has weights that are not finite"),
    ):
        read(reader)


def test_a_row_of_zeros_stays(tmp_path: Path) -> None:
    with opened(tmp_path, np.zeros((2, 32), np.float32), "int4_group") as reader:
        np.testing.assert_array_equal(read(reader), np.zeros((2, 32)))
