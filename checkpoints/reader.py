"""The interface of all checkpoint readers, and a reader of several files as one checkpoint."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.tensor_info import Index
from checkpoints.tensor_info import TensorInfo as TensorInfo

MAX_INDEX_BYTES = 256 << 20


@runtime_checkable
class CheckpointReader(Protocol):
    """Named tensors that are read box by box; a context manager that closes its files."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor (one slice of step 1 for each axis) as a new contiguous array."""
        ...

    def read_into(self, name: str, index: Index, result: np.ndarray) -> None:
        """Read a box of a tensor into an array of its shape, rounded once to the array's dtype."""
        ...

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        ...

    def __enter__(self) -> "CheckpointReader":
        """Return the reader."""
        ...

    def __exit__(self, *details: object) -> None:
        """Close the reader."""
        ...


class BaseReader(ABC):
    """The base of readers: a context manager that closes its files."""

    @abstractmethod
    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor (one slice of step 1 for each axis) as a new array."""

    def read_into(self, name: str, index: Index, result: np.ndarray) -> None:
        """Read a box of a tensor into an array, converted with NumPy's rules: rounded, and infinite when too large.

        Args:
            name: The tensor.
            index: One slice of step 1 for each axis.
            result: An array of the box's shape.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            result[...] = self.read(name, index)

    @abstractmethod
    def close(self) -> None:
        """Close the files; a second call does nothing."""

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(self, *details: object) -> None:
        """Close the files."""
        self.close()


class ShardedReader(BaseReader):
    """Reads several files as one checkpoint.

    Args:
        directory: the folder of the files, for messages.
        shards: readers by file name; closed with this reader.
        weight_map: the file of each tensor, from an index file; None without one. Tensors that are in the files but
            not in the index are included, so that a stale index is reported as unexpected tensors.

    Raises:
        CheckpointError: the index names tensors missing from their files, or two files have the same tensor; then the
            files are closed.
    """

    def __init__(
        self, directory: Path, shards: Mapping[str, CheckpointReader], weight_map: Mapping[str, str] | None
    ) -> None:
        self._shards = shards
        try:
            self._homes = _homes(directory, shards, weight_map or {})
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = {name: home.tensors[name] for name, home in self._homes.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new contiguous array.

        Args:
            name: the tensor.
            index: one slice of step 1 for each axis.
        """
        return self._homes[name].read(name, index)

    def close(self) -> None:
        """Close all files."""
        for shard in self._shards.values():
            shard.close()


def _homes(
    directory: Path, shards: Mapping[str, CheckpointReader], stated: Mapping[str, str]
) -> dict[str, CheckpointReader]:
    """Return the file of each tensor."""
    absent = [f"{name} (in {file})" for name, file in stated.items() if name not in shards[file].tensors]
    if absent:
        raise CheckpointError(f"{directory}: the index lists tensors that are not in their files: {_some(absent)}")
    homes = {name: shards[file] for name, file in stated.items()}
    for file, shard in shards.items():
        for name in shard.tensors:
            if name not in homes:
                homes[name] = shard
            elif name not in stated:
                raise CheckpointError(f"{directory}: tensor {name!r} is in {file} and in another file")
    return homes


def read_index(path: str | Path) -> dict[str, str]:
    """Return the `weight_map` of an index file: tensor name to file name.

    Args:
        path: `model.safetensors.index.json` or `pytorch_model.bin.index.json`; the files it names need not exist.

    Raises:
        CheckpointError: unreadable, not an index, or a file name is a path.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_INDEX_BYTES} bytes, the limit for an index file")
        index = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected an object with a weight_map from tensor names to file names")
    for file in weight_map.values():
        if not isinstance(file, str) or file in ("", ".", "..") or any(mark in file for mark in "/\\\0"):
            raise CheckpointError(
                f"{path}: weight_map names {file!r}, expected the name of a file in the same directory"
            )
    return weight_map


def open_indexed(directory: Path, index_name: str, open_file: Callable[[Path], CheckpointReader]) -> CheckpointReader:
    """Open the files that an index lists.

    Raises:
        CheckpointError: the index cannot be read, or a file or tensor that it lists does not exist.
    """
    weight_map = read_index(directory / index_name)
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (directory / file).exists()]
    if absent:
        raise CheckpointError(f"{directory / index_name}: lists files that do not exist: {_some(absent)}")
    shards = open_shards(directory, files, open_file)
    return ShardedReader(directory, shards, weight_map)


def open_shards(
    directory: Path, files: Sequence[str], open_file: Callable[[Path], CheckpointReader]
) -> dict[str, CheckpointReader]:
    """Open several files; if one cannot be opened, close the others."""
    shards: dict[str, CheckpointReader] = {}
    try:
        for file in files:
            shards[file] = open_file(directory / file)
    except BaseException:
        for shard in shards.values():
            shard.close()
        raise
    return shards


def _some(names: list[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"
