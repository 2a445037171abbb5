"""Tensors that hold a matrix of all experts of a layer, shown as the tensors of each expert.

Qwen3-VL-MoE and Llama 4, among others, have gate and up of all experts in ``experts.gate_up_proj`` and the matrices
back in ``experts.down_proj``: as ``[experts, in, out]`` in the files that their makers published, as
``[experts, out, in]`` in those that transformers 5 saves. The two shapes together tell which.
"""

import re
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np

from checkpoints.arranged import View, part, stored, transposed
from checkpoints.errors import CheckpointError
from checkpoints.reader import CheckpointReader
from checkpoints.tensor_info import Bounds

_GATE_UP: Final = re.compile(r".*\.experts\.gate_up_proj(\.weight)?")


def fused_experts(tensors: Collection[str]) -> list[str]:
    """Return the names of the tensors with gate and up of all experts of a layer, without biases."""
    return [name for name in tensors if _GATE_UP.fullmatch(name) and f"{name}_bias" not in tensors]


def arrange_experts(reader: CheckpointReader) -> Mapping[str, View]:
    """Return the matrices ``[out, in]`` of each expert: ``experts.0.gate_proj.weight``, and so on.

    Raises:
        CheckpointError: A layer has no ``down_proj``, or one of a shape that does not fit.
    """
    views: dict[str, View] = {}
    for name in fused_experts(reader.tensors):
        gate_up, down = stored(reader, name), stored(reader, name.replace("gate_up_proj", "down_proj"))
        shapes = gate_up.info.shape, down.info.shape
        (count, rows, columns), (num_down, down_rows, down_columns) = (
            shape if len(shape) == 3 else (0, 0, 0) for shape in shapes
        )
        if (rows, columns) == (down_columns, 2 * down_rows):
            gate_up, down, ffn_size = transposed(gate_up), transposed(down), down_rows
        else:
            ffn_size = down_columns
        if not count or count != num_down or gate_up.info.shape[1:] != (2 * ffn_size, down.info.shape[1]):
            raise CheckpointError(
                f"tensor {name!r} has shape {list(shapes[0])} and {down.sources[0]!r} {list(shapes[1])}, expected "
                "[experts, 2 * F, D] and [experts, D, F], or both with the last two axes exchanged"
            )
        prefix = name.partition("gate_up_proj")[0]
        for index in range(count):
            own = _matrix(gate_up, index)
            views[f"{prefix}{index}.gate_proj.weight"] = part(own, 0, ffn_size, -2)
            views[f"{prefix}{index}.up_proj.weight"] = part(own, ffn_size, 2 * ffn_size, -2)
            views[f"{prefix}{index}.down_proj.weight"] = _matrix(down, index)
    return views


def _matrix(view: View, index: int) -> View:
    """Return one matrix of a tensor [N, R, C]."""

    def read(bounds: Bounds) -> np.ndarray:
        return view.read(((index, index + 1), *bounds))[0]

    return View(view.info._replace(shape=view.info.shape[1:]), view.sources, read)
