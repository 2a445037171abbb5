"""compressed-tensors (llm-compressor): integers packed along the inputs, int8, float8, MXFP4 and NVFP4.

Each module is read by the tensors that it has, so that ignored modules and mixed precision need no rules:
``weight_packed`` in int32 are packed integers, in uint8 four-bit floats; ``weight`` in int8 or float8 has
``weight_scale``. What the tensors do not tell, the size of groups, comes from ``config_groups``.
"""

import re
from collections.abc import Mapping
from functools import cache

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.column_order import unordered
from checkpoints.quantized.float4 import MXFP4_GROUP, NVFP4_GROUP, open_float4, powers_of_two
from checkpoints.quantized.format import (
    Box,
    QuantizedTensor,
    check_tensor,
    group_by_suffix,
    info_of,
    read_groups,
    read_number,
)
from checkpoints.quantized.planes import Planes, read_codes, read_packed
from checkpoints.quantized.records import Records
from checkpoints.quantized.scaled import ACTIVATION_SCALES, SCALE_DTYPES, open_scaled
from checkpoints.quantized.settings import Settings
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import TensorInfo

_NAME = "compressed-tensors"
_WORD = 32
_INT32, _UINT8 = (np.dtype(np.int32),), (np.dtype(np.uint8),)
_E4M3, _E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
_PARTS = (
    *("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_g_idx"),
    *("weight_global_scale", "weight_shape"),
)
_FORMATS = (
    *("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized", "mixed-precision"),
)


class CompressedTensors:
    """The format for the settings of one checkpoint.

    Raises:
        CheckpointError: A setting is not supported.
    """

    name = _NAME
    ignored = re.compile(ACTIVATION_SCALES)

    def __init__(self, settings: Settings) -> None:
        groups = settings.nested("config_groups")
        parts = [groups.nested(name) for name in groups.fields]
        for part in (settings, *parts):
            name = part.text("format", "dense")
            if name not in _FORMATS:
                raise part.error(f"format {name!r} is not supported; supported: {', '.join(_FORMATS[1:])}")
        if settings.nested("sparsity_config").text("format", "dense") != "dense":
            raise settings.error(
                "sparse weights (sparsity_config) are not supported; export the model without sparsity"
            )
        if settings.nested("transform_config").fields.get("config_groups"):
            raise settings.error(
                "rotated weights (transform_config) are not supported; export the model without transforms"
            )
        self.quantizes_activations = any(part.fields.get("input_activations") for part in parts)
        self._rounds_rows = bool(parts) and all(map(_rounds_rows, parts))
        weights = [part.nested("weights") for part in parts]
        given = [part for part in weights if part.fields]
        self._has_zeros = bool(given) and not any(part.flag("symmetric", True) for part in given)
        self._has_order = bool(given) and all(part.fields.get("actorder") in ("group", True) for part in given)
        self._group_sizes = sorted({size for part in weights if (size := part.integer("group_size", default=0)) > 0})
        self._bits = sorted({part.integer("num_bits", default=8) for part in weights if part.fields})
        self._blocks = [block for part in weights if (block := part.sizes("block_structure")) is not None]

    def logical_names(self, tensors: Mapping[str, TensorInfo | None]) -> dict[str, tuple[str, ...]]:
        """Return the stored tensors of each quantized logical tensor."""
        modules = group_by_suffix(tensors, _PARTS)
        return {
            f"{module}.weight": tuple(parts[part] for part in _PARTS if part in parts)
            for module, parts in modules.items()
            if "weight_packed" in parts or {"weight", "weight_scale"} <= set(parts)
        }

    def open(self, name: str, stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
        """Return a logical tensor; see ``Format``."""
        module = name.removesuffix("weight")
        parts = {one.removeprefix(module): one for one in stored}
        if "weight_packed" not in parts:
            tensor = self._open_scaled(parts, reader)
        elif info_of(reader, _NAME, parts["weight_packed"]).dtype == _UINT8[0]:
            tensor = _open_float4(name, parts, reader)
        else:
            tensor = self._open_packed(name, parts, reader)
        return tensor._replace(stored=stored)

    def _open_scaled(self, parts: dict[str, str], reader: CheckpointReader) -> QuantizedTensor:
        weight, scale, zero = parts["weight"], parts["weight_scale"], parts.get("weight_zero_point")
        shape, scales = info_of(reader, _NAME, weight).shape, info_of(reader, _NAME, scale).shape
        group = next((block for block in self._blocks if scales[-2:] == _grid(shape, block)), None)
        if group is None and len(scales) > 1 and scales[-1] > 1:
            group = (1, self._group_size(scale, shape[-1], scales[-1]))
        return open_scaled(reader, _NAME, weight, scale, group, zero, self._rounds_rows)

    def _group_size(self, stored: str, num_inputs: int, num_groups: int) -> int:
        """Return the size of groups along the inputs, of which there are ``num_groups``."""
        if num_groups == 1:
            return num_inputs
        for size in self._group_sizes:
            if -(-num_inputs // size) == num_groups:
                return size
        raise CheckpointError(
            f"tensor {stored!r} (compressed-tensors) has {num_groups} groups of {num_inputs} inputs, which no "
            f"group_size of config_groups gives: {', '.join(map(str, self._group_sizes)) or 'none'}"
        )

    def _num_bits(self, packed: str, num_inputs: int, num_words: int) -> int:
        """Return the size of codes of which ``num_words`` words hold ``num_inputs``."""
        for bits in self._bits:
            if bits <= 8 and -(-num_inputs * bits // _WORD) == num_words:
                return bits
        raise CheckpointError(
            f"tensor {packed!r} (compressed-tensors) has {num_words} words for {num_inputs} inputs, which no "
            f"num_bits of config_groups gives: {', '.join(map(str, self._bits)) or 'none'}"
        )

    def _open_packed(self, name: str, parts: dict[str, str], reader: CheckpointReader) -> QuantizedTensor:
        """Return a tensor of packed integers, which are stored with their zeros in an offset that cancels out."""
        packed, scale = parts["weight_packed"], parts.get("weight_scale", f"{name}_scale")
        num_outputs, num_inputs = _logical_shape(name, parts, reader)
        num_words = info_of(reader, _NAME, packed).shape[-1]
        bits = self._num_bits(packed, num_inputs, num_words)
        scales_shape = info_of(reader, _NAME, scale).shape
        num_groups = scales_shape[-1] if len(scales_shape) == 2 else 1
        group = self._group_size(scale, num_inputs, num_groups)
        why = f"{num_inputs} inputs in groups of {group}, {num_outputs} outputs of {bits} bits"
        check_tensor(reader, _NAME, packed, (num_outputs, num_words), _INT32, why)
        is_single = scales_shape in ((1,), (1, 1), ())
        if not is_single:
            check_tensor(reader, _NAME, scale, (num_outputs, num_groups), SCALE_DTYPES, why)
        zero = parts.get("weight_zero_point", f"{name}_zero_point" if self._has_zeros else None)
        if zero is not None:
            check_tensor(reader, _NAME, zero, (-(-num_outputs * bits // _WORD), num_groups), _INT32, why)
        order = parts.get("weight_g_idx", f"{name}_g_idx" if self._has_order and num_groups > 1 else None)
        if order is not None:
            check_tensor(reader, _NAME, order, (num_inputs,), _INT32, why)

        @cache
        def group_of() -> np.ndarray:
            in_order = np.arange(num_inputs) // group
            if order is None or (reader.read(order, (slice(0, num_inputs),)) == -1).all():  # -1: not set
                return in_order
            return read_groups(reader, _NAME, order, num_groups)

        def planes(box: Box) -> Planes:
            groups = group_of()[box.columns]
            needed = slice(int(groups.min()), int(groups.max()) + 1)
            codes, blocks = read_codes(
                lambda words: reader.read(packed, (box.rows, words)), box.columns, bits, num_words
            )
            if is_single:
                scales = reader.read(scale, (slice(0, 1),) * len(scales_shape)).astype(np.float32).reshape(1, 1)
            else:
                scales = reader.read(scale, (box.rows, needed)).astype(np.float32)
            no_zeros = np.full((1, 1), 1 << (bits - 1))
            zeros = no_zeros if zero is None else _read_zeros(reader, zero, box.rows, needed, bits)
            if zeros.shape != scales.shape:
                zeros, scales = np.broadcast_arrays(zeros, scales)
            columns = None if scales.shape[1] == 1 else groups - needed.start
            return Planes(codes, scales, zeros, columns=columns, blocks=blocks)

        def records() -> Records:
            kind = reader.tensors[scale].dtype.name
            return _packed_records(bits, group, group_of(), kind, has_zeros=zero is not None)

        return QuantizedTensor((num_outputs, num_inputs), (), planes, check=group_of, records=records)


def _rounds_rows(group: Settings) -> bool:
    """Return whether a group of ``config_groups`` rounds activations to 8 bits, each row by its largest magnitude."""
    inputs = group.nested("input_activations")
    return (
        inputs.fields.get("num_bits") == 8
        and inputs.text("type", "int") == "int"
        and inputs.flag("symmetric", True)
        and inputs.fields.get("dynamic") is True
        and inputs.text("strategy", "token") == "token"
    )


def _packed_records(bits: int, group: int, group_of: np.ndarray, scales: str, has_zeros: bool) -> Records:
    """Return what rows of records of packed integers hold."""
    values, own = "uint4" if bits <= 4 else "uint8", 0 if group == len(group_of) else group
    groups = unordered(group_of, group)
    if has_zeros:
        return Records(values, own, scales, zeros="uint8", groups=groups)
    return Records(values, own, scales, 1 << (bits - 1), groups=groups)


def _read_zeros(reader: CheckpointReader, stored: str, rows: slice, groups: slice, bits: int) -> np.ndarray:
    """Return zeros, which are packed along the outputs: uint8 [rows, groups]."""
    num_words = reader.tensors[stored].shape[0]
    return read_packed(lambda words: reader.read(stored, (words, groups)).T, rows, bits, num_words).T


def _open_float4(name: str, parts: dict[str, str], reader: CheckpointReader) -> QuantizedTensor:
    """Return a tensor of MXFP4, or of NVFP4 if it has a global scale, which divides the others."""
    packed, scale = parts["weight_packed"], parts.get("weight_scale", f"{name}_scale")
    overall = parts.get("weight_global_scale")
    if overall is None and info_of(reader, _NAME, scale).dtype == _E4M3:
        overall = f"{name}_global_scale"
    _matrix_shape(packed, reader)
    if overall is None:
        dtypes = (_UINT8[0], _E8M0)
        return open_float4(
            reader, _NAME, packed, scale, MXFP4_GROUP, dtypes, lambda each: powers_of_two(each, scale), "float8_e8m0fnu"
        )
    divisor = read_number(reader, _NAME, overall)
    if not np.isfinite(divisor) or divisor == 0:
        raise CheckpointError(f"tensor {overall!r} (compressed-tensors) is {divisor}, expected a finite number but 0")
    return open_float4(
        reader,
        _NAME,
        packed,
        scale,
        NVFP4_GROUP,
        (_E4M3,),
        lambda each: each.astype(np.float32),
        _E4M3.name,
        divisor,
        divides=True,
    )


def _matrix_shape(stored: str, reader: CheckpointReader) -> tuple[int, int]:
    shape = info_of(reader, _NAME, stored).shape
    if len(shape) != 2:
        raise CheckpointError(f"tensor {stored!r} (compressed-tensors) has shape {list(shape)}, expected two axes")
    return shape[0], shape[1]


def _logical_shape(name: str, parts: dict[str, str], reader: CheckpointReader) -> tuple[int, int]:
    """Return outputs and inputs of a packed weight, which ``weight_shape`` tells."""
    stored = parts.get("weight_shape", f"{name}_shape")
    info_of(reader, _NAME, stored)
    values = [int(value) for value in reader.read(stored, (slice(0, 2),)).ravel()]
    if len(values) != 2 or values[0] != _matrix_shape(parts["weight_packed"], reader)[0] or values[1] < 1:
        raise CheckpointError(f"tensor {stored!r} (compressed-tensors) is {values}, which contradicts weight_packed")
    return values[0], values[1]


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[-2] // block[0]), -(-shape[-1] // block[1])
