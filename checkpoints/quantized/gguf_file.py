"""Reads GGUF files: one, or the parts of a split one (``NAME-00001-of-0000N.gguf``), as named tensors of bytes."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.file_ranges import StridedLayout, full_layout
from checkpoints.file_reader import FileReader
from checkpoints.quantized.gguf_header import Strings, Tensor, Value, read_header
from checkpoints.reader import BaseReader, ShardedReader, open_shards
from checkpoints.tensor_info import Index

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_BYTES = np.dtype(np.uint8)


class Metadata:
    """Typed access to the metadata of a file.

    Args:
        fields: Values by name.
        path: The file, for messages.
    """

    def __init__(self, fields: Mapping[str, Value], path: Path) -> None:
        self.fields, self.path = fields, path

    def error(self, name: str, message: str) -> CheckpointError:
        """Return an error about a field."""
        return CheckpointError(f"{self.path}: metadata field {name!r}: {message}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer.

        Raises:
            CheckpointError: The field is missing and has no default, or is no integer.
        """
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._unexpected(name, "an integer")
        return value

    def optional_integer(self, name: str) -> int | None:
        """Return an integer; None if the field is missing."""
        return self.integer(name) if name in self.fields else None

    def one_for_all_layers(self, name: str, default: int | None = None) -> int:
        """Return an integer that a field may also have for each layer; layers must not differ."""
        value = self.fields.get(name)
        if not isinstance(value, np.ndarray):
            return self.integer(name, default)
        if not value.size or value.dtype.kind not in "iu" or (value != value[0]).any():
            raise self.error(name, "expected the same integer for all layers, which may not differ")
        return int(value[0])

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number, as ``integer`` does."""
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._unexpected(name, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            raise self._unexpected(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string, as ``integer`` does."""
        value = self.fields.get(name, default)
        if not isinstance(value, str):
            raise self._unexpected(name, "a string")
        return value

    def strings(self, name: str) -> Strings:
        """Return an array of strings."""
        value = self.fields.get(name)
        if not isinstance(value, Strings):
            raise self._unexpected(name, "an array of strings")
        return value

    def numbers(self, name: str, count: int) -> np.ndarray | None:
        """Return an array of ``count`` numbers; None if the field is missing."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self._unexpected(name, f"an array of {count} numbers")
        return value

    def _unexpected(self, name: str, expected: str) -> CheckpointError:
        value = self.fields.get(name)
        if value is None:
            return self.error(name, f"expected {expected}, but it is missing")
        size = len(value) if isinstance(value, np.ndarray | Strings | list) else None
        shown = repr(value)[:80] if size is None else f"an array of {size}"
        return self.error(name, f"expected {expected}, got {shown}")


class GgufFile(FileReader):
    """Reads one file. Tensors of plain numbers have their shape and dtype; those of blocks are uint8 [..., row bytes].

    Args:
        path: The file.

    Raises:
        CheckpointError: The file cannot be read, or its header violates the format; the message names file and tensor.
    """

    def _read_layouts(self) -> dict[str, StridedLayout]:
        header = read_header(self._file)
        self.metadata = Metadata(header.metadata, self._file.path)
        self.stored: Mapping[str, Tensor] = header.tensors
        return {name: full_layout(each.start, *_form(each)) for name, each in header.tensors.items()}


def _form(tensor: Tensor) -> tuple[np.dtype, tuple[int, ...]]:
    """Return dtype and shape of a tensor as it is read."""
    kind = tensor.type
    if kind.dtype is not None:
        return kind.dtype, tensor.shape
    return _BYTES, (*tensor.shape[:-1], tensor.shape[-1] // kind.block * kind.num_bytes)


class GgufFiles(BaseReader):
    """Reads a file and the other parts that it is split into.

    Args:
        path: The file, or the first part.

    Raises:
        CheckpointError: As for ``GgufFile``; a part is missing, or the path is another part than the first.
    """

    def __init__(self, path: Path) -> None:
        names = part_names(path)
        files: dict[str, GgufFile] = {}

        def open_part(part: Path) -> GgufFile:
            files[part.name] = GgufFile(part)
            return files[part.name]

        self._shards = ShardedReader(path.parent, open_shards(path.parent, names, open_part), None)
        self.tensors = self._shards.tensors
        self.stored = {name: tensor for file in files.values() for name, tensor in file.stored.items()}
        self.metadata = files[names[0]].metadata
        try:
            self._check_parts(len(names))
        except BaseException:
            self.close()
            raise

    def _check_parts(self, num_parts: int) -> None:
        count = self.metadata.integer("split.count", 1) or 1
        if count != num_parts:
            raise self.metadata.error("split.count", f"the file is one of {count} parts, but its name says {num_parts}")
        expected = self.metadata.integer("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise self.metadata.error(
                "split.tensors.count", f"expected {expected} tensors, but the parts have {len(self.tensors)}"
            )

    def read(self, name: str, index: Index) -> np.ndarray:
        """Return a box of a tensor; see ``GgufFile``."""
        return self._shards.read(name, index)

    def close(self) -> None:
        """Close the files."""
        self._shards.close()


def part_names(path: Path) -> list[str]:
    """Return the names of the files that belong to a file: itself, or all parts that its name says there are.

    Raises:
        CheckpointError: The path is another part than the first, or parts are missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path.name]
    stem, number, count = match[1], int(match[2]), int(match[3])
    first = part_name(stem, 1, count)
    if number != 1:
        raise CheckpointError(f"{path} is part {number} of {count}; pass the first part, {first}")
    names = [part_name(stem, part, count) for part in range(1, count + 1)]
    absent = [name for name in names if not (path.parent / name).is_file()]
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise CheckpointError(f"{path}: parts of the file are missing: {', '.join(absent[:3])}{more}")
    return names


def part_name(stem: str, part: int, count: int) -> str:
    """Return the name of a part, counted from 1."""
    return f"{stem}-{part:05d}-of-{count:05d}{SUFFIX}"


def is_first_part(name: str) -> bool:
    """Return whether a file name is that of a whole file or of a first part."""
    match = _PART.fullmatch(name)
    return name.endswith(SUFFIX) and (match is None or int(match[2]) == 1)
