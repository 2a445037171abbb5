"""Orbax checkpoints whose leaves have the tensor names of Hugging Face.

Arrays are saved through Orbax, so that other tools can restore them, and read through tensorstore, Orbax's storage
library, which can read any box of an array: a checkpoint saved from one mesh loads onto another. Both packages are
imported on first use.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.reader import BaseReader
from checkpoints.tensor_info import Index, TensorInfo, index_bounds

CHUNK_BYTES = 1 << 20
CACHE_BYTES = 256 << 20
"""Chunks that are kept: of a tensor read part by part, one is part of many."""
ORBAX_FOLDER = "orbax"
_TREE_METADATA = "_METADATA"
_CACHE = "cache_pool#chunks"
_ITEM_FOLDERS = ("", "state", "pytree", "default")


def find_orbax(path: Path) -> Path | None:
    """Return the Orbax checkpoint in a directory: the directory itself, its folder `orbax`, or None.

    Args:
        path: a directory.
    """
    for candidate in (path, path / ORBAX_FOLDER):
        if (candidate / "_CHECKPOINT_METADATA").is_file() or (candidate / _TREE_METADATA).is_file():
            return candidate
    return None


def save_orbax(path: str | Path, arrays: Mapping[str, jax.Array]) -> None:
    """Save arrays, sharded as they are, as an Orbax checkpoint.

    Args:
        path: the directory to create; it appears only after everything is written.
        arrays: by tensor name; any shapes, dtypes and shardings.

    Raises:
        CheckpointError: the path exists, or `arrays` is empty.
    """
    path = Path(path).absolute()
    if path.exists():
        raise CheckpointError(f"{path}: already exists; pass a path that does not exist")
    if not arrays:
        raise CheckpointError(f"{path}: no arrays to save")
    from orbax.checkpoint import v1 as ocp

    with _saving_context(ocp):
        ocp.save(str(path), dict(arrays))


def save_orbax_streamed(path: str | Path, groups: Iterable[Mapping[str, jax.Array | np.ndarray]]) -> None:
    """Save arrays group by group as one Orbax checkpoint, holding one group in memory at a time.

    Args:
        path: the directory to create; it appears only after everything is written.
        groups: arrays by tensor name; names must be unique.

    Raises:
        CheckpointError: the path exists, or there are no arrays.
    """
    path = Path(path).absolute()
    if path.exists():
        raise CheckpointError(f"{path}: already exists; pass a path that does not exist")
    from orbax.checkpoint import v1 as ocp

    is_empty = True
    with _saving_context(ocp):
        for group in groups:
            ocp.partial.save(str(path), dict(group))
            is_empty = False
        if is_empty:
            raise CheckpointError(f"{path}: no arrays to save")
        ocp.partial.finalize(str(path))


def _saving_context(ocp: Any) -> Any:
    """Return an Orbax context whose chunks are small enough that reading a box reads little else."""
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    return context


class OrbaxReader(BaseReader):
    """Reads an Orbax checkpoint; nested trees give names joined by dots.

    Args:
        path: the checkpoint's directory, saved by `save_orbax`, by Orbax's v1 API or by its StandardCheckpointer.

    Raises:
        CheckpointError: not a complete checkpoint, or its metadata or an array cannot be read.
    """

    def __init__(self, path: Path) -> None:
        import tensorstore

        self._path = path
        self._tree = _find_tree(path)
        metadata = _read_metadata(self._tree / _TREE_METADATA)
        driver = "zarr3" if metadata.get("use_zarr3", False) else "zarr"
        is_ocdbt = bool(metadata.get("use_ocdbt", True))
        context = tensorstore.Context({_CACHE: {"total_bytes_limit": CACHE_BYTES}})
        futures = {
            name: tensorstore.open(_spec(self._tree, name, driver, is_ocdbt), read=True, open=True, context=context)
            for name in _leaf_names(self._tree, metadata)
        }
        self._stores: dict[str, Any] = {}
        for name, future in futures.items():
            try:
                self._stores[name] = future.result()
            except (ValueError, OSError) as error:
                raise CheckpointError(f"{path}: tensor {name!r} cannot be opened: {error}") from error
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(store.shape), np.dtype(store.dtype.numpy_dtype))
            for name, store in self._stores.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor as a new contiguous array.

        Args:
            name: the tensor.
            index: one slice of step 1 for each axis.

        Raises:
            CheckpointError: its data is missing or damaged.
        """
        bounds = index_bounds(index, self.tensors[name].shape)
        try:
            box = self._stores[name][tuple(slice(start, stop) for start, stop in bounds)]
            return np.ascontiguousarray(box.read().result()).reshape([stop - start for start, stop in bounds])
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{self._path}: tensor {name!r} cannot be read: {error}") from error

    def close(self) -> None:
        """Release the array stores."""
        self._stores.clear()


def find_trees(path: Path) -> list[Path]:
    """Return the folders of a checkpoint that have a tree of arrays."""
    return [path / folder for folder in _ITEM_FOLDERS if (path / folder / _TREE_METADATA).is_file()]


def _find_tree(path: Path) -> Path:
    for tree in find_trees(path):
        return tree
    raise CheckpointError(
        f"{path}: not a complete Orbax checkpoint of arrays: found no {_TREE_METADATA} in it or in "
        f"{', '.join(_ITEM_FOLDERS[1:])}"
    )


def _read_metadata(file: Path) -> dict[str, Any]:
    try:
        metadata = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get("tree_metadata"), dict):
        raise CheckpointError(f"{file}: expected an object with tree_metadata")
    return metadata


def _leaf_names(tree: Path, metadata: Mapping[str, Any]) -> list[str]:
    try:
        leaves = [leaf["key_metadata"] for leaf in metadata["tree_metadata"].values()]
        return [".".join(str(step["key"]) for step in steps) for steps in leaves]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{tree / _TREE_METADATA}: a leaf has no key_metadata") from error


def _spec(tree: Path, name: str, driver: str, is_ocdbt: bool) -> dict[str, Any]:
    root = str(tree.absolute())
    if is_ocdbt:
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}, "path": f"{name}/"}
    else:
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise CheckpointError(f"{tree}: tensor name {name!r} points outside the checkpoint")
        store = {"driver": "file", "path": f"{root}/{name}/"}
    return {"driver": driver, "kvstore": store, "cache_pool": _CACHE}
