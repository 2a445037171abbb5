"""Which reader a directory gets, sharded checkpoints and their indexes."""

import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import CheckpointError, CheckpointReader, open_checkpoint, read_index, save_orbax
from checkpoints.orbax_io import OrbaxReader
from checkpoints.safetensors_reader import SafetensorsReader
from checkpoints.tensor_info import whole_index
from checkpoints.torch_reader import TorchReader

A, B, C = (np.full((2, 2), number, np.float32) for number in range(3))


def sharded(directory: Path, weight_map: dict[str, str] | None = None) -> Path:
    save_file({"a": A, "b": B}, directory / "model-1.safetensors")
    save_file({"c": C}, directory / "model-2.safetensors")
    if weight_map is not None:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


GOOD_MAP = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}


@pytest.mark.parametrize("weight_map", [GOOD_MAP, None])
def test_sharded_with_and_without_an_index(tmp_path: Path, weight_map: dict[str, str] | None) -> None:
    with open_checkpoint(str(sharded(tmp_path, weight_map))) as reader:
        assert isinstance(reader, CheckpointReader)
        assert sorted(reader.tensors) == ["a", "b", "c"]
        for name, value in {"a": A, "b": B, "c": C}.items():
            np.testing.assert_array_equal(reader.read(name, whole_index((2, 2))), value)
            result = np.full((2, 2), np.nan, np.float16)
            reader.read_into(name, whole_index((2, 2)), result)
            np.testing.assert_array_equal(result, value)


def test_tensors_that_the_index_leaves_out_are_offered(tmp_path: Path) -> None:
    with open_checkpoint(sharded(tmp_path, {"a": "model-1.safetensors", "c": "model-2.safetensors"})) as reader:
        assert sorted(reader.tensors) == ["a", "b", "c"]


def test_the_index_decides_between_files(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "1.safetensors")
    save_file({"a": C}, tmp_path / "2.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'a' is in 2\.safetensors and in another file"):
        open_checkpoint(tmp_path)
    index = {"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_checkpoint(tmp_path) as reader:
        np.testing.assert_array_equal(reader.read("a", whole_index((2, 2))), C)


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sharded(tmp_path, {**GOOD_MAP, "d": "model-1.safetensors", "e": "model-2.safetensors"})
    with pytest.raises(
        CheckpointError, match=r"are not in their files: d \(in model-1\.safetensors\), e \(in model-2\.safetensors\)$"
    ):
        open_checkpoint(tmp_path)
    sharded(tmp_path, {**GOOD_MAP, "d": "model-3.safetensors", "e": "model-4.safetensors"})
    with pytest.raises(CheckpointError, match=r"not exist: model-3\.safetensors, model-4\.safetensors$"):
        open_checkpoint(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_long_lists_are_cut(tmp_path: Path) -> None:
    sharded(tmp_path, {f"t{number}": f"file{number:03d}" for number in range(200)})
    with pytest.raises(CheckpointError, match="file000, .*, file019 and 180 more$"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b", 5])
def test_file_names_that_are_paths(tmp_path: Path, file: object) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="weight_map names .*, expected the name of a file in the same directory"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected an object with a weight_map"),
        ("{}", "expected an object with a weight_map"),
        ('{"weight_map": {}}', "expected an object with a weight_map"),
        ('{"weight_map": []}', "expected an object with a weight_map"),
    ],
)
def test_bad_indexes(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=rf"index\.json: {message}"):
        open_checkpoint(tmp_path)


def test_read_index_alone(tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_map = read_index(shared_data / "configs" / "llama-2-7b" / "pytorch_model.bin.index.json")
    assert weight_map["lm_head.weight"] == "pytorch_model-00003-of-00003.bin" and len(weight_map) == 323
    with pytest.raises(CheckpointError, match="absent.json: cannot be read: No such file"):
        read_index(tmp_path / "absent.json")
    (tmp_path / "i.json").write_text(json.dumps({"weight_map": GOOD_MAP}))
    monkeypatch.setattr("checkpoints.reader.MAX_INDEX_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"i\.json: larger than 10 bytes, the limit for an index file"):
        read_index(tmp_path / "i.json")


def test_what_is_taken_first(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch, the oracle, is not installed")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    save_file({"mistral": A}, tmp_path / "consolidated.safetensors")
    with open_checkpoint(tmp_path) as reader:
        assert isinstance(reader, TorchReader)
    save_file({"a": A}, tmp_path / "weights.safetensors")
    with open_checkpoint(tmp_path) as reader:
        assert list(reader.tensors) == ["a"]
    save_orbax(tmp_path / "orbax", {"b": jnp.ones(2)})
    with open_checkpoint(tmp_path) as reader:
        assert isinstance(reader, OrbaxReader) and list(reader.tensors) == ["b"]
    save_file({"c": C}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as reader:
        assert isinstance(reader, SafetensorsReader) and list(reader.tensors) == ["c"]


def test_single_files(tmp_path: Path) -> None:
    save_file({"c": C}, tmp_path / "any.safetensors")
    with open_checkpoint(tmp_path / "any.safetensors") as reader:
        assert list(reader.tensors) == ["c"]
    (tmp_path / "x.onnx").write_bytes(b"ONNX")
    with pytest.raises(
        CheckpointError, match=r"x\.onnx: expected a directory, a \.safetensors, a \.bin or a \.gguf file"
    ):
        open_checkpoint(tmp_path / "x.onnx")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"x\.bin: not a torch checkpoint"):
        open_checkpoint(tmp_path / "x.bin")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent: no such directory"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(
        CheckpointError,
        match=r"no weights found; looked for model\.safetensors, .* and pytorch_model\.bin\.index\.json",
    ):
        open_checkpoint(tmp_path)


def test_baichuan_like_directory(tmp_path: Path) -> None:
    """Sharded `.bin` files with an index, bfloat16, fused `W_pack`."""
    torch = pytest.importorskip("torch", reason="torch, the oracle, is not installed")
    torch.manual_seed(0)
    shards = {
        "pytorch_model-00001-of-00002.bin": {
            "model.embed_tokens.weight": torch.randn(64, 16).to(torch.bfloat16),
            "model.layers.0.self_attn.W_pack.weight": torch.randn(48, 16).to(torch.bfloat16),
        },
        "pytorch_model-00002-of-00002.bin": {"lm_head.weight": torch.randn(64, 16).to(torch.bfloat16)},
    }
    weight_map = {name: file for file, state in shards.items() for name in state}
    for file, state in shards.items():
        torch.save(state, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with open_checkpoint(tmp_path) as reader:
        assert set(reader.tensors) == set(weight_map)
        for state in shards.values():
            for name, tensor in state.items():
                got = reader.read(name, whole_index(tensor.shape))
                np.testing.assert_array_equal(got.astype(np.float32), tensor.float().numpy())
