"""NVIDIA ModelOpt: FP8 with one scale per tensor, or NVFP4 in groups of 16.

NVFP4: ``weight`` uint8 [N, K / 2], ``weight_scale`` float8 [N, K / 16], and ``weight_scale_2``, one float32 that
multiplies the others. ``input_scale`` belongs to activations.
"""

import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.float4 import NVFP4_GROUP, open_float4
from checkpoints.quantized.format import QuantizedTensor, info_of, read_number
from checkpoints.quantized.scaled import ACTIVATION_SCALES, open_scaled, pair_scales
from checkpoints.quantized.settings import Settings
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import TensorInfo

_NAME = "ModelOpt"
_ALGORITHMS = ("fp8", "fp8_pb_wo", "nvfp4", "w4a16_nvfp4", "mixed_precision")
_E4M3 = (np.dtype(ml_dtypes.float8_e4m3fn),)


class ModelOpt:
    """The format for the settings of one checkpoint.

    Raises:
        CheckpointError: The algorithm is not supported.
    """

    name = _NAME
    quantizes_activations = True
    ignored = re.compile(ACTIVATION_SCALES)

    def __init__(self, settings: Settings) -> None:
        algorithm = settings.text("quant_algo", settings.nested("quantization").text("quant_algo", "fp8"))
        if algorithm not in _ALGORITHMS:
            known = ", ".join(name.upper() for name in _ALGORITHMS)
            raise settings.error(f"quant_algo={algorithm.upper()!r} is not supported; supported: {known}")
        self._block = (128, 128) if algorithm in ("fp8_pb_wo", "mixed_precision") else None

    def logical_names(self, tensors: Mapping[str, TensorInfo | None]) -> dict[str, tuple[str, ...]]:
        """Return the stored tensors of each quantized logical tensor."""
        pairs = pair_scales(tensors, ("_scale",))
        return {
            name: (*pair, f"{name}_scale_2") if f"{name}_scale_2" in tensors else pair for name, pair in pairs.items()
        }

    def open(self, name: str, stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
        """Return a logical tensor; see ``Format``."""
        weight, scale, *overall = stored
        if not overall and info_of(reader, _NAME, weight).dtype == np.uint8:
            overall = [f"{name}_scale_2"]
        if not overall:
            return open_scaled(reader, _NAME, weight, scale, self._block)
        shape = info_of(reader, _NAME, weight).shape
        if len(shape) != 2 or 2 * shape[1] % NVFP4_GROUP:
            raise CheckpointError(
                f"tensor {weight!r} (ModelOpt) has shape {list(shape)}, expected rows of whole groups"
            )
        factor = read_number(reader, _NAME, overall[0])
        found = open_float4(
            reader,
            _NAME,
            weight,
            scale,
            NVFP4_GROUP,
            _E4M3,
            lambda scales: scales.astype(np.float32),
            _E4M3[0].name,
            factor,
        )
        return found._replace(stored=stored)
