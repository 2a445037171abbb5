"""bitsandbytes: NF4 and FP4 (codes of a table in blocks of the flattened weight), and int8 with a scale per row.

Four bits: ``weight`` uint8 [N * K / 2, 1] holds two codes per byte, the first in the high half. ``weight.absmax`` are
the scales of blocks, or, quantized again ("double"), codes of ``weight.nested_quant_map`` in blocks with scales of
their own and an offset. ``weight.quant_state.bitsandbytes__nf4`` is JSON with shape and sizes.

Eight bits: ``weight`` int8 and ``SCB`` [N], the largest magnitude of each row, which 127 stands for.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.format import Box, QuantizedTensor, check_tensor, info_of
from checkpoints.quantized.planes import Planes, halves_of
from checkpoints.quantized.records import Records
from checkpoints.quantized.settings import Settings, loads_bitsandbytes
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import TensorInfo

_NAME = "bitsandbytes"
_STATE = re.compile(r"(.*)\.quant_state\.bitsandbytes__(nf4|fp4)")
_UINT8, _INT8, _FLOAT32 = (np.dtype(np.uint8),), (np.dtype(np.int8),), (np.dtype(np.float32),)
_MAX_STATE_BYTES = 4096


class _State(NamedTuple):
    """What ``quant_state`` says: the weight's shape, the sizes of blocks, and the offset of scales."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float


class BitsAndBytes:
    """The format for the settings of one checkpoint.

    Raises:
        CheckpointError: The settings name neither 4 nor 8 bits.
    """

    name = _NAME
    ignored = re.compile(r".*\.weight_format")

    def __init__(self, settings: Settings) -> None:
        self.quantizes_activations = loads_bitsandbytes(settings.fields) == 8
        if not loads_bitsandbytes(settings.fields):
            raise settings.error("expected load_in_4bit or load_in_8bit to be true")

    def logical_names(self, tensors: Mapping[str, TensorInfo | None]) -> dict[str, tuple[str, ...]]:
        """Return the stored tensors of each quantized logical tensor."""
        found: dict[str, tuple[str, ...]] = {}
        for stored in tensors:
            match = _STATE.fullmatch(stored)
            if match is not None:
                name = match[1]
                parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
                optional = [f"{name}.{part}" for part in parts if f"{name}.{part}" in tensors]
                found[name] = (name, stored, *optional)
            elif stored.endswith(".SCB"):
                found[stored.removesuffix("SCB") + "weight"] = (stored.removesuffix("SCB") + "weight", stored)
        return found

    def open(self, name: str, stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
        """Return a logical tensor; see ``Format``."""
        tensor = _open_int8(stored, reader) if stored[1].endswith(".SCB") else _open_four_bits(name, stored[1], reader)
        return tensor._replace(stored=stored)


def _open_int8(stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
    weight, scale = stored
    shape = info_of(reader, _NAME, weight).shape
    if len(shape) != 2:
        raise CheckpointError(f"tensor {weight!r} (bitsandbytes) has shape {list(shape)}, expected two axes")
    check_tensor(reader, _NAME, weight, shape, _INT8, "int8 weights")
    check_tensor(reader, _NAME, scale, shape[:1], _FLOAT32, f"one scale for each of {shape[0]} rows")

    def planes(box: Box) -> Planes:
        largest = reader.read(scale, (box.rows,))
        return Planes(reader.read(weight, (box.rows, box.columns)), (largest / np.float32(127))[:, None])

    return QuantizedTensor((shape[0], shape[1]), (), planes, records=lambda: Records("int8"))


def _open_four_bits(name: str, state_name: str, reader: CheckpointReader) -> QuantizedTensor:
    state = _read_state(state_name, reader)
    rows, columns = state.shape
    num_blocks = -(-rows * columns // state.block)
    why = f"{rows} × {columns} codes in blocks of {state.block}"
    check_tensor(reader, _NAME, name, (-(-rows * columns // 2), 1), _UINT8, why)
    check_tensor(reader, _NAME, f"{name}.quant_map", (16,), _FLOAT32, "a table of 16 values")
    table = reader.read(f"{name}.quant_map", (slice(0, 16),))
    if not np.isfinite(table).all():
        raise CheckpointError(f"tensor {name + '.quant_map'!r} (bitsandbytes) has values that are not finite")
    is_double = info_of(reader, _NAME, f"{name}.absmax").dtype == _UINT8[0]
    check_tensor(reader, _NAME, f"{name}.absmax", (num_blocks,), _UINT8 if is_double else _FLOAT32, why)
    if is_double:
        check_tensor(reader, _NAME, f"{name}.nested_quant_map", (256,), _FLOAT32, "a table of 256 values")
        num_nested = -(-num_blocks // state.nested_block)
        check_tensor(reader, _NAME, f"{name}.nested_absmax", (num_nested,), _FLOAT32, why)

    def scales_of(first: int, last: int) -> np.ndarray:
        stored = reader.read(f"{name}.absmax", (slice(first, last),))
        if not is_double:
            return stored
        nested = reader.read(f"{name}.nested_quant_map", (slice(0, 256),))[stored]
        outer = slice(first // state.nested_block, -(-last // state.nested_block))
        sizes = reader.read(f"{name}.nested_absmax", (outer,))
        return nested * sizes[np.arange(first, last) // state.nested_block - outer.start] + np.float32(state.offset)

    def planes(box: Box) -> Planes:
        start, stop = box.rows.start * columns, box.rows.stop * columns
        data = reader.read(name, (slice(start // 2, -(-stop // 2)), slice(0, 1)))
        swapped = (data >> 4 | data << 4).reshape(1, -1)  # the first code is in the high half
        if columns % 2:  # rows do not begin with a byte
            flat, blocks = halves_of(swapped, start % 2, stop - start)
            codes, blocks = blocks.unpack(flat).reshape(-1, columns)[:, box.columns], None
        else:
            num_columns = box.columns.stop - box.columns.start
            codes, blocks = halves_of(swapped.reshape(-1, columns // 2), box.columns.start, num_columns)
        first, last = start // state.block, -(-stop // state.block)
        scales = scales_of(first, last)
        if columns % state.block == 0:
            groups = slice(box.columns.start // state.block, -(-box.columns.stop // state.block))
            grid = scales.reshape(-1, columns // state.block)[:, groups]
            index = np.arange(box.columns.start, box.columns.stop) // state.block - groups.start
            return Planes(codes, grid, table=table, columns=index, blocks=blocks)
        each = scales[np.arange(start, stop) // state.block - first]  # blocks run on from row to row
        return Planes(codes, each.reshape(-1, columns)[:, box.columns], table=table, blocks=blocks)

    def records() -> Records | None:
        whole_blocks = columns % state.block == 0
        return Records("uint4", state.block, table=tuple(map(float, table))) if whole_blocks else None

    return QuantizedTensor(state.shape, (), planes, records=records)


def _read_state(stored: str, reader: CheckpointReader) -> _State:
    """Return what a tensor of JSON says about a weight."""
    info = info_of(reader, _NAME, stored)
    if len(info.shape) != 1 or info.dtype != _UINT8[0] or info.shape[0] > _MAX_STATE_BYTES:
        raise CheckpointError(
            f"tensor {stored!r} is {info.dtype} {list(info.shape)}, expected JSON of at most 4096 bytes"
        )
    try:
        fields = json.loads(reader.read(stored, (slice(0, info.shape[0]),)).tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"tensor {stored!r} is not valid JSON: {error}") from error
    shape = fields.get("shape") if isinstance(fields, dict) else None
    if not (isinstance(shape, list) and len(shape) == 2 and all(_is_count(length) for length in shape)):
        raise CheckpointError(f"tensor {stored!r}: shape: expected two integers above 0, got {shape!r}")
    block, nested = fields.get("blocksize", 0), fields.get("nested_blocksize", 256)
    if not (_is_count(block) and _is_count(nested)):
        raise CheckpointError(f"tensor {stored!r}: blocksize: expected integers above 0, got {block!r} and {nested!r}")
    offset = fields.get("nested_offset", 0.0)
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise CheckpointError(f"tensor {stored!r}: nested_offset: expected a finite number, got {offset!r}")
    return _State((shape[0], shape[1]), block, nested, float(offset))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40
