"""Each quantized format: the weights that are read are those that the file stands for, whole and in boxes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from checkpoints import open_checkpoint
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.tensor_info import whole_index
from jaxserve.models.loading import decode
from tests.quantized_cases import CASES, Case
from tests.quantized_files import quantize

NAME = "model.layers.0.mlp.up_proj.weight"


def open_case(folder: Path, case: Case) -> tuple[QuantizedReader, np.ndarray]:
    """Write one weight in the form of a case and open it; also return the weight that the file stands for."""
    plain = {"model.embed_tokens.weight": np.ones((4, 4), np.float32), NAME: np.zeros(case.shape, np.float32)}
    stored, floats = quantize(plain, case.write, NAME.__eq__)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": case.section}))
    reader = open_checkpoint(folder)
    assert isinstance(reader, QuantizedReader)
    return reader, floats[NAME]


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_file_stands_for(case: str, tmp_path: Path) -> None:
    reader, expected = open_case(tmp_path, CASES[case])
    with reader:
        assert set(reader.tensors) == {"model.embed_tokens.weight", NAME}
        assert reader.tensors[NAME].shape == expected.shape
        np.testing.assert_array_equal(reader.read(NAME, whole_index(expected.shape)), expected)


@pytest.mark.parametrize("case", CASES)
def test_boxes_are_those_of_the_whole_and_equal_their_planes(
    case: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader, expected = open_case(tmp_path_factory.mktemp("case"), CASES[case])

    def bounds(length: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, length), st.integers(0, length)).map(lambda pair: (min(pair), max(pair)))

    @settings(max_examples=25)
    @given(bounds(expected.shape[0]), bounds(expected.shape[1]), st.sampled_from((reader.decode, decode)))
    def check(rows: tuple[int, int], columns: tuple[int, int], decoder: Any) -> None:
        index = (slice(*rows), slice(*columns))
        reader.decode = decoder
        box = reader.read(NAME, index)
        np.testing.assert_array_equal(box, expected[index])
        if not box.size:
            return
        planes = reader.planes(NAME, index)
        assert planes.codes.dtype.itemsize == 1 and planes.codes.shape == box.shape
        np.testing.assert_array_equal(planes.decode(), box)

    with reader:
        check()
