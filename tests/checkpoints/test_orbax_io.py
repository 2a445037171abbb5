"""Orbax checkpoints: saved on one mesh, read box by box and restored on another."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from checkpoints import CheckpointError, TensorInfo, load_arrays, open_checkpoint, read_shard, save_orbax, whole
from checkpoints.orbax_io import OrbaxReader, find_orbax, save_orbax_streamed
from checkpoints.tensor_info import whole_index


def sharding(num_devices: int, *axes: str | None) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tensor",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*axes))


def some_arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "model.embed_tokens.weight": random.normal(size=(64, 32)).astype(ml_dtypes.bfloat16),
        "model.layers.0.q_proj.weight": random.normal(size=(32, 32)).astype(np.float32),
        "model.norm.weight": random.normal(size=(32,)).astype(np.float16),
        "scale": np.array(2.5, np.float32),
    }


def save_on_four(path: Path) -> dict[str, np.ndarray]:
    arrays = some_arrays()
    axes = {"model.embed_tokens.weight": ("tensor", None), "model.layers.0.q_proj.weight": (None, "tensor")}
    save_orbax(path, {n: jax.device_put(a, sharding(4, *axes.get(n, ()))) for n, a in arrays.items()})
    return arrays


def test_four_devices_to_two_with_other_axes(tmp_path: Path) -> None:
    arrays = save_on_four(tmp_path / "c")
    shardings = {
        "model.embed_tokens.weight": sharding(2, None, "tensor"),
        "model.layers.0.q_proj.weight": sharding(2, "tensor", None),
        "model.norm.weight": sharding(2, "tensor"),
        "scale": sharding(2),
    }
    with open_checkpoint(tmp_path / "c") as reader:
        assert reader.tensors == {name: TensorInfo(a.shape, a.dtype) for name, a in arrays.items()}
        recipes = {name: whole(name, a.shape) for name, a in arrays.items()}
        dtypes = {name: a.dtype for name, a in arrays.items()}
        loaded = load_arrays(reader, recipes, dtypes, shardings)
    for name, value in arrays.items():
        assert loaded[name].sharding == shardings[name] and loaded[name].dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(loaded[name]), value)


def test_boxes(tmp_path: Path) -> None:
    arrays = save_on_four(tmp_path / "c")
    with OrbaxReader(tmp_path / "c") as reader:
        value = arrays["model.embed_tokens.weight"]
        got = reader.read("model.embed_tokens.weight", (slice(10, 40), slice(5, 9)))
        assert got.flags.c_contiguous and got.dtype == value.dtype
        np.testing.assert_array_equal(got, value[10:40, 5:9])
        assert reader.read("scale", ()) == np.float32(2.5)
        assert reader.read("model.norm.weight", (slice(4, 4),)).shape == (0,)


def test_orbax_itself_restores_what_we_save(tmp_path: Path) -> None:
    from orbax.checkpoint import v1 as ocp

    arrays = save_on_four(tmp_path / "c")
    target = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(2)) for n, a in arrays.items()}
    loaded = ocp.load(str(tmp_path / "c"), target)
    for name, value in arrays.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), value)


def test_streamed_saving_gives_the_same(tmp_path: Path) -> None:
    from orbax.checkpoint import v1 as ocp

    arrays = some_arrays()
    save_orbax_streamed(tmp_path / "c", ({name: jnp.asarray(value)} for name, value in arrays.items()))
    with OrbaxReader(tmp_path / "c") as reader:
        for name, value in arrays.items():
            np.testing.assert_array_equal(reader.read(name, whole_index(value.shape)), value)
    target = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(1)) for n, a in arrays.items()}
    for name, value in ocp.load(str(tmp_path / "c"), target).items():
        np.testing.assert_array_equal(np.asarray(value), arrays[name])


def test_a_nested_tree_of_the_older_api(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"model": {"norm": {"weight": jnp.arange(6.0)}}})
    assert find_orbax(tmp_path / "c") == tmp_path / "c"
    with open_checkpoint(tmp_path / "c") as reader:
        np.testing.assert_array_equal(reader.read("model.norm.weight", (slice(2, 5),)), [2.0, 3.0, 4.0])


@pytest.mark.parametrize("use_zarr3", [True, False])
def test_without_ocdbt(tmp_path: Path, use_zarr3: bool) -> None:
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    context.array.saving.use_zarr3 = use_zarr3
    with context:
        ocp.save(str(tmp_path / "c"), {"w": jnp.arange(12.0).reshape(3, 4)})
    with OrbaxReader(tmp_path / "c") as reader:
        np.testing.assert_array_equal(reader.read("w", (slice(1, 2), slice(0, 4))), [[4.0, 5.0, 6.0, 7.0]])


def test_chunks_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints.orbax_io.CHUNK_BYTES", 1024)
    save_orbax(tmp_path / "c", {"w": jnp.zeros((64, 64))})
    leaf = json.loads((tmp_path / "c" / "state" / "array_metadatas" / "process_0").read_text())
    assert np.prod(leaf["array_metadatas"][0]["array_metadata"]["chunk_shape"]) * 4 <= 1024


@pytest.mark.parametrize("axis", [0, 1])
def test_a_shard_is_read_once_and_little_else(tmp_path: Path, axis: int) -> None:
    """Though it is read in parts of 2 MiB, several of which have something of a chunk."""
    import tensorstore

    def num_read() -> int:
        name = "/tensorstore/kvstore/file/bytes_read"
        return sum(each["values"][0]["value"] for each in tensorstore.experimental_collect_matching_metrics(name))

    array = np.random.default_rng(0).integers(0, 1 << 16, (2048, 2752), np.uint16)
    save_orbax(tmp_path / "c", {"w": jnp.asarray(array)})
    bounds = tuple((0, size // 2 if i == axis else size) for i, size in enumerate(array.shape))
    with OrbaxReader(tmp_path / "c") as reader:
        before = num_read()
        shard = read_shard(reader, whole("w", array.shape), bounds, np.dtype(np.uint16))
        assert np.array_equal(shard, array[tuple(slice(*each) for each in bounds)])
        assert shard.nbytes <= num_read() - before <= shard.nbytes + (1 << 18)


def test_saving_over_something_or_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already exists; pass a path that does not exist"):
        save_orbax(tmp_path, {"w": jnp.zeros(3)})
    with pytest.raises(CheckpointError, match="already exists; pass a path that does not exist"):
        save_orbax_streamed(tmp_path, [{"w": jnp.zeros(3)}])
    with pytest.raises(CheckpointError, match="no arrays to save"):
        save_orbax(tmp_path / "c", {})
    with pytest.raises(CheckpointError, match="no arrays to save"):
        save_orbax_streamed(tmp_path / "c", [])


def test_damaged_checkpoints(tmp_path: Path) -> None:
    save_on_four(tmp_path / "c")
    metadata = tmp_path / "c" / "state" / "_METADATA"
    original = metadata.read_text()
    metadata.write_text(original.replace("scale", "scala"))
    with pytest.raises(CheckpointError, match="tensor 'scala' cannot be opened"):
        open_checkpoint(tmp_path / "c")
    metadata.write_text("{")
    with pytest.raises(CheckpointError, match="_METADATA: cannot be read"):
        open_checkpoint(tmp_path / "c")
    metadata.write_text("{}")
    with pytest.raises(CheckpointError, match="_METADATA: expected an object with tree_metadata"):
        open_checkpoint(tmp_path / "c")
    metadata.write_text('{"tree_metadata": {"a": {}}}')
    with pytest.raises(CheckpointError, match="_METADATA: a leaf has no key_metadata"):
        open_checkpoint(tmp_path / "c")
    metadata.write_text('{"tree_metadata": {"a": {"key_metadata": [{"key": "../../x"}]}}, "use_ocdbt": false}')
    with pytest.raises(CheckpointError, match=r"tensor name '\.\./\.\./x' points outside the checkpoint"):
        open_checkpoint(tmp_path / "c")
    metadata.unlink()
    with pytest.raises(CheckpointError, match="not a complete Orbax checkpoint"):
        open_checkpoint(tmp_path / "c")


def test_data_that_is_missing_or_damaged(tmp_path: Path) -> None:
    save_on_four(tmp_path / "c")
    with OrbaxReader(tmp_path / "c") as reader:
        for file in (tmp_path / "c" / "state").rglob("d/*"):
            file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(CheckpointError, match=r"tensor 'model\.embed_tokens\.weight' cannot be read"):
            reader.read("model.embed_tokens.weight", whole_index((64, 32)))
