"""AWQ, version "gemm" (AutoAWQ, llm-awq's exports): 4-bit codes packed along the outputs, in an order of their own.

``qweight`` int32 [K, N / 8] and ``qzeros`` int32 [K / g, N / 8] hold eight codes per word, ``scales`` are float16
[K / g, N]. A weight is ``(code - zero) * scale``.
"""

import re
from collections.abc import Mapping

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.format import Box, QuantizedTensor, check_tensor, group_by_suffix, group_indices, info_of
from checkpoints.quantized.planes import Planes, Words
from checkpoints.quantized.records import Records
from checkpoints.quantized.settings import Settings
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import TensorInfo

_NAME = "AWQ"
_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each code of a word, the lowest first."""
_PER_WORD = len(_PLACES)
_INT32, _FLOATS = (np.dtype(np.int32),), (np.dtype(np.float16), np.dtype(np.float32))


class Awq:
    """The format for the settings of one checkpoint.

    Raises:
        CheckpointError: The settings are of another version, or not supported.
    """

    name = _NAME
    quantizes_activations = False
    ignored = re.compile(r"(?!)")

    def __init__(self, settings: Settings) -> None:
        version = settings.text("version", "gemm")
        if version != "gemm":
            raise settings.error(f"AWQ version {version!r} is not supported; supported: gemm (export it with AutoAWQ)")
        settings.choice("bits", (4,), "w_bit")
        self._group = settings.integer("group_size", "q_group_size", default=128)

    def logical_names(self, tensors: Mapping[str, TensorInfo | None]) -> dict[str, tuple[str, ...]]:
        """Return the stored tensors of each quantized logical tensor."""
        modules = group_by_suffix(tensors, ("qweight", "qzeros", "scales"))
        return {
            f"{module}.weight": tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
            for module, parts in modules.items()
            if "qweight" in parts
        }

    def open(self, name: str, stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
        """Return a logical tensor; see ``Format``."""
        qweight, qzeros, scales = stored
        shape = info_of(reader, _NAME, qweight).shape
        if len(shape) != 2:
            raise CheckpointError(f"tensor {qweight!r} (AWQ) has shape {list(shape)}, expected two axes")
        num_inputs, num_outputs = shape[0], shape[1] * _PER_WORD
        group = num_inputs if self._group == -1 else self._group
        if group < 1 or num_inputs % group:
            raise CheckpointError(
                f"tensor {qweight!r} (AWQ): group_size={self._group} does not divide {num_inputs} inputs"
            )
        why = f"{num_inputs} inputs in groups of {group}, {num_outputs} outputs"
        check_tensor(reader, _NAME, qweight, shape, _INT32, why)
        check_tensor(reader, _NAME, qzeros, (num_inputs // group, shape[1]), _INT32, why)
        check_tensor(reader, _NAME, scales, (num_inputs // group, num_outputs), _FLOATS, why)

        def planes(box: Box) -> Planes:
            inputs, outputs = box.columns, box.rows
            groups, needed = group_indices(inputs.start, inputs.stop, group)
            zeros, zero_words = _read_words(reader, qzeros, needed, outputs)
            codes, words = _read_words(reader, qweight, inputs, outputs)
            return Planes(
                codes,
                reader.read(scales, (needed, outputs)).astype(np.float32).T,
                zero_words.unpack(zeros),
                columns=groups,
                blocks=words,
            )

        kind = reader.tensors[scales].dtype.name
        records = Records("uint4", group, kind, zeros="uint8")
        return QuantizedTensor((num_outputs, num_inputs), stored, planes, is_column_major=True, records=lambda: records)


def _read_words(reader: CheckpointReader, stored: str, inputs: slice, outputs: slice) -> tuple[np.ndarray, Words]:
    """Return the words that hold a box of codes, [inputs, words], and how they do."""
    first, last = outputs.start // _PER_WORD, -(-outputs.stop // _PER_WORD)
    words = reader.read(stored, (inputs, slice(first, last)))
    return words, Words(_PLACES, outputs.start - first * _PER_WORD, outputs.stop - outputs.start)
