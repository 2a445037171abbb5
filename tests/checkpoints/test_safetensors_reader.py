"""Safetensors files against the safetensors library, and every way a header can be wrong."""

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from checkpoints import CheckpointError, TensorInfo, open_checkpoint
from checkpoints.safetensors_reader import MAX_HEADER_BYTES, SafetensorsReader
from checkpoints.tensor_info import whole_index

DTYPES = [
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    np.int64,
    np.int32,
    np.int16,
    np.int8,
    np.uint64,
    np.uint32,
    np.uint16,
    np.uint8,
    np.bool_,
    np.complex64,
]


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_files_of_the_library(tmp_path: Path, data: st.DataObject) -> None:
    names = data.draw(
        st.lists(st.text(min_size=1).filter(lambda name: name != "__metadata__"), unique=True, max_size=6)
    )
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    tensors: dict[str, np.ndarray] = {}
    for name in names:
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
        tensors[name] = random.normal(size=shape).astype(data.draw(st.sampled_from(DTYPES)))
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "np"})
    with SafetensorsReader(path) as reader:
        assert reader.tensors == {name: TensorInfo(value.shape, value.dtype) for name, value in tensors.items()}
        for name, value in tensors.items():
            got = reader.read(name, whole_index(value.shape))
            assert got.dtype == value.dtype and got.tobytes() == value.tobytes()
            half = tuple(slice(length // 2, length) for length in value.shape)
            assert reader.read(name, half).tobytes() == np.ascontiguousarray(value[half]).tobytes()


def test_stories_model(stories_model: Path) -> None:
    from safetensors.numpy import load_file

    expected = load_file(stories_model / "model.safetensors")
    with open_checkpoint(stories_model) as reader:
        assert set(reader.tensors) == set(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(reader.read(name, whole_index(value.shape)), value)


GOOD: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def write(path: Path, header: object, data_bytes: int = 32, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def test_the_good_header_is_good(tmp_path: Path) -> None:
    with SafetensorsReader(write(tmp_path / "f.safetensors", GOOD)) as reader:
        assert list(reader.tensors) == ["a", "b"]


def changed(name: str, **fields: object) -> dict[str, Any]:
    return {**GOOD, name: {**GOOD[name], **fields}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "the header is not valid JSON"),
        (b"\xff\xfe{}", "the header is not valid JSON"),
        (b"[" * 200_000, "the header is not valid JSON"),
        (b"[]", "the header is a JSON list, expected an object"),
        (b'{"a": 1, "a": 2}', "the header has 'a' twice"),
        ({**GOOD, "__metadata__": {"format": 1}}, "__metadata__ must map strings to strings"),
        ({**GOOD, "__metadata__": []}, "__metadata__ must map strings to strings"),
        ({"a": 5}, "tensor 'a': expected an object with dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": []}}, "tensor 'a': expected an object with dtype"),
        (changed("a", dtype="F4"), "tensor 'a': dtype 'F4' is not one of BOOL, U8"),
        (changed("a", dtype=None), "tensor 'a': dtype None is not one of"),
        (changed("a", shape=[2, -3]), r"tensor 'a': shape \[2, -3\] is not a list of"),
        (changed("a", shape=[2, 3.0]), r"tensor 'a': shape \[2, 3.0\] is not a list of"),
        (changed("a", shape=[2, True]), r"tensor 'a': shape \[2, True\] is not a list of"),
        (changed("a", shape=6), "tensor 'a': shape 6 is not a list of"),
        (changed("a", shape=[1] * 33), "tensor 'a': shape .* is not a list of at most 32"),
        (changed("a", shape=[1 << 63, 0]), "tensor 'a': shape .* is not a list of"),
        (changed("a", data_offsets=[0, 24, 30]), "tensor 'a': data_offsets .* are not two integers"),
        (changed("a", data_offsets=[-24, 0]), "tensor 'a': data_offsets .* are not two integers"),
        (changed("a", data_offsets=["0", "24"]), "tensor 'a': data_offsets .* are not two integers"),
        (changed("a", data_offsets=[24, 0]), r"tensor 'a': data_offsets begin \(24\) after their end \(0\)"),
        (changed("a", shape=[2, 4]), r"tensor 'a': data_offsets span 24 bytes, expected 32 for F32 \[2, 4\]"),
        (changed("a", shape=[1 << 62, 1 << 62]), "tensor 'a': data_offsets span 24 bytes, expected"),
        (changed("b", data_offsets=[20, 28]), "tensor 'b' overlaps 'a'"),
        (
            changed("b", data_offsets=[28, 36]),
            "the file is truncated: tensor 'b' ends at byte 36 of the data, but the file has only 32",
        ),
        ({"a": GOOD["a"]}, "8 bytes after the last tensor belong to no tensor"),
        ({"b": GOOD["b"]}, "24 bytes before tensor 'b' belong to no tensor"),
    ],
)
def test_bad_headers(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"f.safetensors: {message}"):
        SafetensorsReader(write(tmp_path / "f.safetensors", header))


@pytest.mark.parametrize("data_bytes", [0, 23, 31])
def test_truncated_data(tmp_path: Path, data_bytes: int) -> None:
    with pytest.raises(CheckpointError, match=rf"the file is truncated: .* has only {data_bytes}$"):
        SafetensorsReader(write(tmp_path / "f.safetensors", GOOD, data_bytes))


def test_bad_lengths(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="not a safetensors file: only 7 bytes"):
        SafetensorsReader(path)
    with pytest.raises(CheckpointError, match=f"header length {2**64 - 1} is above the limit of {MAX_HEADER_BYTES} "):
        SafetensorsReader(write(path, GOOD, length=2**64 - 1))
    with pytest.raises(CheckpointError, match="header of 5000 bytes does not fit in"):
        SafetensorsReader(write(path, GOOD, length=5000))


def test_every_truncation_of_a_real_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.int8)}, path)
    content = path.read_bytes()
    for count in range(len(content)):
        path.write_bytes(content[:count])
        with pytest.raises(CheckpointError, match="model.safetensors: "):
            SafetensorsReader(path)


def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(CheckpointError):
            SafetensorsReader(write(tmp_path / "f.safetensors", b"{"))
    assert len(os.listdir("/proc/self/fd")) == before
