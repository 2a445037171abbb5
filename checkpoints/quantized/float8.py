"""FP8 as DeepSeek, Kimi and Qwen publish it (``fp8``), as FBGEMM writes it (``fbgemm_fp8``) and as ModelOpt does.

A weight is stored in float8 with a scale to multiply with: in blocks of 128 x 128 ``weight_scale_inv`` (the name
misleads), for all or for each row ``weight_scale``. Activations, which some of these formats quantize too, stay as they
are.
"""

import re
from collections.abc import Mapping

from checkpoints.quantized.format import QuantizedTensor
from checkpoints.quantized.scaled import ACTIVATION_SCALES, open_scaled, pair_scales
from checkpoints.quantized.settings import Settings
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import TensorInfo

_NAME = "FP8"


class Float8:
    """The format for the settings of one checkpoint.

    Raises:
        CheckpointError: A setting is not supported.
    """

    name = _NAME
    quantizes_activations = True
    ignored = re.compile(ACTIVATION_SCALES)

    def __init__(self, settings: Settings) -> None:
        self._block = settings.sizes("weight_block_size")
        if settings.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2"):
            raise settings.error(f"fmt={settings.fields['fmt']!r} is not supported; supported: e4m3, e5m2")

    def logical_names(self, tensors: Mapping[str, TensorInfo | None]) -> dict[str, tuple[str, ...]]:
        """Return the stored tensors of each quantized logical tensor."""
        return pair_scales(tensors, ("_scale_inv", "_scale"))

    def open(self, name: str, stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
        """Return a logical tensor; see ``Format``."""
        weight, scale = stored
        return open_scaled(reader, _NAME, weight, scale, self._block)
