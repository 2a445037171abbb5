"""The interface of all checkpoint readers, and `open_checkpoint`, which selects the reader for a directory or file."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.orbax_io import OrbaxReader, find_orbax
from checkpoints.safetensors_reader import SafetensorsReader
from checkpoints.tensor_info import Index
from checkpoints.tensor_info import TensorInfo as TensorInfo
from checkpoints.torch_reader import TorchReader

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

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        ...

    def __enter__(self) -> "CheckpointReader":
        """Return the reader."""
        ...

    def __exit__(self, *details: object) -> None:
        """Close the reader."""
        ...


class ShardedReader:
    """Reads several files as one checkpoint.

    Args:
        directory: the folder of the files, for messages.
        shards: readers by file name; closed with this reader.
        weight_map: the file of each tensor, from an index file; None without one. Tensors that are in the files but
            not in the index are included, so that a stale index is reported as unexpected tensors.

    Raises:
        CheckpointError: the index names tensors missing from their files, or two files have the same tensor.
    """

    def __init__(
        self, directory: Path, shards: Mapping[str, CheckpointReader], weight_map: Mapping[str, str] | None
    ) -> None:
        self._shards = shards
        self._homes: dict[str, CheckpointReader] = {}
        stated = weight_map or {}
        absent = [name for name, file in stated.items() if name not in shards[file].tensors]
        if absent:
            lines = [f"{name} (in {stated[name]})" for name in absent]
            raise CheckpointError(f"{directory}: the index lists tensors that are not in their files: {_some(lines)}")
        for name, file in stated.items():
            self._homes[name] = shards[file]
        for file, shard in shards.items():
            for name in shard.tensors:
                if name not in self._homes:
                    self._homes[name] = shard
                elif name not in stated:
                    raise CheckpointError(f"{directory}: tensor {name!r} is in {file} and in another file")
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

    def __enter__(self) -> "ShardedReader":
        """Return the reader."""
        return self

    def __exit__(self, *details: object) -> None:
        """Close all files."""
        self.close()


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """Open a checkpoint directory, or a single `.safetensors` or `.bin` file.

    In a directory the first of these is used: `model.safetensors`, `model.safetensors.index.json`, an Orbax
    checkpoint (the directory itself or its folder `orbax`), other `*.safetensors` files without an index (Mistral's
    `consolidated*` left out), `pytorch_model.bin`, `pytorch_model.bin.index.json`.

    Args:
        path: the directory or file.

    Raises:
        CheckpointError: none of these exists, or the one found is damaged.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix not in (".safetensors", ".bin"):
            raise CheckpointError(f"{path}: expected a directory, a .safetensors or a .bin file")
        return SafetensorsReader(path) if path.suffix == ".safetensors" else TorchReader(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    if (path / "model.safetensors").exists():
        return SafetensorsReader(path / "model.safetensors")
    if (path / "model.safetensors.index.json").exists():
        return _open_indexed(path, "model.safetensors.index.json", SafetensorsReader)
    orbax = find_orbax(path)
    if orbax is not None:
        return OrbaxReader(orbax)
    loose = sorted(file.name for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if loose:
        return _open_shards(path, loose, None, SafetensorsReader)
    if (path / "pytorch_model.bin").exists():
        return TorchReader(path / "pytorch_model.bin")
    if (path / "pytorch_model.bin.index.json").exists():
        return _open_indexed(path, "pytorch_model.bin.index.json", TorchReader)
    raise CheckpointError(
        f"{path}: no weights found; looked for model.safetensors, model.safetensors.index.json, *.safetensors, an "
        "Orbax checkpoint, pytorch_model.bin and pytorch_model.bin.index.json"
    )


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


def _open_indexed(directory: Path, index_name: str, open_shard: Callable[[Path], CheckpointReader]) -> CheckpointReader:
    weight_map = read_index(directory / index_name)
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (directory / file).exists()]
    if absent:
        raise CheckpointError(f"{directory / index_name}: lists files that do not exist: {_some(absent)}")
    return _open_shards(directory, files, weight_map, open_shard)


def _open_shards(
    directory: Path,
    files: list[str],
    weight_map: Mapping[str, str] | None,
    open_shard: Callable[[Path], CheckpointReader],
) -> CheckpointReader:
    shards: dict[str, CheckpointReader] = {}
    try:
        for file in files:
            shards[file] = open_shard(directory / file)
        return ShardedReader(directory, shards, weight_map)
    except BaseException:
        for shard in shards.values():
            shard.close()
        raise


def _some(names: list[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"
