"""Conversions between formats keep every value and bring the configuration along."""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, open_checkpoint
from checkpoints.convert import convert
from checkpoints.tensor_info import whole_index

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    random = np.random.default_rng(0)
    save_file(
        {
            "w": random.normal(size=(8, 6)).astype(np.float32),
            "h": random.normal(size=(5,)).astype(BF16),
            "ids": np.arange(4),
        },
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32"}))
    for name in ["tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "LICENSE"]:
        (directory / name).write_text(name)
    (directory / "modeling_evil.py").write_text("import os")
    (directory / "notes.json").mkdir()
    return directory


def values(directory: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(directory) as reader:
        return {name: reader.read(name, whole_index(info.shape)) for name, info in reader.tensors.items()}


COPIED = {"config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "LICENSE"}


def test_to_orbax_and_back(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "new" / "orbax", "orbax")
    convert(str(tmp_path / "new" / "orbax"), str(tmp_path / "back"), "safetensors")
    assert {path.name for path in (tmp_path / "new" / "orbax").iterdir()} == {*COPIED, "orbax"}
    assert {path.name for path in (tmp_path / "back").iterdir()} == {*COPIED, "model.safetensors"}
    original = load_file(source / "model.safetensors")
    for directory in (tmp_path / "new" / "orbax", tmp_path / "back"):
        got = values(directory)
        assert set(got) == set(original)
        for name, value in original.items():
            assert got[name].dtype == value.dtype and got[name].tobytes() == value.tobytes()
        assert (directory / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "new", "back"}


def test_orbax_in_several_groups(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[convert.__module__], "GROUP_BYTES", 100)
    convert(source, tmp_path / "orbax", "orbax")
    for name, value in load_file(source / "model.safetensors").items():
        np.testing.assert_array_equal(values(tmp_path / "orbax")[name], value)


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_to_another_dtype(source: Path, tmp_path: Path, format: str) -> None:
    convert(source, tmp_path / "half", format, dtype="float16")
    original, got = load_file(source / "model.safetensors"), values(tmp_path / "half")
    np.testing.assert_array_equal(got["w"], original["w"].astype(np.float16))
    np.testing.assert_array_equal(got["h"], original["h"].astype(np.float16))
    np.testing.assert_array_equal(got["ids"], original["ids"])
    assert json.loads((tmp_path / "half" / "config.json").read_text()) == {
        "model_type": "llama",
        "torch_dtype": "float16",
    }


def test_from_torch_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch, the oracle, is not installed")
    (tmp_path / "bin").mkdir()
    weight = torch.randn(6, 4).to(torch.bfloat16)
    torch.save({"w": weight, "t": weight.t()}, tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "pytorch_model.bin.index.json.bak").touch()
    convert(tmp_path / "bin", tmp_path / "new", "safetensors")
    from safetensors.torch import load_file as load_torch

    loaded = load_torch(tmp_path / "new" / "model.safetensors")
    assert torch.equal(loaded["w"], weight) and torch.equal(loaded["t"], weight.t())


def test_the_index_of_the_source_is_left_behind(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").rename(source / "part.safetensors")
    index = {"weight_map": dict.fromkeys(("w", "h", "ids"), "part.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(source, tmp_path / "new", "safetensors")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {*COPIED, "model.safetensors"}


def test_an_empty_destination_is_used(source: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    convert(source, tmp_path / "new", "safetensors")
    assert (tmp_path / "new" / "model.safetensors").exists()


def test_bad_requests(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown format 'gguf'; supported: orbax, safetensors"):
        convert(source, tmp_path / "new", "gguf")
    with pytest.raises(CheckpointError, match="unsupported dtype 'int8'; supported: float32, float16, bfloat16"):
        convert(source, tmp_path / "new", "orbax", dtype="int8")
    with pytest.raises(CheckpointError, match="source: is not an empty directory"):
        convert(source, source, "orbax")
    with pytest.raises(CheckpointError, match="model.safetensors: is not an empty directory"):
        convert(source, source / "model.safetensors", "orbax")
    with pytest.raises(CheckpointError, match="absent: no such directory"):
        convert(tmp_path / "absent", tmp_path / "new", "orbax")


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "expected a JSON object")])
def test_a_failure_leaves_nothing_behind(source: Path, tmp_path: Path, text: str, message: str) -> None:
    (source / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        convert(source, tmp_path / "new", "safetensors", dtype="bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
