"""Each quantized format: the weights that are read are those that the file stands for, whole and in boxes."""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from checkpoints import open_checkpoint
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.tensor_info import whole_index
from tests.quantized_files import Writer, quantize, section, write_awq, write_gptq


class Case(NamedTuple):
    """A format with settings: how to write a weight, and the section of config.json that says so."""

    write: Writer
    section: dict[str, Any]
    shape: tuple[int, int] = (48, 64)


def gptq(bits: int, group: int = 16, version: str = "gptq", *, sym: bool = False, act_order: bool = False) -> Case:
    write = partial(write_gptq, group=group, bits=bits, is_symmetric=sym, has_act_order=act_order, version=version)
    fields = {"bits": bits, "group_size": group, "sym": sym, "desc_act": act_order, "checkpoint_format": version}
    return Case(write, section("gptq", **fields), (64, 96))


CASES = {
    "awq": Case(partial(write_awq, group=16), section("awq", bits=4, group_size=16, zero_point=True, version="gemm")),
    "awq whole inputs": Case(partial(write_awq, group=-1), section("awq", w_bit=4, q_group_size=-1)),
    **{f"gptq {bits} bits": gptq(bits) for bits in (2, 3, 4, 8)},
    "gptq v2": gptq(4, version="gptq_v2"),
    "gptq symmetric": gptq(4, sym=True),
    "gptq act-order": gptq(4, act_order=True),
    "gptq act-order, 3 bits": gptq(3, act_order=True),
    "gptq whole inputs": gptq(4, -1),
    "gptq ragged group": gptq(4, 40),
}
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
    @given(bounds(expected.shape[0]), bounds(expected.shape[1]))
    def check(rows: tuple[int, int], columns: tuple[int, int]) -> None:
        index = (slice(*rows), slice(*columns))
        box = reader.read(NAME, index)
        np.testing.assert_array_equal(box, expected[index])
        if not box.size:
            return
        planes = reader.planes(NAME, index)
        assert planes.codes.dtype.itemsize == 1 and planes.codes.shape == box.shape
        np.testing.assert_array_equal(planes.decode(), box)

    with reader:
        check()
