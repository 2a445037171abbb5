"""Tensors of one-byte numbers, float8 or int8, with a scale for all of them, for each row, for groups or for blocks."""

import math
from collections.abc import Collection

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.format import Box, QuantizedTensor, group_indices, info_of
from checkpoints.quantized.planes import Planes
from checkpoints.quantized.records import Records
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import Index

FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
INT8 = np.dtype(np.int8)
SCALE_DTYPES = (
    *(np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)),
    np.dtype(ml_dtypes.float8_e8m0fnu),
)

ACTIVATION_SCALES = (
    r".*[._](input_scale|input_scale_ub|input_zero_point|input_global_scale|output_scale|activation_scale"
    r"|[kvq]_scale|prob_scale|kv_scale|[kvq]_zero_point)"
)
"""Names of scales of activations and of the KV cache, which do not change the weights."""


def value_table(dtype: np.dtype) -> np.ndarray:
    """Return the float32 value of each code of a one-byte float type."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def pair_scales(stored: Collection[str], suffixes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the names of tensors that have a scale beside them, with it: ``x.weight`` and ``x.weight_scale``."""
    pairs: dict[str, tuple[str, ...]] = {}
    for scale in stored:
        for suffix in suffixes:
            name = scale.removesuffix(suffix)
            if name != scale and name in stored:
                pairs[name] = (name, scale)
    return pairs


def open_scaled(
    reader: CheckpointReader,
    format_name: str,
    weight: str,
    scale: str,
    group: tuple[int, int] | None = None,
    zero: str | None = None,
    rounds_activations: bool = False,
) -> QuantizedTensor:
    """Return a tensor of one-byte numbers with scales.

    Args:
        reader: The stored tensors.
        format_name: For messages.
        weight: The numbers, [..., N, K].
        scale: The scales: one, [N], [N, 1], or of groups [..., ceil(N / rows), ceil(K / columns)].
        group: Rows and columns of a group; None: one scale for all or for each row.
        zero: Zeros, like the scales; None for none.
        rounds_activations: Whether the format rounds activations, too, to 8 bits: each row by its largest magnitude.

    Raises:
        CheckpointError: Another dtype, or shapes that do not belong together.
    """
    info = info_of(reader, format_name, weight)
    if info.dtype not in (*FLOAT8, INT8) or len(info.shape) < 2:
        raise CheckpointError(
            f"tensor {weight!r} ({format_name}) is stored as {info.dtype} {list(info.shape)}, expected matrices of "
            "float8_e4m3fn, float8_e5m2 or int8"
        )
    leading, rows, columns = info.shape[:-2], info.shape[-2], info.shape[-1]
    sizes = _group_sizes(reader, format_name, weight, scale, group)
    grid = (-(-rows // sizes[0]), -(-columns // sizes[1]))
    table = None if info.dtype == INT8 else value_table(info.dtype)

    def read_grid(stored: str, box: Box, needed: Index) -> np.ndarray:
        shape = reader.tensors[stored].shape
        if math.prod(shape) == 1:
            return reader.read(stored, (slice(0, 1),) * len(shape)).astype(np.float32).reshape(1, 1)
        places = tuple(slice(place, place + 1) for place in box.leading)
        index = needed if len(shape) == len(leading) + 2 else needed[:1]
        found = reader.read(stored, (*places, *index)[-len(shape) :]).astype(np.float32)
        return found.reshape(needed[0].stop - needed[0].start, -1)

    def planes(box: Box) -> Planes:
        row_groups, needed_rows = group_indices(box.rows.start, box.rows.stop, sizes[0])
        column_groups, needed_columns = group_indices(box.columns.start, box.columns.stop, sizes[1])
        places = tuple(slice(place, place + 1) for place in box.leading)
        numbers = reader.read(weight, (*places, box.rows, box.columns))
        numbers = numbers.reshape(numbers.shape[-2:])
        codes = numbers if table is None else numbers.view(np.uint8)
        if table is not None and not np.isfinite(table[_largest_magnitude(codes)]):
            raise CheckpointError(f"tensor {weight!r} ({format_name}) contains NaN or infinity")
        return Planes(
            codes,
            read_grid(scale, box, (needed_rows, needed_columns)),
            None if zero is None else read_grid(zero, box, (needed_rows, needed_columns)),
            table=table,
            rows=None if grid[0] in (1, rows) else row_groups,
            columns=None if grid[1] in (1, columns) else column_groups,
        )

    def records() -> Records:
        kind = reader.tensors[scale].dtype.name
        rounds = rounds_activations and info.dtype == INT8 and zero is None
        group = sizes[1] if sizes[1] < columns else 0
        zeros = None if zero is None else "int8"
        return Records(info.dtype.name, group, kind, zeros=zeros, rounds_activations=rounds)

    stored = (weight, scale) if zero is None else (weight, scale, zero)
    return QuantizedTensor(info.shape, stored, planes, records=records)


def _group_sizes(
    reader: CheckpointReader, format_name: str, weight: str, scale: str, group: tuple[int, int] | None
) -> tuple[int, int]:
    """Return rows and columns of the groups that the scales of a tensor belong to."""
    shape, info = reader.tensors[weight].shape, info_of(reader, format_name, scale)
    if info.dtype not in SCALE_DTYPES:
        raise CheckpointError(f"tensor {scale!r} ({format_name}) is stored as {info.dtype}, expected a float type")
    leading, rows, columns = shape[:-2], shape[-2], shape[-1]
    if math.prod(info.shape) == 1:
        return rows, columns
    if info.shape in ((*leading, rows), (*leading, rows, 1)):
        return 1, columns
    if group is not None and min(group) > 0:
        expected = (*leading, -(-rows // group[0]), -(-columns // group[1]))
        if info.shape == expected:
            return group
        why = f"groups of {group[0]} × {group[1]} of {list(shape)} need {list(expected)}"
    else:
        why = f"expected one scale, or one for each row of {list(shape)}"
    raise CheckpointError(f"tensor {scale!r} ({format_name}) has shape {list(info.shape)}: {why}")


def _largest_magnitude(codes: np.ndarray) -> int:
    """Return the largest code without its sign: NaN and infinity of float8 types are above all other magnitudes."""
    return int((codes & 0x7F).max()) if codes.size else 0
