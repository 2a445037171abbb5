"""MLX's affine quantization: what Macs download.

``weight`` uint32 [N, K * bits / 32] holds a stream of codes along the inputs, the lowest bits first; ``scales`` and
``biases`` are [N, K / group]. A weight is ``code * scale + bias``. A module is quantized where it has ``scales``, the
embedding and the head included. MLX stores all experts of a layer in one tensor, [E, N, ...].
"""

import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.quantized.format import Box, QuantizedTensor, check_tensor, group_by_suffix, group_indices, info_of
from checkpoints.quantized.planes import Planes, read_codes
from checkpoints.quantized.records import Records
from checkpoints.quantized.settings import Settings
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import TensorInfo

_NAME = "MLX"
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_WORD = 32
_UINT32 = (np.dtype(np.uint32),)
_FLOATS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
_PARTS = ("weight", "scales", "biases")
_FUSED_EXPERTS = re.compile(r"(.*\.mlp)\.switch_mlp\.(\w+)")


class Mlx:
    """The format for the settings of one checkpoint.

    Raises:
        CheckpointError: A setting is not supported.
    """

    name = _NAME
    quantizes_activations = False
    ignored = re.compile(r"(?!)")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._check(settings)
        self._bits = settings.choice("bits", _BITS)
        self._group = settings.choice("group_size", _GROUPS, default=64)
        for name, value in settings.fields.items():
            if isinstance(value, Mapping):
                self._check(settings.nested(name))

    def _check(self, settings: Settings) -> None:
        mode = settings.text("mode", "affine")
        if mode != "affine":
            raise settings.error(f"mode={mode!r} is not supported; supported: affine")

    def logical_names(self, tensors: Mapping[str, TensorInfo | None]) -> dict[str, tuple[str, ...]]:
        """Return the stored tensors of each quantized logical tensor; those of experts need the tensors' shapes."""
        found: dict[str, tuple[str, ...]] = {}
        for module, parts in group_by_suffix(tensors, _PARTS).items():
            if "scales" not in parts:
                continue
            stored = tuple(f"{module}.{part}" for part in _PARTS)
            experts, info = _FUSED_EXPERTS.fullmatch(module), tensors[parts["scales"]]
            if experts is None:
                found[f"{module}.weight"] = stored
            elif info is not None and len(info.shape) == 3:
                for index in range(info.shape[0]):
                    found[f"{experts[1]}.experts.{index}.{experts[2]}.weight"] = stored
        return found

    def open(self, name: str, stored: tuple[str, ...], reader: CheckpointReader) -> QuantizedTensor:
        """Return a logical tensor; see ``Format``."""
        weight, scales, biases = stored
        module = weight.removesuffix(".weight")
        own = self._settings.fields.get(module)
        fields = self._settings.nested(module) if isinstance(own, Mapping) else self._settings
        bits = fields.choice("bits", _BITS, default=self._bits)
        group = fields.choice("group_size", _GROUPS, default=self._group)
        shape = info_of(reader, _NAME, weight).shape
        is_fused = _FUSED_EXPERTS.fullmatch(module) is not None
        if len(shape) != 2 + is_fused or shape[-1] * _WORD % (bits * group):
            raise CheckpointError(
                f"tensor {weight!r} (MLX) has shape {list(shape)}, expected rows of whole groups of {group} codes of "
                f"{bits} bits"
            )
        columns = shape[-1] * _WORD // bits
        why = f"{columns} columns in groups of {group} codes of {bits} bits"
        check_tensor(reader, _NAME, weight, shape, _UINT32, why)
        for part in (scales, biases):
            check_tensor(reader, _NAME, part, (*shape[:-1], columns // group), _FLOATS, why)
        place = ()
        if is_fused:
            expert = int(name.rsplit(".", 3)[-3])
            place = (slice(expert, expert + 1),)

        def read(part: str, rows: slice, needed: slice) -> np.ndarray:
            found = reader.read(part, (*place, rows, needed))
            return found.reshape(found.shape[-2:])

        def planes(box: Box) -> Planes:
            groups, needed = group_indices(box.columns.start, box.columns.stop, group)
            codes, blocks = read_codes(lambda words: read(weight, box.rows, words), box.columns, bits, shape[-1])
            return Planes(
                codes,
                read(scales, box.rows, needed).astype(np.float32),
                biases=read(biases, box.rows, needed).astype(np.float32),
                columns=groups,
                blocks=blocks,
            )

        kinds = (reader.tensors[part].dtype.name for part in (scales, biases))
        scale_kind, bias_kind = kinds
        records = Records("uint4" if bits <= 4 else "uint8", group, scale_kind, biases=bias_kind)
        return QuantizedTensor((shape[-2], columns), stored, planes, records=lambda: records)
