"""Sharded arrays equal what numpy puts together, and loading stays within its memory."""

import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import DTypeLike
from safetensors.numpy import save_file

from checkpoints import CheckpointError, Piece, TensorRecipe, load_array, load_arrays, loader, open_checkpoint, whole
from checkpoints.reader import BaseReader
from checkpoints.tensor_info import Index, TensorInfo
from tests.copied_pieces import copy_piece

BF16 = np.dtype(ml_dtypes.bfloat16)


class ArrayReader(BaseReader):
    """A reader over arrays in memory that notes what was read."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays
        self.tensors = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
        self.reads: list[tuple[str, Index]] = []

    def read(self, name: str, index: Index) -> np.ndarray:
        self.reads.append((name, index))
        return np.ascontiguousarray(self._arrays[name][index]).reshape([part.stop - part.start for part in index])

    def close(self) -> None:
        """Nothing is open."""


def sharding(shape: tuple[int, ...], *axes: str | None) -> NamedSharding:
    names = ("data", "tensor")[-len(shape) :]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return NamedSharding(Mesh(devices, names, axis_types=(AxisType.Auto,) * len(shape)), PartitionSpec(*axes))


def random_array(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.dtype(dtype))


def numpy_assembly(arrays: dict[str, np.ndarray], recipe: TensorRecipe, dtype: DTypeLike) -> np.ndarray:
    expected = np.zeros(recipe.shape, np.dtype(dtype))
    for piece in recipe.pieces:
        copy_piece(piece, arrays, expected)
    return expected


@pytest.mark.parametrize("axes", [("tensor",), (None, "tensor"), (), ("tensor", None)])
def test_four_devices(tmp_path: Path, axes: tuple[str | None, ...]) -> None:
    value = random_array((64, 48), BF16)
    save_file({"w": value}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as reader:
        array = load_array(reader, whole("w", value.shape), "bfloat16", sharding((4,), *axes))
    assert array.sharding == sharding((4,), *axes) and array.dtype == BF16
    np.testing.assert_array_equal(np.asarray(array), value)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


Problem = tuple[dict[str, np.ndarray], tuple[int, ...], list[Piece], list[str | None]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rank = draw(st.integers(1, 3))
    shape = tuple(4 * draw(st.integers(1, 4)) for _ in range(rank))
    arrays = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        source_shape = tuple(draw(st.integers(1, 12)) for _ in range(rank))
        first = 1000.0 * len(arrays)
        arrays[name] = np.arange(first, first + np.prod(source_shape), dtype=np.float32).reshape(source_shape)
    pieces = []
    for _ in range(draw(st.integers(0, 5))):
        source = draw(st.sampled_from(sorted(arrays)))
        is_transposed = rank == 2 and draw(st.booleans())
        order = -1 if is_transposed else 1
        lengths = arrays[source].shape[::order]
        box = [draw(st.integers(0, min(n, m))) for n, m in zip(lengths, shape, strict=True)]
        starts = [draw(st.integers(0, n - b)) for n, b in zip(lengths, box, strict=True)][::order]
        targets = [draw(st.integers(0, n - b)) for n, b in zip(shape, box, strict=True)]
        pieces.append(Piece(source, tuple(starts), tuple(targets), tuple(box), is_transposed))
    axes: list[str | None] = [None] * rank
    axes[draw(st.integers(0, rank - 1))] = "tensor"
    return arrays, shape, pieces, axes


@pytest.mark.parametrize("chunk_bytes", [16, loader.CHUNK_BYTES])
@given(problem=problems())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_pieces(
    monkeypatch: pytest.MonkeyPatch,
    chunk_bytes: int,
    problem: Problem,
) -> None:
    monkeypatch.setattr(loader, "CHUNK_BYTES", chunk_bytes)
    arrays, shape, pieces, axes = problem
    recipe = TensorRecipe(shape, tuple(pieces), tuple((name, array.shape) for name, array in arrays.items()))
    array = load_array(ArrayReader(arrays), recipe, np.float32, sharding((4,), *axes))
    np.testing.assert_array_equal(np.asarray(array), numpy_assembly(arrays, recipe, np.float32))


def test_chunks_are_small_and_cover_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK_BYTES", 64)
    reader = ArrayReader({"w": random_array((5, 3, 40))})
    load_array(reader, whole("w", (5, 3, 40)), "float32", sharding((1,)))
    counts = np.zeros((5, 3, 40), int)
    for _, index in reader.reads:
        counts[index] += 1
        assert counts[index].size * 4 <= 64
    assert (counts == 1).all()


def test_fused_qkv_interleaved_over_devices_with_repeated_kv_heads() -> None:
    """Per device: its two query heads, its key head, its value head; two KV heads over four devices."""
    num_devices, head_dim, embed = 4, 3, 5
    reader = ArrayReader({name: random_array((rows, embed)) for name, rows in {"q": 24, "k": 6, "v": 6}.items()})
    pieces = []
    for device in range(num_devices):
        base, kv_head = device * 4 * head_dim, device // 2
        pieces.append(Piece("q", (device * 2 * head_dim, 0), (base, 0), (2 * head_dim, embed)))
        pieces.append(Piece("k", (kv_head * head_dim, 0), (base + 2 * head_dim, 0), (head_dim, embed)))
        pieces.append(Piece("v", (kv_head * head_dim, 0), (base + 3 * head_dim, 0), (head_dim, embed)))
    sources = tuple((name, info.shape) for name, info in reader.tensors.items())
    recipe = TensorRecipe((num_devices * 4 * head_dim, embed), tuple(pieces), sources)
    array = load_array(reader, recipe, "float32", sharding((4,), "tensor"))
    assert len(reader.reads) == 12
    shard = np.asarray(array.addressable_shards[3].data)
    np.testing.assert_array_equal(shard[:6], reader._arrays["q"][18:24])
    np.testing.assert_array_equal(shard[6:9], reader._arrays["k"][3:6])
    np.testing.assert_array_equal(shard[9:], reader._arrays["v"][3:6])


def test_padding_is_zero() -> None:
    reader = ArrayReader({"embed": random_array((10, 4))})
    piece = Piece("embed", (0, 0), (0, 0), (10, 4))
    recipe = TensorRecipe((16, 4), (piece,), (("embed", (10, 4)),))
    array = np.asarray(load_array(reader, recipe, "float32", sharding((4,), "tensor")))
    np.testing.assert_array_equal(array[:10], reader._arrays["embed"])
    assert not array[10:].any()


def test_matrices_of_a_stacked_tensor_are_read_where_they_are_needed() -> None:
    stacked = random_array((4, 6, 3))
    reader = ArrayReader({"experts": stacked})
    pieces = tuple(Piece("experts", (index, 1, 0), (5 * index, 0), (5, 3)) for index in range(4))
    recipe = TensorRecipe((20, 3), pieces, (("experts", (4, 6, 3)),))
    array = load_array(reader, recipe, "float32", sharding((2,), "tensor"))
    np.testing.assert_array_equal(array, stacked[:, 1:].reshape(20, 3))
    assert [index[0] for _, index in reader.reads] == [slice(index, index + 1) for index in range(4)]


@pytest.mark.parametrize("axes", [("tensor",), (None, "tensor")])
def test_devices_read_their_own_part_of_transposed_matrices(
    monkeypatch: pytest.MonkeyPatch, axes: tuple[str | None, ...]
) -> None:
    monkeypatch.setattr(loader, "CHUNK_BYTES", 64)
    stacked = random_array((2, 6, 10))
    reader = ArrayReader({"experts": stacked})
    pieces = tuple(Piece("experts", (index, 0, 0), (10 * index, 0), (10, 6), True) for index in range(2))
    recipe = TensorRecipe((20, 6), pieces, (("experts", (2, 6, 10)),))
    array = load_array(reader, recipe, "float32", sharding((2,), *axes))
    np.testing.assert_array_equal(array, stacked.swapaxes(1, 2).reshape(20, 6))
    counts = np.zeros(stacked.shape, int)
    for _, index in reader.reads:
        counts[index] += 1
        assert counts[index].size * 4 <= 64
    assert (counts == 1).all()


def test_each_device_reads_its_part_and_replicas_are_read_once() -> None:
    reader = ArrayReader({"w": random_array((8, 6))})
    load_array(reader, whole("w", (8, 6)), "float32", sharding((2, 2), "tensor"))
    assert sorted(index[0].start for _, index in reader.reads) == [0, 4]
    reader.reads.clear()
    load_array(reader, whole("w", (8, 6)), "float32", sharding((2, 2)))
    assert len(reader.reads) == 1
    reader.reads.clear()
    load_array(reader, whole("w", (8, 6)), "float32", sharding((2, 2), "tensor", "data"))
    assert sorted((i[0].start, i[1].start) for _, i in reader.reads) == [(0, 0), (0, 3), (4, 0), (4, 3)]


@pytest.mark.parametrize("source", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_conversions(source: type, target: str) -> None:
    value = random_array((16, 8), source)
    array = load_array(ArrayReader({"w": value}), whole("w", (16, 8)), target, sharding((2,), "tensor"))
    np.testing.assert_array_equal(np.asarray(array), value.astype(np.dtype(getattr(ml_dtypes, target, target))))


def test_too_large_for_the_target_becomes_infinite() -> None:
    value = np.array([1e5, -1e30, 1.0, np.nan], np.float32)
    array = load_array(ArrayReader({"w": value}), whole("w", (4,)), "float16", sharding((1,)))
    np.testing.assert_array_equal(np.asarray(array), np.array([np.inf, -np.inf, 1.0, np.nan], np.float16))


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, ml_dtypes.float8_e4m3fn, np.int64, np.complex64])
def test_stored_dtypes_that_are_no_floats(dtype: type) -> None:
    reader = ArrayReader({"w": np.zeros((4,), dtype)})
    name = np.dtype(dtype).name
    with pytest.raises(
        CheckpointError, match=f"tensor 'w' is stored as {name}, expected float32 or float16 or bfloat16"
    ):
        load_array(reader, whole("w", (4,)), "float32", sharding((1,)))


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn"])
def test_target_dtypes_that_are_not_offered(dtype: str) -> None:
    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    with pytest.raises(
        CheckpointError, match=f"cannot load weights as {dtype}; supported: float32 or float16 or bfloat16"
    ):
        load_array(ArrayReader({"w": np.zeros(4)}), whole("w", (4,)), target, sharding((1,)))


def test_missing_and_wrong_shape() -> None:
    reader = ArrayReader({"w": np.zeros((4, 2), np.float32)})
    with pytest.raises(CheckpointError, match="tensor 'v' is not in the checkpoint"):
        load_array(reader, whole("v", (4, 2)), "float32", sharding((1,)))
    with pytest.raises(CheckpointError, match=r"tensor 'w' has shape \[4, 2\], expected \[2, 4\]"):
        load_array(reader, whole("w", (2, 4)), "float32", sharding((1,)))


def test_scalars_empty_arrays_and_single_device_shardings() -> None:
    reader = ArrayReader({"s": np.array(3.5, np.float32), "e": np.zeros((0, 4), np.float32)})
    one = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    for where in (sharding((4,)), one):
        assert float(load_array(reader, whole("s", ()), "float32", where)) == 3.5
        assert load_array(reader, whole("e", (0, 4)), "float32", where).shape == (0, 4)


def test_many_arrays_with_progress() -> None:
    reader = ArrayReader({"a": random_array((4, 4)), "b": random_array((8,), np.float16)})
    recipes = {"first": whole("a", (4, 4)), "second": whole("b", (8,)), "tied": whole("a", (4, 4))}
    seen: list[tuple[int, int]] = []
    shardings = {"first": sharding((4,), "tensor"), "second": sharding((2,)), "tied": sharding((1,))}
    dtypes = {"first": "float32", "second": "bfloat16", "tied": "float16"}
    arrays = load_arrays(reader, recipes, dtypes, shardings, lambda done, total: seen.append((done, total)))
    assert list(arrays) == ["first", "second", "tied"]
    assert seen == [(64, 112), (80, 112), (112, 112)]
    assert {name: str(array.dtype) for name, array in arrays.items()} == dtypes
    assert {name: array.sharding for name, array in arrays.items()} == shardings
    everywhere = load_arrays(reader, recipes, "float32", sharding((4,)))
    assert {str(array.dtype) for array in everywhere.values()} == {"float32"}


def test_a_damaged_file_stops_the_load(tmp_path: Path) -> None:
    save_file({"w": random_array((64, 64))}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as reader:
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(5000)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: the file ends at byte"):
            load_array(reader, whole("w", (64, 64)), "float32", sharding((4,), "tensor"))


MEMORY_PROGRAM = """
import gc, pathlib, sys
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from checkpoints import load_array, open_checkpoint, whole

jax.config.update("jax_num_cpu_devices", 4)
mesh = Mesh(np.array(jax.devices()), ("tensor",), axis_types=(AxisType.Auto,))
shardings = [NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("tensor",), (None, "tensor"))]

def status_kib(field):
    # Not getrusage: its peak starts at that of the parent process.
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

def load(reader, names):
    arrays = []
    for name in names:
        recipe = whole(name, reader.tensors[name].shape)
        arrays.append(load_array(reader, recipe, sys.argv[2], shardings[len(arrays) % 2]))
    return arrays

with open_checkpoint(sys.argv[1]) as reader:
    load(reader, ["small", "small"])
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_kib("VmRSS:")
    arrays = load(reader, ["w0", "w1", "w2"])
print(sum(array.nbytes for array in arrays) >> 10, status_kib("VmHWM:") - before)
"""


@pytest.mark.parametrize(("source", "target"), [(BF16, "bfloat16"), (np.dtype(np.float32), "bfloat16")])
def test_peak_memory_is_the_arrays_and_about_one_shard(
    tmp_path: Path, repository: Path, source: np.dtype, target: str
) -> None:
    shape = (8192, 8192)
    tensors = {f"w{number}": np.ones(shape, source) for number in range(3)}
    save_file({**tensors, "small": np.ones((64, 64), source)}, tmp_path / "model.safetensors")
    del tensors
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, str(tmp_path), target],
        capture_output=True,
        text=True,
        check=True,
        cwd=repository,
    )
    arrays_kib, grown_kib = map(int, result.stdout.split())
    shard_kib = arrays_kib // 3 // 4
    scratch_kib = 2 * loader.NUM_READ_THREADS * loader.CHUNK_BYTES >> 10
    assert arrays_kib == 3 * 128 << 10
    # A whole tensor beside the arrays would be four shards.
    slack_kib = 16 << 10
    assert grown_kib <= arrays_kib + shard_kib + scratch_kib + slack_kib, (grown_kib, arrays_kib, shard_kib)
