"""What we write, the safetensors library reads, and ours again."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file

from checkpoints import CheckpointError, TensorInfo, open_checkpoint, save_safetensors
from checkpoints.tensor_info import whole_index

BF16 = np.dtype(ml_dtypes.bfloat16)


def info_of(array: np.ndarray | jax.Array) -> TensorInfo:
    return TensorInfo(array.shape, np.dtype(array.dtype))


def some_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "odd": np.arange(3, dtype=np.int8),
        "a.weight": random.normal(size=(7, 5)).astype(np.float32),
        "b.weight": random.normal(size=(3, 3)).astype(BF16),
        "scalar": np.array(4.5, np.float64),
        "empty": np.zeros((0, 3), np.float16),
        "columns": random.normal(size=(6, 8)).astype(np.float32)[:, ::2],
    }


def test_one_file(tmp_path: Path) -> None:
    tensors = some_tensors()
    files = save_safetensors(tmp_path / "new" / "dir", [(name, info_of(a), a) for name, a in tensors.items()])
    assert files == [tmp_path / "new" / "dir" / "model.safetensors"]
    assert [file.name for file in files[0].parent.iterdir()] == ["model.safetensors"]
    loaded = load_file(files[0])
    assert set(loaded) == set(tensors)
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype and loaded[name].shape == value.shape
        assert loaded[name].tobytes() == value.tobytes()
    with safe_open(files[0], "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_every_tensor_starts_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    (file,) = save_safetensors(tmp_path, [(name, info_of(a), a) for name, a in some_tensors().items()])
    content = file.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    sizes = {name: value.itemsize for name, value in some_tensors().items()}
    for name, size in sizes.items():
        assert (8 + header_bytes + header[name]["data_offsets"][0]) % size == 0


def test_shards_and_index(tmp_path: Path) -> None:
    tensors = {f"t{number}": np.full((10,), number, np.float32) for number in range(6)}
    tensors["large"] = np.arange(100, dtype=np.float32)
    files = save_safetensors(tmp_path, [(n, info_of(a), a) for n, a in tensors.items()], max_shard_bytes=90)
    assert [file.name for file in files] == [
        *(f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)),
        "model.safetensors.index.json",
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(file.name for file in files)
    index = json.loads(files[-1].read_text())
    assert index["metadata"] == {"total_size": 640}
    assert index["weight_map"]["t0"] == index["weight_map"]["t1"] == files[0].name
    assert index["weight_map"]["large"] == files[3].name
    for name, value in tensors.items():
        np.testing.assert_array_equal(load_file(tmp_path / index["weight_map"][name])[name], value)
    with open_checkpoint(tmp_path) as reader:
        for name, value in tensors.items():
            np.testing.assert_array_equal(reader.read(name, whole_index(value.shape)), value)


def test_functions_are_called_one_at_a_time_and_in_shard_order(tmp_path: Path) -> None:
    calls: list[int] = []

    def make(number: int) -> np.ndarray:
        calls.append(number)
        return np.full((4,), number, np.float32)

    info = TensorInfo((4,), np.dtype(np.float32))
    save_safetensors(tmp_path, [(f"t{n}", info, lambda n=n: make(n)) for n in range(5)], max_shard_bytes=32)
    assert calls == [0, 1, 2, 3, 4]


def test_sharded_jax_arrays(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",), axis_types=(AxisType.Auto,))
    array = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, PartitionSpec("tensor")))
    (file,) = save_safetensors(tmp_path, [("w", info_of(array), array)])
    np.testing.assert_array_equal(load_file(file)["w"], np.arange(32.0).reshape(8, 4))


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> np.ndarray:
        raise RuntimeError("no memory")

    info = TensorInfo((4,), np.dtype(np.float32))
    with pytest.raises(RuntimeError, match="no memory"):
        save_safetensors(tmp_path, [("a", info, np.zeros(4, np.float32)), ("b", info, fail)], max_shard_bytes=16)
    assert list(tmp_path.iterdir()) == []


def test_bad_requests(tmp_path: Path) -> None:
    array = np.zeros(4, np.float32)
    info = info_of(array)
    with pytest.raises(CheckpointError, match="no tensors to save"):
        save_safetensors(tmp_path, [])
    with pytest.raises(CheckpointError, match="tensor 'a' is a duplicate"):
        save_safetensors(tmp_path, [("a", info, array), ("a", info, array)])
    with pytest.raises(CheckpointError, match="tensor '__metadata__' is a duplicate or a reserved name"):
        save_safetensors(tmp_path, [("__metadata__", info, array)])
    with pytest.raises(CheckpointError, match="tensor 'a' has dtype complex128, which safetensors does not support"):
        save_safetensors(tmp_path, [("a", TensorInfo((4,), np.dtype(np.complex128)), array)])
    with pytest.raises(CheckpointError, match=r"tensor 'a' is float32 \[4\], but was declared as float32 \[5\]"):
        save_safetensors(tmp_path, [("a", TensorInfo((5,), np.dtype(np.float32)), array)])
    save_safetensors(tmp_path, [("a", info, array)])
    with pytest.raises(CheckpointError, match=r"already has model\.safetensors"):
        save_safetensors(tmp_path, [("a", info, array)])
