"""AWQ, version "gemm" (AutoAWQ, llm-awq's exports): 4-bit codes packed along the outputs, in an order of their own.

``qweight`` int32 [K, N / 8] and ``qzeros`` int32 [K / g, N / 8] hold eight codes per word, ``scales`` are float16
[K / g, N]. A weight is ``(code - zero) * scale``.
"""

import re
from collections.abc import Mapping

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.format import Box, QuantizedTensor, check_tensor, group_by_suffix, group_indices, info_of
from checkpoints.quantized.planes import Planes
from checkpoints.quantized.records import Records
from checkpoints.quantized.settings import Settings
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import TensorInfo

_NAME = "AWQ"
_NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
_PER_WORD = 8
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
            return Planes(
                _read_codes(reader, qweight, inputs, outputs),
                reader.read(scales, (needed, outputs)).astype(np.float32).T,
                _read_codes(reader, qzeros, needed, outputs),
                columns=groups,
            )

        kind = reader.tensors[scales].dtype.name
        records = Records("uint4", group, kind, zeros="uint8")
        return QuantizedTensor((num_outputs, num_inputs), stored, planes, is_column_major=True, records=lambda: records)


def _read_codes(reader: CheckpointReader, stored: str, inputs: slice, outputs: slice) -> np.ndarray:
    """Return a box of packed codes, unpacked: uint8 [outputs, inputs]."""
    first, last = outputs.start // _PER_WORD, -(-outputs.stop // _PER_WORD)
    words = np.ascontiguousarray(reader.read(stored, (inputs, slice(first, last))).view(np.uint32).T)
    codes = np.empty((words.shape[0], _PER_WORD, words.shape[1]), np.uint8)
    for column, nibble in enumerate(_NIBBLE_OF_COLUMN):
        codes[:, column] = (words >> np.uint32(4 * nibble)) & np.uint32(15)
    skip = outputs.start - first * _PER_WORD
    return codes.reshape(-1, words.shape[1])[skip : skip + outputs.stop - outputs.start]
