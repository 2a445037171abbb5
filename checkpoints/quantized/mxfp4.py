"""MXFP4 as GPT-OSS is published: the experts' matrices in blocks of 32 four-bit floats.

``<name>_blocks`` uint8 [E, N, K / 32, 16] and ``<name>_scales`` uint8 [E, N, K / 32] stand for ``<name>`` [E, K, N],
which is how the 16-bit checkpoints of this family store it. OpenAI's own files have a dot instead of the underscore.
"""

import re
from collections.abc import Mapping

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.float4 import MXFP4_GROUP, float4_records, powers_of_two, read_float4
from checkpoints.quantized.format import Box, QuantizedTensor, check_tensor, info_of
from checkpoints.quantized.planes import Planes
from checkpoints.quantized.settings import Settings
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import TensorInfo

_NAME = "MXFP4"
_BYTES = MXFP4_GROUP // 2
_UINT8 = (np.dtype(np.uint8),)


class Mxfp4:
    """The format for the settings of one checkpoint; it has none that change the numbers."""

    name = _NAME
    quantizes_activations = False
    ignored = re.compile(r"(?!)")

    def __init__(self, settings: Settings) -> None:
        del settings

    def logical_names(self, tensors: Mapping[str, TensorInfo | None]) -> dict[str, tuple[str, ...]]:
        """Return the stored tensors of each quantized logical tensor."""
        marks = [(name.removesuffix("blocks"), name) for name in tensors if name.endswith(("_blocks", ".blocks"))]
        return {base[:-1]: (name, f"{base}scales") for base, name in marks}

    def open(self, name: str, stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
        """Return a logical tensor; see ``Format``."""
        blocks, scales = stored
        shape = info_of(reader, _NAME, blocks).shape
        if len(shape) != 4 or shape[3] != _BYTES:
            raise CheckpointError(
                f"tensor {blocks!r} (MXFP4) has shape {list(shape)}, expected [experts, rows, groups, 16]"
            )
        why = f"{shape[2]} groups of {MXFP4_GROUP} in each of {shape[1]} rows of {shape[0]} experts"
        check_tensor(reader, _NAME, blocks, shape, _UINT8, why)
        check_tensor(reader, _NAME, scales, shape[:3], _UINT8, why)

        def planes(box: Box) -> Planes:
            (expert,) = box.leading
            place = slice(expert, expert + 1)

            def read_bytes(rows: slice, columns: slice) -> np.ndarray:
                first, last = columns.start // _BYTES, -(-columns.stop // _BYTES)
                data = reader.read(blocks, (place, rows, slice(first, last), slice(0, _BYTES)))
                skip = columns.start - first * _BYTES
                return data.reshape(data.shape[1], -1)[:, skip : skip + columns.stop - columns.start]

            def read_scales(rows: slice, columns: slice) -> np.ndarray:
                return powers_of_two(reader.read(scales, (place, rows, columns))[0], scales)

            return read_float4(read_bytes, read_scales, box.columns, box.rows, MXFP4_GROUP).transposed

        logical = (shape[0], shape[2] * MXFP4_GROUP, shape[1])
        records = float4_records(MXFP4_GROUP, "float8_e8m0fnu", is_transposed=True)
        return QuantizedTensor(logical, stored, planes, is_column_major=True, records=lambda: records)
