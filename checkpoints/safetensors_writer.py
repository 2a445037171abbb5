"""Writes safetensors checkpoints tensor by tensor: one file, or several with an index."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.safetensors_reader import DTYPES
from checkpoints.tensor_info import TensorInfo

ArrayLike = np.ndarray | jax.Array
TensorSource = ArrayLike | Callable[[], ArrayLike]
NamedTensor = tuple[str, TensorInfo, TensorSource]

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_ALIGNMENT = 8


class _Tensor(NamedTuple):
    name: str
    info: TensorInfo
    source: TensorSource


def save_safetensors(
    path: str | Path, tensors: Iterable[NamedTensor], max_shard_bytes: int = 5_000_000_000
) -> list[Path]:
    """Write `model.safetensors`, or `model-00001-of-0000N.safetensors` and an index when one file is too large.

    Files are renamed to their final names only after all of them are complete; the index comes last.

    Args:
        path: the directory; created if it does not exist.
        tensors: name, shape and dtype, and the array or a function that returns it. Functions are called one at a
            time, so that at most one tensor is in memory.
        max_shard_bytes: largest number of tensor bytes in a file; a larger tensor gets a file of its own.

    Returns:
        The files written, the index included.

    Raises:
        CheckpointError: no tensors, a duplicate name, a dtype that the format lacks, an array that does not match its
            info, or a checkpoint that already exists.
    """
    path = Path(path)
    shards = _plan_shards(path, [_Tensor(*tensor) for tensor in tensors], max_shard_bytes)
    path.mkdir(parents=True, exist_ok=True)
    if present := sorted(file.name for file in (*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json"))):
        raise CheckpointError(f"{path}: already has {', '.join(present)}; pass a directory without a checkpoint")
    count = len(shards)
    names = [
        "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        for number in range(1, count + 1)
    ]
    written = [(path / f".{name}.partial", path / name) for name in names]
    index = (path / ".model.safetensors.index.json.partial", path / "model.safetensors.index.json")
    try:
        for shard, (partial, _) in zip(shards, written, strict=True):
            _write_file(partial, shard)
        if count > 1:
            _write_synced(index[0], [_index_text(shards, names)])
            written.append(index)
        for partial, final in written:
            partial.rename(final)
    finally:
        for partial, _ in (*written, index):
            partial.unlink(missing_ok=True)
    return [final for _, final in written]


def _plan_shards(path: Path, tensors: list[_Tensor], max_shard_bytes: int) -> list[list[_Tensor]]:
    """Return the tensors of each file, in the given order."""
    if not tensors:
        raise CheckpointError(f"{path}: no tensors to save")
    seen: set[str] = set()
    shards: list[list[_Tensor]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        if tensor.name in seen or tensor.name == "__metadata__":
            raise CheckpointError(f"{path}: tensor {tensor.name!r} is a duplicate or a reserved name")
        if tensor.info.dtype not in _DTYPE_NAMES:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} has dtype {tensor.info.dtype}, which safetensors does not support"
            )
        seen.add(tensor.name)
        if tensor.info.num_bytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.info.num_bytes
    return shards


def _index_text(shards: Sequence[Sequence[_Tensor]], names: Sequence[str]) -> bytes:
    weight_map = {tensor.name: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
    total_bytes = sum(tensor.info.num_bytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode() + b"\n"


def _write_file(file: Path, tensors: Sequence[_Tensor]) -> None:
    # Largest elements first, so that every tensor starts at a multiple of its element size.
    ordered = sorted(tensors, key=lambda tensor: -tensor.info.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, info, _ in ordered:
        offsets = [position, position + info.num_bytes]
        header[name] = {"dtype": _DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": offsets}
        position += info.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    _write_synced(file, (head, *(_Pending(file, tensor) for tensor in ordered)))


class _Pending(NamedTuple):
    """A tensor whose bytes are produced when it is written."""

    file: Path
    tensor: _Tensor

    def to_bytes(self) -> memoryview:
        name, info, source = self.tensor
        array = np.asarray(source() if callable(source) else source)
        if array.shape != info.shape or array.dtype != info.dtype:
            raise CheckpointError(
                f"{self.file.parent}: tensor {name!r} is {array.dtype} {list(array.shape)}, but was declared as "
                f"{info.dtype} {list(info.shape)}"
            )
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_synced(file: Path, parts: Iterable[bytes | _Pending]) -> None:
    with file.open("wb") as stream:
        for part in parts:
            stream.write(part.to_bytes() if isinstance(part, _Pending) else part)
        stream.flush()
        os.fsync(stream.fileno())
