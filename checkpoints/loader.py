"""Loads checkpoint tensors directly into sharded JAX arrays, reading each device's shard by byte range.

Host memory beyond the arrays is one shard of one array (on CPU the shard's buffer becomes the device's buffer without a
copy) plus the chunks in flight, a few times 2 MiB.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from checkpoints.errors import CheckpointError
from checkpoints.reader import CheckpointReader
from checkpoints.recipe import Piece, TensorRecipe
from checkpoints.recipe_check import check_recipes as check_recipes
from checkpoints.tensor_info import Bounds, Index, TensorInfo, index_bounds

CHUNK_BYTES = 2 << 20
NUM_READ_THREADS = 4
ALIGNMENT_BYTES = 64

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SOURCE_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), _BFLOAT16, np.dtype(np.float64))
TARGET_DTYPES = SOURCE_DTYPES[:3]
_RECORDS = np.dtype(np.uint8)  # of quantized tensors, which are not converted


class _Copy(NamedTuple):
    """One chunk to read, and its position in the shard."""

    source: str
    source_index: Index
    target_index: Index
    is_transposed: bool


class Stored(NamedTuple):
    """How a parameter is stored when its arrays differ from the array that the recipe describes.

    Attributes:
        convert: Convert a device's shard of the recipe's array, between bounds, to its shard of each stored array, on
            the host.
        arrays: Shape and sharding of each stored array, by name, in the order of ``convert``. Their sharding must give
            each device the part that corresponds to its shard of the recipe's array.
    """

    convert: Callable[[np.ndarray, Bounds], Sequence[np.ndarray]]
    arrays: Mapping[str, jax.ShapeDtypeStruct]


def load_array(
    reader: CheckpointReader, recipe: TensorRecipe, dtype: DTypeLike, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Load one array.

    A shard that several local devices hold is read once. Values are converted chunk by chunk with NumPy's rules:
    rounded to nearest, and infinite when too large for the target.

    Args:
        reader: the checkpoint.
        recipe: the pieces of the array.
        dtype: float32, float16 or bfloat16; stored tensors may be these or float64.
        sharding: sharding of the array; only shards of this process's devices are read.

    Raises:
        CheckpointError: a source tensor is missing or has another shape, a dtype is not one of those, or reading fails.
    """
    target = _checked_target(dtype)
    as_is = Stored(lambda part, _: (part,), {"": jax.ShapeDtypeStruct(recipe.shape, target, sharding=sharding)})
    return _load(reader, recipe, target, sharding, as_is)[""]


def load_arrays(
    reader: CheckpointReader,
    recipes: Mapping[str, TensorRecipe],
    dtypes: Mapping[str, DTypeLike] | DTypeLike,
    shardings: Mapping[str, jax.sharding.Sharding] | jax.sharding.Sharding,
    progress: Callable[[int, int], None] | None = None,
    stored: Mapping[str, Stored] | None = None,
) -> dict[str, jax.Array]:
    """Load all arrays of a model, one after the other.

    Args:
        reader: the checkpoint; call `check_recipes` first to report every mismatch in one error.
        recipes: by parameter name.
        dtypes: one for all, or one for each parameter.
        shardings: one for all, or one for each parameter.
        progress: called after each array with bytes loaded and total bytes (of the global arrays).
        stored: storage of the parameters that are not stored as their recipe describes, by name.

    Returns:
        The arrays by name, in the order of `recipes`; a parameter in `stored` is replaced by its stored arrays.

    Raises:
        CheckpointError: as for `load_array`.
    """
    targets = {name: _checked_target(dtypes[name] if isinstance(dtypes, Mapping) else dtypes) for name in recipes}
    sizes = {name: recipe.num_elements * targets[name].itemsize for name, recipe in recipes.items()}
    total_bytes = sum(sizes.values())
    done_bytes = 0
    arrays: dict[str, jax.Array] = {}
    for name, recipe in recipes.items():
        sharding = shardings[name] if isinstance(shardings, Mapping) else shardings
        if stored is not None and name in stored:
            arrays |= _load(reader, recipe, targets[name], sharding, stored[name])
        else:
            arrays[name] = load_array(reader, recipe, targets[name], sharding)
        done_bytes += sizes[name]
        if progress is not None:
            progress(done_bytes, total_bytes)
    return arrays


def _load(
    reader: CheckpointReader, recipe: TensorRecipe, target: np.dtype, sharding: jax.sharding.Sharding, stored: Stored
) -> dict[str, jax.Array]:
    """Load the arrays that store one parameter."""
    _check_sources(reader, recipe, target)
    owners: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(recipe.shape).items():
        bounds = index_bounds(() if index is None else index, recipe.shape)
        owners.setdefault(bounds, []).append(device)
    shards: dict[str, list[jax.Array]] = {name: [] for name in stored.arrays}
    for bounds, devices in owners.items():
        parts = stored.convert(read_shard(reader, recipe, bounds, target), bounds)
        for name, part in zip(stored.arrays, parts, strict=True):
            shards[name] += jax.block_until_ready([jax.device_put(part, device) for device in devices])
    return {
        name: jax.make_array_from_single_device_arrays(struct.shape, struct.sharding, shards[name])
        for name, struct in stored.arrays.items()
    }


def _checked_target(dtype: DTypeLike) -> np.dtype:
    target = np.dtype(dtype)
    if target not in (*TARGET_DTYPES, _RECORDS):
        raise CheckpointError(f"cannot load weights as {target}; supported: {_names(TARGET_DTYPES)}")
    return target


def _check_sources(reader: CheckpointReader, recipe: TensorRecipe, target: np.dtype) -> None:
    for name, shape in recipe.sources:
        info = reader.tensors.get(name)
        if info is None:
            raise CheckpointError(f"tensor {name!r} is not in the checkpoint")
        if info.shape != shape:
            raise CheckpointError(f"tensor {name!r} has shape {list(info.shape)}, expected {list(shape)}")
        expected = (_RECORDS,) if target == _RECORDS else SOURCE_DTYPES
        if info.dtype not in expected:
            raise CheckpointError(f"tensor {name!r} is stored as {info.dtype}, expected {_names(expected)}")


def _names(dtypes: tuple[np.dtype, ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)


def read_shard(reader: CheckpointReader, recipe: TensorRecipe, bounds: Bounds, dtype: np.dtype) -> np.ndarray:
    """Read the part of an array between `bounds` and convert it, on the host.

    Args:
        reader: the checkpoint.
        recipe: the pieces of the array.
        bounds: start and stop along each axis of the array.
        dtype: of the result, whose memory XLA:CPU can use as a device buffer.
    """
    shard = _aligned_zeros([stop - start for start, stop in bounds], dtype)

    def copy(chunk: _Copy) -> None:
        target = shard[(*chunk.target_index, ...)]
        target = target.T if chunk.is_transposed else target
        target = np.expand_dims(target, tuple(range(len(chunk.source_index) - target.ndim)))
        reader.read_into(chunk.source, chunk.source_index, target)

    for piece in recipe.pieces:
        chunks = _chunks(piece, bounds, reader.tensors[piece.source])
        if len(chunks) == 1:
            copy(chunks[0])
        elif chunks:
            with ThreadPoolExecutor(min(NUM_READ_THREADS, len(chunks))) as pool:
                list(pool.map(copy, chunks))
    return shard


def _chunks(piece: Piece, bounds: Bounds, source: TensorInfo) -> list[_Copy]:
    """Return the copies, each of at most about 2 MiB, for the part of a piece between `bounds`."""
    starts = [max(begin, start) for begin, (start, _) in zip(piece.target_start, bounds, strict=True)]
    stops = [
        min(begin + length, stop)
        for begin, length, (_, stop) in zip(piece.target_start, piece.shape, bounds, strict=True)
    ]
    lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
    if any(length <= 0 for length in lengths):
        return []
    extra = len(piece.source_start) - len(piece.shape)
    leading = tuple(slice(index, index + 1) for index in piece.source_start[:extra])
    order = -1 if piece.is_transposed else 1  # boxes are tiled in the order of the source's axes
    skipped = [start - target for start, target in zip(starts, piece.target_start, strict=True)][::order]
    sources = [begin + skip for begin, skip in zip(piece.source_start[extra:], skipped, strict=True)]
    targets = [start - origin for start, (origin, _) in zip(starts, bounds, strict=True)][::order]
    return [
        _Copy(
            piece.source,
            leading + _box(sources, offsets, steps),
            _box(targets, offsets, steps)[::order],
            piece.is_transposed,
        )
        for offsets, steps in _tiles(lengths[::order], source)
    ]


def _tiles(lengths: list[int], source: TensorInfo) -> list[tuple[list[int], list[int]]]:
    """Return offsets and lengths of tiles of about 2 MiB; leading axes are cut and trailing ones stay whole, or the
    other way round if the storage is column-major."""
    units = [1 if at else source.unit for at in reversed(range(len(lengths)))]
    if not source.is_column_major:
        return _row_tiles(lengths, units, source.dtype.itemsize)
    itemsize = max(1, source.dtype.itemsize // 4)  # wider tiles, since each is read in as many pieces as it has rows
    return [(offsets[::-1], steps[::-1]) for offsets, steps in _row_tiles(lengths[::-1], units[::-1], itemsize)]


def _row_tiles(lengths: list[int], units: list[int], itemsize: int) -> list[tuple[list[int], list[int]]]:
    """Return tiles of which the first axes are cut, each at multiples of its unit."""
    steps = list(lengths)
    for axis, unit in enumerate(units):
        rest_bytes = math.prod(lengths[axis + 1 :]) * itemsize
        steps[axis] = min(lengths[axis], max(unit, CHUNK_BYTES // rest_bytes // unit * unit))
        if steps[axis] > unit or rest_bytes * unit <= CHUNK_BYTES:
            break
    grids = [range(0, length, step) for length, step in zip(lengths, steps, strict=True)]
    return [
        (list(offsets), [min(step, length - at) for at, step, length in zip(offsets, steps, lengths, strict=True)])
        for offsets in itertools.product(*grids)
    ]


def _box(origin: list[int], offsets: list[int], lengths: list[int]) -> Index:
    return tuple(
        slice(start + offset, start + offset + length)
        for start, offset, length in zip(origin, offsets, lengths, strict=True)
    )


def _aligned_zeros(shape: list[int], dtype: np.dtype) -> np.ndarray:
    """Allocate zeros at an address that XLA:CPU can use as a device buffer without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
