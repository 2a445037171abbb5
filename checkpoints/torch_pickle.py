"""Interprets the pickle inside a torch checkpoint: tensors over storages, in plain dictionaries.

Globals that a tensor file does not need are rejected as soon as the pickle refers to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.pickle_machine import Interpretation, PickleError, PickleMachine, checked

MAX_RANK = 32


class StorageRef(NamedTuple):
    """A storage in the pickle: its key in the archive, element type and length in elements."""

    key: str
    dtype: np.dtype
    num_elements: int


class TensorRef(NamedTuple):
    """A tensor over a storage; offset and strides are counted in elements of `dtype`."""

    storage: StorageRef
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Global:
    """A global that tensor files may refer to."""

    module: str
    name: str


_STORAGE_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "DoubleStorage": np.dtype(np.float64),
        "FloatStorage": np.dtype(np.float32),
        "HalfStorage": np.dtype(np.float16),
        "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
        "LongStorage": np.dtype(np.int64),
        "IntStorage": np.dtype(np.int32),
        "ShortStorage": np.dtype(np.int16),
        "CharStorage": np.dtype(np.int8),
        "ByteStorage": np.dtype(np.uint8),
        "BoolStorage": np.dtype(np.bool_),
    }
)
# Dtypes newer than the storage classes: the storage is untyped bytes and the tensor names its dtype.
_TORCH_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
        "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
        "uint16": np.dtype(np.uint16),
        "uint32": np.dtype(np.uint32),
        "uint64": np.dtype(np.uint64),
    }
)
_ORDERED_DICT = _Global("collections", "OrderedDict")
_UNTYPED = _Global("torch.storage", "UntypedStorage")
_PARAMETER = _Global("torch._utils", "_rebuild_parameter")
_UNTYPED_TENSOR = _Global("torch._utils", "_rebuild_tensor_v3")
_TENSORS = (_Global("torch._utils", "_rebuild_tensor"), _Global("torch._utils", "_rebuild_tensor_v2"))
_STORAGES = {_UNTYPED: np.dtype(np.uint8), **{_Global("torch", name): dtype for name, dtype in _STORAGE_DTYPES.items()}}
_DTYPES = {_Global("torch", name): dtype for name, dtype in _TORCH_DTYPES.items()}
_ALLOWED = frozenset({_ORDERED_DICT, _PARAMETER, _UNTYPED_TENSOR, *_TENSORS, *_STORAGES, *_DTYPES})


def read_tensor_table(pickled: bytes, where: str) -> dict[str, TensorRef]:
    """Return the tensors of a pickled state dict, by name.

    Args:
        pickled: the bytes of the pickle.
        where: the file, for error messages.

    Raises:
        CheckpointError: the pickle refers to a global other than tensors and containers, is damaged, or is not a
            dictionary from names to tensors.
    """
    try:
        table = PickleMachine(Interpretation(_find, _load_storage, _call)).run(pickled)
    except PickleError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}: expected a dictionary of tensors, the pickle holds a {type(table).__name__}")
    for name, value in table.items():
        if not isinstance(name, str):
            raise CheckpointError(
                f"{where}: expected a dictionary of tensors by name, got a key of type {type(name).__name__}"
            )
        if not isinstance(value, TensorRef):
            raise CheckpointError(
                f"{where}: expected a dictionary of tensors, but entry {name[:80]!r} is a {type(value).__name__}"
            )
    return table


def _find(module: str, name: str) -> _Global:
    found = _Global(module, name)
    if found not in _ALLOWED:
        raise PickleError(
            f"pickle refers to '{module[:80]}.{name[:80]}', which is not a tensor or a container; nothing was executed"
        )
    return found


def _load_storage(persistent_id: Any) -> StorageRef:
    if not isinstance(persistent_id, tuple) or len(persistent_id) != 5:
        raise PickleError("the pickle is damaged: a persistent id is not a storage")
    kind, storage, key, _, num_elements = persistent_id
    if kind != "storage" or not isinstance(storage, _Global) or storage not in _STORAGES:
        raise PickleError("the pickle is damaged: a persistent id is not a storage")
    return StorageRef(checked(key, str), _STORAGES[storage], _count(num_elements))


def _call(function: Any, arguments: tuple[Any, ...]) -> dict[Any, Any] | TensorRef:
    if function == _ORDERED_DICT and not arguments:
        return {}
    if function == _PARAMETER and arguments:
        return checked(arguments[0], TensorRef)
    if function in _TENSORS and len(arguments) >= 4:
        return _tensor(checked(arguments[0], StorageRef).dtype, arguments)
    if function == _UNTYPED_TENSOR and len(arguments) >= 7:
        return _tensor(_DTYPES[checked(arguments[6], _Global)], arguments)
    called = f"{function.module}.{function.name}" if isinstance(function, _Global) else f"a {type(function).__name__}"
    raise PickleError(f"the pickle is damaged: a call of {called} with {len(arguments)} arguments")


def _tensor(dtype: np.dtype, arguments: tuple[Any, ...]) -> TensorRef:
    """Return a tensor from storage, offset, size, strides and the rest of torch's arguments."""
    storage, offset, shape, strides = arguments[:4]
    if len(checked(shape, tuple)) != len(checked(strides, tuple)) or len(shape) > MAX_RANK:
        raise PickleError(f"the pickle is damaged: a tensor of rank {len(shape)} with {len(strides)} strides")
    counted_shape = tuple(_count(length) for length in shape)
    counted_strides = tuple(_count(stride) for stride in strides)
    return TensorRef(checked(storage, StorageRef), dtype, _count(offset), counted_shape, counted_strides)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise PickleError("the pickle is damaged: a size, stride or offset is not an integer >= 0")
    return value
