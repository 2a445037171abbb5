"""GPTQ (AutoGPTQ, GPTQModel): codes of 2, 3, 4 or 8 bits packed along the inputs.

``qweight`` int32 [K * bits / 32, N], ``qzeros`` int32 [groups, N * bits / 32], ``scales`` float16 [groups, N] and, for
groups in the order of activations, ``g_idx`` int32 [K], the group of each input. A weight is ``(code - zero) * scale``;
the first version of the format stores ``zero - 1``.
"""

import re
from collections.abc import Mapping
from functools import cache

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.column_order import unordered
from checkpoints.quantized.format import Box, QuantizedTensor, check_tensor, group_by_suffix, info_of, read_groups
from checkpoints.quantized.planes import Planes, read_codes, read_packed
from checkpoints.quantized.records import Records
from checkpoints.quantized.settings import Settings
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import TensorInfo

_NAME = "GPTQ"
_BITS = (2, 3, 4, 8)
_WORD = 32
_INT32, _FLOATS = (np.dtype(np.int32),), (np.dtype(np.float16), np.dtype(np.float32))
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


class Gptq:
    """The format for the settings of one checkpoint.

    Raises:
        CheckpointError: The settings are of another version, or not supported.
    """

    name = _NAME
    quantizes_activations = False
    ignored = re.compile(r"(?!)")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bits = settings.choice("bits", _BITS)
        self._group = settings.integer("group_size", default=128)
        self._has_order = settings.flag("desc_act", False)
        version = settings.text("checkpoint_format", settings.text("format", "gptq"))
        if version not in ("gptq", "gptq_v2"):
            raise settings.error(
                f"checkpoint_format {version!r} is not supported; supported: gptq, gptq_v2 (export it with GPTQModel)"
            )
        self._stored_zero_offset = int(version == "gptq")
        self._overrides = _overrides(settings)

    def logical_names(self, tensors: Mapping[str, TensorInfo | None]) -> dict[str, tuple[str, ...]]:
        """Return the stored tensors of each quantized logical tensor."""
        modules = group_by_suffix(tensors, _PARTS)
        return {
            f"{module}.weight": tuple(f"{module}.{part}" for part in _PARTS if part in parts or part != "g_idx")
            for module, parts in modules.items()
            if "qweight" in parts
        }

    def open(self, name: str, stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
        """Return a logical tensor; see ``Format``."""
        qweight, qzeros, scales = stored[:3]
        bits, group = self._bits_and_group(name.removesuffix(".weight"))
        shape = info_of(reader, _NAME, qweight).shape
        if len(shape) != 2 or shape[0] * _WORD % bits:
            raise CheckpointError(
                f"tensor {qweight!r} (GPTQ) has shape {list(shape)}, expected words of {bits}-bit codes in two axes"
            )
        num_inputs, num_outputs = shape[0] * _WORD // bits, shape[1]
        group = num_inputs if group == -1 else group
        num_groups = -(-num_inputs // group)
        zero_words = -(-num_outputs * bits // _WORD)
        why = f"{num_inputs} inputs in groups of {group}, {num_outputs} outputs of {bits} bits"
        check_tensor(reader, _NAME, qweight, shape, _INT32, why)
        check_tensor(reader, _NAME, qzeros, (num_groups, zero_words), _INT32, why)
        check_tensor(reader, _NAME, scales, (num_groups, num_outputs), _FLOATS, why)
        order = next(iter(stored[3:]), None)
        if order is None and self._has_order and num_groups > 1:
            order = f"{name.removesuffix('.weight')}.g_idx"
        if order is not None:
            check_tensor(reader, _NAME, order, (num_inputs,), _INT32, why)

        @cache
        def group_of() -> np.ndarray:
            if order is None:
                return np.arange(num_inputs) // group
            return read_groups(reader, _NAME, order, num_groups)

        def planes(box: Box) -> Planes:
            inputs, outputs = box.columns, box.rows
            groups = group_of()[inputs]
            first, last = (int(groups.min()), int(groups.max()) + 1) if groups.size else (0, 0)
            needed = slice(first, last)
            stored_zeros = read_packed(lambda words: reader.read(qzeros, (needed, words)), outputs, bits, zero_words)
            zeros = stored_zeros + np.uint8(self._stored_zero_offset)
            codes, blocks = read_codes(lambda words: reader.read(qweight, (words, outputs)).T, inputs, bits, shape[0])
            return Planes(
                codes,
                reader.read(scales, (needed, outputs)).astype(np.float32).T,
                (zeros & np.uint8((1 << bits) - 1)).T,
                columns=groups - first,
                blocks=blocks,
            )

        def records() -> Records:
            values, kind = "uint4" if bits <= 4 else "uint8", reader.tensors[scales].dtype.name
            return Records(values, group, kind, zeros="uint8", groups=unordered(group_of(), group))

        return QuantizedTensor(
            (num_outputs, num_inputs), stored, planes, is_column_major=True, check=group_of, records=records
        )

    def _bits_and_group(self, module: str) -> tuple[int, int]:
        """Return bits and group size of a module: those of the section, or of the entry of ``dynamic`` that matches."""
        for pattern, changes in self._overrides:
            if pattern.match(module):
                bits = changes.choice("bits", _BITS, default=self._bits)
                return bits, changes.integer("group_size", default=self._group)
        return self._bits, self._group


def _overrides(settings: Settings) -> list[tuple[re.Pattern[str], Settings]]:
    """Return the entries of ``dynamic`` that change settings. Those that exclude modules change nothing here: such a
    module has a plain weight."""
    dynamic = settings.nested("dynamic")
    found: list[tuple[re.Pattern[str], Settings]] = []
    for text in dynamic.fields:
        if text.startswith("-:"):
            continue
        try:
            pattern = re.compile(text.removeprefix("+:"))
        except re.error as error:
            raise dynamic.error(f"{text!r} is not a regular expression: {error}") from error
        found.append((pattern, dynamic.nested(text)))
    return found
