"""What a format of quantized weights provides: one file each, with one line in ``checkpoints.quantized.registry``."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.planes import Planes
from checkpoints.quantized.records import Records
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import TensorInfo


class Box(NamedTuple):
    """A box of a logical tensor: an index of each leading axis, and ranges of rows and columns of the matrix there."""

    leading: tuple[int, ...]
    rows: slice
    columns: slice


class QuantizedTensor(NamedTuple):
    """A logical tensor that quantized ones stand for.

    Attributes:
        shape: Its shape, as the model's family expects it.
        stored: Names of the stored tensors.
        planes: Reads a box, not decoded.
        is_column_major: Whether columns are contiguous in the file, so that cutting along them is cheap.
        check: Checks what is read only when boxes are, such as the order of groups; None: there is nothing.
        records: Returns what its rows of records hold; None, or a function that does: it is only read decoded.
    """

    shape: tuple[int, ...]
    stored: tuple[str, ...]
    planes: Callable[[Box], Planes]
    is_column_major: bool = False
    check: Callable[[], object] | None = None
    records: Callable[[], Records | None] | None = None


@runtime_checkable
class Format(Protocol):
    """One format, for the settings of one checkpoint."""

    @property
    def name(self) -> str:
        """Name of the format, for logs."""
        ...

    @property
    def quantizes_activations(self) -> bool:
        """Whether the tool that wrote the checkpoint quantizes activations too, which is not done here."""
        ...

    @property
    def ignored(self) -> re.Pattern[str]:
        """Names of stored tensors that do not change the weights, such as scales of activations."""
        ...

    def logical_names(self, tensors: Mapping[str, TensorInfo | None]) -> dict[str, tuple[str, ...]]:
        """Return the stored tensors of each quantized logical tensor.

        Args:
            tensors: The stored tensors; None where only the name is known, from an index.
        """
        ...

    def open(self, name: str, stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
        """Return a logical tensor.

        Args:
            name: The logical tensor.
            stored: What ``logical_names`` has for it.
            reader: The stored tensors.

        Raises:
            CheckpointError: Stored tensors are missing or contradict the settings or each other.
        """
        ...


def info_of(reader: CheckpointReader, format_name: str, stored: str) -> TensorInfo:
    """Return shape and dtype of a stored tensor.

    Raises:
        CheckpointError: It is missing.
    """
    info = reader.tensors.get(stored)
    if info is None:
        raise CheckpointError(f"tensor {stored!r} is missing, which weights in the format {format_name} need")
    return info


def check_tensor(
    reader: CheckpointReader,
    format_name: str,
    stored: str,
    shape: tuple[int, ...],
    dtypes: Collection[np.dtype],
    why: str,
) -> None:
    """Check shape and dtype of a stored tensor.

    Args:
        reader: The stored tensors.
        format_name: For messages.
        stored: Name of the tensor.
        shape: Expected shape.
        dtypes: Expected dtypes.
        why: Where the shape follows from, for the message.

    Raises:
        CheckpointError: The tensor is missing, or has another shape or dtype.
    """
    info = info_of(reader, format_name, stored)
    if info.shape != shape:
        raise CheckpointError(
            f"tensor {stored!r} ({format_name}) has shape {list(info.shape)}, expected {list(shape)}: {why}"
        )
    if info.dtype not in dtypes:
        names = " or ".join(sorted(str(dtype) for dtype in dtypes))
        raise CheckpointError(f"tensor {stored!r} ({format_name}) is stored as {info.dtype}, expected {names}")


def read_number(reader: CheckpointReader, format_name: str, stored: str) -> np.ndarray:
    """Return the float32 number that a stored tensor is, an array without axes.

    Raises:
        CheckpointError: The tensor is missing, or has more than one element.
    """
    shape = info_of(reader, format_name, stored).shape
    if math.prod(shape) != 1:
        raise CheckpointError(f"tensor {stored!r} ({format_name}) has shape {list(shape)}, expected one number")
    return reader.read(stored, (slice(0, 1),) * len(shape)).astype(np.float32).reshape(())


def read_groups(reader: CheckpointReader, format_name: str, stored: str, num_groups: int) -> np.ndarray:
    """Return the group of each input, which a stored tensor tells.

    Raises:
        CheckpointError: There is no such group.
    """
    found = reader.read(stored, (slice(0, info_of(reader, format_name, stored).shape[0]),))
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < num_groups:
        raise CheckpointError(
            f"tensor {stored!r} ({format_name}) has groups from {found.min()} to {found.max()}, expected 0 to "
            f"{num_groups - 1}"
        )
    return found


def group_by_suffix(stored: Collection[str], suffixes: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Return stored names by module and suffix: ``{"model.q_proj": {"qweight": "model.q_proj.qweight", …}}``."""
    modules: dict[str, dict[str, str]] = {}
    for name in stored:
        module, _, suffix = name.rpartition(".")
        if suffix in suffixes:
            modules.setdefault(module, {})[suffix] = name
    return modules


def group_indices(start: int, stop: int, size: int) -> tuple[np.ndarray, slice]:
    """Return the group of each element of a range, counted from the first group, and the slice of groups to read."""
    first, last = start // size, -(-stop // size)
    return np.arange(start, stop) // size - first, slice(first, last)
