"""Parses the header of a GGUF file: metadata and the list of tensors.

The layout, following ``docs/gguf.md`` of ggml: "GGUF", a version, the numbers of tensors and of metadata fields; the
fields; name, shape, type and offset of each tensor; padding; the data. Every count, length and offset is compared with
the size of the file before anything of that size is allocated. Arrays of numbers are copied in bulk, and strings of an
array are located in one pass and decoded when they are used.
"""

import math
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.file_ranges import RangeFile
from checkpoints.quantized.gguf_types import REFUSED, TYPES, GgufType

MAX_HEADER_BYTES = 256 << 20
FIRST_BYTES = 1 << 20
MAX_AXES = 4
MAX_ENTRIES = 100_000
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_NAME_BYTES = 65535
_MAX_DEPTH = 4
_SHOWN_BYTES = 80

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS: dict[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    _FLOAT32: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
"""Types of metadata numbers, by number in the file."""


class Strings:
    """The strings of a metadata array, decoded when they are used.

    Args:
        where: File and field, for messages.
        data: Bytes that contain the strings.
        starts: First byte of each, and the end of the last one's successor: string ``i`` ends 8 bytes before the start
            of string ``i + 1``.
    """

    def __init__(self, where: str, data: bytes, starts: "array[int]") -> None:
        self._where, self._data, self._starts = where, data, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return _text(self._where, self._data[self._starts[index] : self._starts[index + 1] - 8])

    def __iter__(self) -> Iterator[str]:
        data, starts = self._data, self._starts
        try:
            for start, stop in zip(starts, starts[1:], strict=False):
                yield data[start : stop - 8].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._where}: a string is not UTF-8: {error}") from error


Value = int | float | bool | str | np.ndarray | Strings | list["Value"]
"""A metadata value; arrays of numbers are NumPy arrays."""


class Tensor(NamedTuple):
    """A tensor in the file: its shape with the longest strides first, its type, and where its data are."""

    shape: tuple[int, ...]
    type: GgufType
    start: int
    num_bytes: int


class Header(NamedTuple):
    """Metadata fields and tensors by name."""

    metadata: dict[str, Value]
    tensors: dict[str, Tensor]


def read_header(file: RangeFile) -> Header:
    """Read and check the header of a file.

    Raises:
        CheckpointError: The file is not GGUF, of a version or type that is not supported, or damaged.
    """
    limit = min(file.num_bytes, MAX_HEADER_BYTES)
    size = min(FIRST_BYTES, limit)
    while True:
        try:
            return _Parser(file.path, file.read_bytes(0, size), file.num_bytes).header()
        except _NeedsMoreError as error:
            if size == limit:
                raise CheckpointError(
                    f"{file.path}: the header is above the limit of {limit} bytes, which {error} exceeds"
                ) from None
            size = min(4 * size, limit)


class _NeedsMoreError(Exception):
    """The header goes on after the bytes that were read; the message is what begins there."""


class _Parser:
    """Reads a header from the first bytes of a file of ``num_bytes``."""

    def __init__(self, path: Path, data: bytes, num_bytes: int) -> None:
        self._path, self._data, self._num_bytes = path, data, num_bytes
        self._at = 0

    def header(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise self._error(f"expected a GGUF file, which begins with 'GGUF', got {self._data[:4]!r}")
        self._at = 4
        version = self._u32("the version")
        if version not in _VERSIONS:
            is_swapped = version & 0xFFFF == 0
            raise self._error(
                f"GGUF version {version} is not supported; supported: {', '.join(map(str, _VERSIONS))}"
                + (" in little-endian order; this file is big-endian" if is_swapped else "")
            )
        num_tensors = self._count("tensors", 8 + 4 + 4 + 8, MAX_ENTRIES)
        num_fields = self._count("metadata fields", 8 + 4 + 1, MAX_ENTRIES)
        metadata: dict[str, Value] = {}
        for _ in range(num_fields):
            name = self._string("the name of a metadata field", _MAX_NAME_BYTES)
            if name in metadata:
                raise self._error(f"metadata field {name!r} occurs twice")
            metadata[name] = self._value(f"metadata field {name!r}", self._u32(f"metadata field {name!r}"), 0)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"general.alignment: expected a power of 2, got {alignment!r}")
        return Header(metadata, self._tensors(num_tensors, alignment))

    def _tensors(self, count: int, alignment: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for _ in range(count):
            name = self._string("the name of a tensor", _MAX_NAME_BYTES)
            if name in found:
                raise self._error(f"tensor {name!r} occurs twice")
            found[name] = self._tensor(name, alignment)
        data_start = self._at + -self._at % alignment
        placed = {name: tensor._replace(start=data_start + tensor.start) for name, tensor in found.items()}
        self._check_data(placed)
        return placed

    def _tensor(self, name: str, alignment: int) -> Tensor:
        """Return the next tensor, its start counted from the first byte of the data."""
        where = f"tensor {name!r}"
        num_axes = self._u32(where)
        if num_axes > MAX_AXES:
            raise self._error(f"{where} has {num_axes} axes, expected at most {MAX_AXES}")
        lengths = [self._u64(where) for _ in range(num_axes)]
        number, start = self._u32(where), self._u64(where)
        if number not in TYPES:
            supported = ", ".join(each.name for each in TYPES.values())
            raise self._error(
                f"{where} has type {REFUSED.get(number, number)}, which is not supported; supported: {supported}; "
                "export the model in one of them with llama-quantize, for example as Q4_K_M"
            )
        kind = TYPES[number]
        if lengths and lengths[0] % kind.block or (not lengths and kind.block > 1):
            raise self._error(
                f"{where} has rows of {lengths[0] if lengths else 1} elements, expected a multiple of {kind.block}, "
                f"the block of {kind.name}"
            )
        if start % alignment:
            raise self._error(f"{where} begins at byte {start} of the data, expected a multiple of {alignment}")
        num_bytes = math.prod(lengths) // kind.block * kind.num_bytes
        return Tensor(tuple(reversed(lengths)), kind, start, num_bytes)

    def _check_data(self, tensors: dict[str, Tensor]) -> None:
        """Check that the tensors' data are in the file and do not overlap."""
        end, previous = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
            if tensor.start < end and tensor.num_bytes:
                raise self._error(f"tensor {name!r} overlaps {previous!r}")
            if tensor.start + tensor.num_bytes > self._num_bytes:
                raise self._error(
                    f"the file is truncated: tensor {name!r} ends at byte {tensor.start + tensor.num_bytes}, but the "
                    f"file has only {self._num_bytes}"
                )
            end, previous = tensor.start + tensor.num_bytes, name

    def _value(self, where: str, kind: int, depth: int) -> Value:
        if kind == _STRING:
            return self._string(where, self._num_bytes)
        if kind == _ARRAY:
            return self._array(where, depth)
        dtype = self._dtype(where, kind)
        value = np.frombuffer(self._take(where, dtype.itemsize), dtype)[0]
        if kind == _FLOAT32:  # the shortest decimal, 1e-05 and not 9.999999747378752e-06
            return float(str(value))
        return bool(value) if kind == _BOOL else value.item()

    def _array(self, where: str, depth: int) -> Value:
        kind = self._u32(where)
        if kind == _STRING:
            return self._strings(where, self._count(f"strings of {where}", 8))
        if kind == _ARRAY:
            count = self._count(f"arrays of {where}", 12, MAX_ENTRIES)
            if depth == _MAX_DEPTH:
                raise self._error(f"{where} has arrays in arrays, more than {_MAX_DEPTH} deep")
            return [self._array(where, depth + 1) for _ in range(count)]
        dtype = self._dtype(where, kind)
        count = self._count(f"elements of {where}", dtype.itemsize)
        values = np.frombuffer(self._take(where, count * dtype.itemsize), dtype)
        return values.astype(np.bool_) if kind == _BOOL else values

    def _strings(self, where: str, count: int) -> Strings:
        data, at, unpack = self._data, self._at, _U64.unpack_from
        starts = array("Q")
        try:
            for _ in range(count):
                starts.append(at + 8)
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError):
            self._check_inside(where, at)
            raise _NeedsMoreError(where) from None
        self._check_inside(where, at)
        if at > len(data):
            raise _NeedsMoreError(where)
        starts.append(at + 8)
        self._at = at
        return Strings(f"{self._path}: {where}", data, starts)

    def _check_inside(self, where: str, at: int) -> None:
        if at > self._num_bytes:
            raise self._error(f"{where} has a string that ends at byte {at}, but the file has only {self._num_bytes}")

    def _string(self, where: str, limit: int) -> str:
        num_bytes = self._u64(where)
        if num_bytes > limit:
            raise self._error(f"{where} is a string of {num_bytes} bytes, expected at most {limit}")
        return _text(f"{self._path}: {where}", self._take(where, num_bytes))

    def _dtype(self, where: str, kind: int) -> np.dtype:
        if kind not in _SCALARS:
            raise self._error(f"{where} has type {kind}, expected 0 to 12")
        return _SCALARS[kind]

    def _count(self, what: str, least_bytes: int, most: int | None = None) -> int:
        """Return a count of things that take at least ``least_bytes`` each, checked against the rest of the file."""
        count = self._u64(f"the number of {what}")
        rest = self._num_bytes - self._at
        if most is not None and count > most:
            raise self._error(f"{count} {what}, expected at most {most}")
        if count * least_bytes > rest:
            raise self._error(f"{count} {what} do not fit in the {rest} bytes that follow")
        return count

    def _u32(self, what: str) -> int:
        return _U32.unpack(self._take(what, 4))[0]

    def _u64(self, what: str) -> int:
        return _U64.unpack(self._take(what, 8))[0]

    def _take(self, what: str, num_bytes: int) -> bytes:
        stop = self._at + num_bytes
        if stop > self._num_bytes:
            raise self._error(f"{what} ends at byte {stop}, but the file has only {self._num_bytes}: it is damaged")
        if stop > len(self._data):
            raise _NeedsMoreError(what)
        found = self._data[self._at : stop]
        self._at = stop
        return found

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")


def _text(where: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8: {data[:_SHOWN_BYTES]!r}") from error
