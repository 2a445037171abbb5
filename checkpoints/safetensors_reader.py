"""Reads safetensors files; the header is fully validated before any tensor is read.

The format, following its specification: an 8-byte little-endian header length, a JSON object from tensor name to dtype,
shape and `data_offsets` relative to the header's end, then the data without gaps or overlaps to the end of the file.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.file_ranges import RangeFile, StridedLayout, full_layout
from checkpoints.file_reader import FileReader

MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
MAX_RANK = 32

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "U16": np.dtype(np.uint16),
        "I16": np.dtype(np.int16),
        "U32": np.dtype(np.uint32),
        "I32": np.dtype(np.int32),
        "U64": np.dtype(np.uint64),
        "I64": np.dtype(np.int64),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F32": np.dtype(np.float32),
        "F64": np.dtype(np.float64),
        "C64": np.dtype(np.complex64),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
        "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    }
)


class SafetensorsReader(FileReader):
    """Reads one safetensors file; see ``FileReader``."""

    def _read_layouts(self) -> dict[str, StridedLayout]:
        return _read_header(self._file)


def _read_header(file: RangeFile) -> dict[str, StridedLayout]:
    if file.num_bytes < LENGTH_BYTES:
        raise CheckpointError(f"{file.path}: not a safetensors file: only {file.num_bytes} bytes")
    header_bytes = int.from_bytes(file.read_bytes(0, LENGTH_BYTES), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file.path}: header length {header_bytes} is above the limit of {MAX_HEADER_BYTES} bytes; "
            "this is not a safetensors file, or it is damaged"
        )
    data_start = LENGTH_BYTES + header_bytes
    if data_start > file.num_bytes:
        raise CheckpointError(f"{file.path}: header of {header_bytes} bytes does not fit in {file.num_bytes} bytes")
    header = _parse_json(file.path, file.read_bytes(LENGTH_BYTES, header_bytes))
    _check_metadata(file.path, header.pop("__metadata__", {}))
    entries = {name: _parse_entry(f"{file.path}: tensor {name!r}", entry) for name, entry in header.items()}
    _check_coverage(file.path, entries, file.num_bytes - data_start)
    return {name: full_layout(data_start + begin, dtype, shape) for name, (dtype, shape, begin, _) in entries.items()}


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise CheckpointError(f"{path}: the header has {repeated!r} twice")
        return table

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a JSON {type(header).__name__}, expected an object")
    return header


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _parse_entry(where: str, entry: object) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Check one header entry; return the dtype, the shape, and the start and end byte of its data."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise CheckpointError(f"{where}: expected an object with dtype, shape and data_offsets")
    dtype_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise CheckpointError(f"{where}: dtype {dtype_name!r} is not one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_count(length) for length in shape):
        raise CheckpointError(f"{where}: shape {str(shape)[:80]} is not a list of at most {MAX_RANK} integers >= 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise CheckpointError(f"{where}: data_offsets {str(offsets)[:80]} are not two integers >= 0")
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{where}: data_offsets begin ({begin}) after their end ({end})")
    dtype = DTYPES[dtype_name]
    expected = math.prod(shape) * dtype.itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{where}: data_offsets span {end - begin} bytes, expected {expected} for {dtype_name} {shape}"
        )
    return dtype, tuple(shape), begin, end


def _check_coverage(
    path: Path, entries: Mapping[str, tuple[np.dtype, tuple[int, ...], int, int]], data_bytes: int
) -> None:
    """Check that the tensors are contiguous and end at the end of the file."""
    position = 0
    previous = "the header"
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if end > data_bytes:
            raise CheckpointError(
                f"{path}: the file is truncated: tensor {name!r} ends at byte {end} of the data, but the file "
                f"has only {data_bytes}"
            )
        if begin < position:
            raise CheckpointError(f"{path}: tensor {name!r} overlaps {previous!r}")
        if begin > position:
            raise CheckpointError(f"{path}: {begin - position} bytes before tensor {name!r} belong to no tensor")
        position, previous = end, name
    if position != data_bytes:
        raise CheckpointError(f"{path}: {data_bytes - position} bytes after the last tensor belong to no tensor")
