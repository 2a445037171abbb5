"""Where GGUF files have the tensors of Hugging Face's checkpoints: names, rows and experts.

Some values differ too. Architectures with llama.cpp's older rotary embedding have the rows of queries and keys
interleaved: the two halves of a head, which are rotated together, alternate. Gemma's norms are stored with the 1 that
the model adds.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from checkpoints.errors import CheckpointError
from checkpoints.quantized.gguf_architectures import ARCHITECTURES, GRANITE_SHARED, MIXTRAL, Architecture
from checkpoints.quantized.gguf_file import Metadata
from checkpoints.tensor_info import TensorInfo


class Source(NamedTuple):
    """Where the values of a tensor with one of Hugging Face's names are.

    Attributes:
        stored: Name of the tensor in the file.
        shape: The shape of the tensor in Hugging Face's form, counted in what is stored.
        expert: Index on the first axis of a tensor that has those of all experts; None for any other.
        num_heads: Heads whose rows are interleaved; 0 if rows lie in order.
        offset: What the stored values have added.
        first_row: The row of the stored matrices that is the tensor's first.
    """

    stored: str
    shape: tuple[int, ...]
    expert: int | None = None
    num_heads: int = 0
    offset: float = 0.0
    first_row: int = 0


ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of the configuration: what rotary frequencies are divided by."""

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_LONE_EXPERT = re.compile(r"blk\.(\d+)\.(\w+)\.(\d+)\.(weight)")
"""A tensor of one expert, as files from before April 2024 have them."""
_OTHER_TENSOR = re.compile(r"(\w+)\.(weight|bias)")
_GATE_AND_UP, _GATE_OR_UP = "ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps")
_HEAD_COUNTS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


def architecture_of(metadata: Metadata) -> Architecture:
    """Return the architecture of a file.

    Raises:
        CheckpointError: It is not supported, or not named.
    """
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise metadata.error(
            "general.architecture",
            f"{name!r} is not supported; supported: {', '.join(ARCHITECTURES)}; if the model's own checkpoint has a "
            "supported architecture, load that (safetensors)",
        )
    if name == "llama" and metadata.integer("llama.expert_count", 0):
        return MIXTRAL
    if name == "granitemoe" and metadata.integer("granitemoe.expert_shared_feed_forward_length", 0):
        return GRANITE_SHARED
    return ARCHITECTURES[name]


def sources(metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Source]:
    """Return where each tensor is, by Hugging Face's name.

    Args:
        metadata: Metadata of the file.
        tensors: The tensors in the file.

    Raises:
        CheckpointError: The architecture is not supported, or a tensor is not one of it.
    """
    architecture = architecture_of(metadata)
    found: dict[str, Source] = {}
    for stored, info in tensors.items():
        if stored not in ROPE_FACTORS and not _is_scale(stored, tensors):
            found |= _named(metadata, architecture, stored, info.shape)
    return found


def _named(metadata: Metadata, architecture: Architecture, stored: str, shape: tuple[int, ...]) -> dict[str, Source]:
    """Return the tensors that a stored one has."""
    in_layer, other = _LAYER_TENSOR.fullmatch(stored), _OTHER_TENSOR.fullmatch(stored)
    lone = _LONE_EXPERT.fullmatch(stored)
    if lone and f"{lone[2]}_exps" in architecture.layer:
        module = architecture.layer[f"{lone[2]}_exps"].format(int(lone[3]))
        return {f"{architecture.layers}.{int(lone[1])}.{module}.weight": Source(stored, shape)}
    if in_layer and in_layer.group(2, 3) == (_GATE_AND_UP, "weight") and _GATE_OR_UP[0] in architecture.layer:
        return _halves(metadata, architecture, stored, shape)
    if in_layer and in_layer[2] in architecture.layer:
        part, kind = in_layer[2], in_layer[3]
        name = f"{architecture.layers}.{int(in_layer[1])}.{architecture.layer[part]}.{kind}"
    elif other and other[1] in architecture.outside:
        part, name = other[1], f"{architecture.outside[other[1]]}.{other[2]}"
    else:
        raise CheckpointError(f"{metadata.path}: tensor {stored!r} is not one of a {architecture.hf_class}")
    if "{}" in name:
        if len(shape) < 2:
            raise CheckpointError(f"{metadata.path}: tensor {stored!r} has shape {list(shape)}, expected one axis more")
        return _experts(name, Source(stored, shape))
    if name.endswith("shared_expert_gate.weight"):
        return {name: Source(stored, (1, *shape[-1:]))}
    heads = _num_interleaved(metadata, part) if architecture.is_interleaved else 0
    if heads and (heads < 0 or not shape or shape[0] % (2 * heads)):
        raise CheckpointError(
            f"{metadata.path}: tensor {stored!r} has shape {list(shape)}, expected an even number of rows for each of "
            f"{heads} heads"
        )
    return {name: Source(stored, shape, None, heads, architecture.norm_offset if part.endswith("norm") else 0.0)}


def _experts(name: str, source: Source) -> dict[str, Source]:
    """Return the tensor of each expert, or the one of all if the name has no place for an index."""
    if "{}" not in name:
        return {name: source}
    shape = source.shape
    return {name.format(expert): source._replace(shape=shape[1:], expert=expert) for expert in range(shape[0])}


def _halves(metadata: Metadata, architecture: Architecture, stored: str, shape: tuple[int, ...]) -> dict[str, Source]:
    """Return the tensors of experts whose gates and, in the rows below, up projections are in one."""
    if len(shape) != 3 or shape[1] % 2:
        raise CheckpointError(
            f"{metadata.path}: tensor {stored!r} has shape {list(shape)}, expected gate and up matrices of experts, "
            "with as many rows each"
        )
    layer, size = stored.split(".")[1], shape[1] // 2
    found: dict[str, Source] = {}
    for part, first_row in zip(_GATE_OR_UP, (0, size), strict=True):
        name = f"{architecture.layers}.{int(layer)}.{architecture.layer[part]}.weight"
        found |= _experts(name, Source(stored, (shape[0], size, shape[2]), first_row=first_row))
    return found


def scale_of(stored: str) -> str:
    """Return the name of the factor of an NVFP4 tensor: one number, or one for each expert."""
    return f"{stored.removesuffix('weight')}scale"


def _is_scale(stored: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether a tensor is the factor of another one or of its activations."""
    module, _, kind = stored.rpartition(".")
    return kind in ("scale", "input_scale") and f"{module}.weight" in tensors


def _num_interleaved(metadata: Metadata, part: str) -> int:
    """Return the number of heads of queries or keys; 0 for any other module."""
    if part not in _HEAD_COUNTS:
        return 0
    return metadata.one_for_all_layers(f"{metadata.text('general.architecture')}.{_HEAD_COUNTS[part]}")
