"""Names of tensors in GGUF files and in Hugging Face's checkpoints, architecture by architecture.

Some values differ too. Architectures with llama.cpp's older rotary embedding have the rows of queries and keys
interleaved: the two halves of a head, which are rotated together, alternate. Gemma's norms are stored with the 1 that
the model adds.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from checkpoints.errors import CheckpointError
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
    """

    stored: str
    shape: tuple[int, ...]
    expert: int | None = None
    num_heads: int = 0
    offset: float = 0.0


class Architecture(NamedTuple):
    """An architecture of GGUF files.

    Attributes:
        hf_class: Its name in Hugging Face's ``config.json``.
        model_type: Its ``model_type`` there.
        layer: Modules of a layer: from the name in the file to that in Hugging Face's checkpoints, where ``{}`` stands
            for the index of an expert.
        is_interleaved: Whether the rows of queries and keys are interleaved.
        norm_offset: What stored norms have added.
    """

    hf_class: str
    model_type: str
    layer: Mapping[str, str]
    is_interleaved: bool = False
    norm_offset: float = 0.0


_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DENSE = {**_ATTENTION, **_MLP}
_AFTER_NORMS = {name: _SANDWICH_NORMS[name] for name in ("post_attention_norm", "post_ffw_norm")}
_OLMO2 = {name: module for name, module in _DENSE.items() if "norm" not in name} | _HEAD_NORMS | _AFTER_NORMS
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_EXPERTS = {**_ATTENTION, **_HEAD_NORMS, **_EXPERTS}

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma": Architecture("GemmaForCausalLM", "gemma", _DENSE, norm_offset=1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", {**_DENSE, **_SANDWICH_NORMS}, norm_offset=1.0),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", {**_DENSE, **_SANDWICH_NORMS, **_HEAD_NORMS}, norm_offset=1.0
    ),
    "granite": Architecture("GraniteForCausalLM", "granite", _DENSE, is_interleaved=True),
    "llama": Architecture("LlamaForCausalLM", "llama", _DENSE, is_interleaved=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", _OLMO2),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _PHI3),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _DENSE),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", {**_ATTENTION, **_EXPERTS, **_SHARED_EXPERT}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", {**_DENSE, **_HEAD_NORMS}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _QWEN3_EXPERTS),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", _DENSE, is_interleaved=True),
}
"""By ``general.architecture``; "llama" is also that of Mistral's models, and of Mixtral, which has experts."""

MIXTRAL = Architecture("MixtralForCausalLM", "mixtral", {**_ATTENTION, **_MIXTRAL_EXPERTS}, is_interleaved=True)

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of the configuration: what rotary frequencies are divided by."""

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_LONE_EXPERT = re.compile(r"blk\.(\d+)\.(\w+)\.(\d+)\.(weight)")
"""A tensor of one expert, as files from before April 2024 have them."""
_OTHER_TENSOR = re.compile(r"(\w+)\.(weight|bias)")
_HEAD_COUNTS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


def architecture_of(metadata: Metadata) -> Architecture:
    """Return the architecture of a file.

    Raises:
        CheckpointError: It is not supported, or not named.
    """
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise metadata.error(
            "general.architecture", f"{name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return MIXTRAL if name == "llama" and metadata.integer("llama.expert_count", 0) else ARCHITECTURES[name]


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
        if stored not in ROPE_FACTORS:
            found |= _named(metadata, architecture, stored, info.shape)
    return found


def _named(metadata: Metadata, architecture: Architecture, stored: str, shape: tuple[int, ...]) -> dict[str, Source]:
    """Return the tensors that a stored one has."""
    in_layer, other = _LAYER_TENSOR.fullmatch(stored), _OTHER_TENSOR.fullmatch(stored)
    lone = _LONE_EXPERT.fullmatch(stored)
    if lone and f"{lone[2]}_exps" in architecture.layer:
        module = architecture.layer[f"{lone[2]}_exps"].format(int(lone[3]))
        return {f"model.layers.{int(lone[1])}.{module}.weight": Source(stored, shape)}
    if in_layer and in_layer[2] in architecture.layer:
        part, kind = in_layer[2], in_layer[3]
        name = f"model.layers.{int(in_layer[1])}.{architecture.layer[part]}.{kind}"
    elif other and other[1] in _OUTSIDE:
        part, name = other[1], f"{_OUTSIDE[other[1]]}.{other[2]}"
    else:
        raise CheckpointError(f"{metadata.path}: tensor {stored!r} is not one of a {architecture.hf_class}")
    if "{}" in name:
        if len(shape) < 2:
            raise CheckpointError(f"{metadata.path}: tensor {stored!r} has shape {list(shape)}, expected one axis more")
        return {name.format(expert): Source(stored, shape[1:], expert) for expert in range(shape[0])}
    if name.endswith("shared_expert_gate.weight"):
        return {name: Source(stored, (1, *shape[-1:]))}
    heads = _num_interleaved(metadata, part) if architecture.is_interleaved else 0
    if heads and (heads < 0 or not shape or shape[0] % (2 * heads)):
        raise CheckpointError(
            f"{metadata.path}: tensor {stored!r} has shape {list(shape)}, expected an even number of rows for each of "
            f"{heads} heads"
        )
    return {name: Source(stored, shape, None, heads, architecture.norm_offset if part.endswith("norm") else 0.0)}


def _num_interleaved(metadata: Metadata, part: str) -> int:
    """Return the number of heads of queries or keys; 0 for any other module."""
    if part not in _HEAD_COUNTS:
        return 0
    return metadata.one_for_all_layers(f"{metadata.text('general.architecture')}.{_HEAD_COUNTS[part]}")
