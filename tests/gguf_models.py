"""Writes GGUF files of whole models for tests: Hugging Face checkpoints in llama.cpp's form.

Names are those of the package ``gguf`` if a test passes its map; the few of a dense Llama are written down here.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.gguf_arrangements import ARRANGEMENTS
from tests.gguf_files import Blocks, interleave, plain, random_blocks

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
INTERLEAVED = ("llama", "granite", "granitemoe", "smollm3")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_LAYER = re.compile(r"(?:model\.layers|gpt_neox\.layers|transformer\.h)\.(\d+)\.(.*)")

Store = Callable[[str, np.ndarray], tuple[Blocks, np.ndarray]]
"""Returns how a tensor is stored in the file, and the values that are read from it."""


def llama_name(module: str) -> str:
    """Return a module's name in the file."""
    in_layer = _LAYER.fullmatch(module)
    return f"blk.{in_layer[1]}.{LLAMA_NAMES[in_layer[2]]}" if in_layer else LLAMA_NAMES[module]


def store_plain(name: str, array: np.ndarray) -> tuple[Blocks, np.ndarray]:
    """Store a tensor as it is."""
    return plain(array), array


def store_q8_0(name: str, array: np.ndarray) -> tuple[Blocks, np.ndarray]:
    """Store a matrix whose rows are multiples of 32 as Q8_0: a float16 scale and 32 codes of 8 bits each."""
    if array.ndim < 2 or array.shape[-1] % 32:
        return store_plain(name, array)
    groups = array.reshape(-1, 32)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype(np.float16)
    wide = scales.astype(np.float32)
    codes = (
        np.round(np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0)).clip(-127, 127).astype(np.int8)
    )
    data = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1)
    return Blocks(array.shape, 8, data.tobytes()), (codes * wide).astype(np.float32).reshape(array.shape)


def random_store(
    kinds: Mapping[str, tuple[str, int, int, int]], decode: Callable[[str, np.ndarray], np.ndarray]
) -> Store:
    """Return a function that replaces matrices by random blocks.

    Args:
        kinds: Name, number, elements and bytes of a block's type, by the end of a module's name; "" for the others.
        decode: Returns the weights of blocks, from the type's name and uint8 [N, bytes of a block].
    """
    rng = np.random.default_rng(0)

    def store(name: str, array: np.ndarray) -> tuple[Blocks, np.ndarray]:
        kind, number, block, num_bytes = next(kinds[end] for end in kinds if name.removesuffix(".weight").endswith(end))
        if array.ndim < 2 or array.shape[-1] % block:
            return store_plain(name, array)
        blocks = random_blocks(kind, array.size // block, num_bytes, rng, scale=2.0**-10)
        return Blocks(array.shape, number, blocks.tobytes()), decode(kind, blocks).reshape(array.shape)

    return store


def to_gguf(
    architecture: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    store: Store = store_plain,
    name_of: Callable[[str], str] = llama_name,
) -> tuple[dict[str, Blocks], dict[str, np.ndarray]]:
    """Return a checkpoint's tensors as those of a file, and the values that are read from it by the original names."""
    written, values = _rearranged(architecture, config, tensors, store)
    experts: dict[str, dict[int, str]] = {}
    for name, array in tensors.items():
        if name in values:
            continue
        match = _EXPERT.fullmatch(name)
        if match is not None:
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = name
            continue
        module, _, kind = name.rpartition(".")
        moved, back = _arrange(architecture, config, name, array)
        written[f"{name_of(module)}.{kind}"], found = store(name, moved)
        values[name] = back(found)
    for name, members in experts.items():
        stacked = np.stack([tensors[members[index]] for index in sorted(members)])
        written[f"{name_of(name.removesuffix('.weight'))}.weight"], found = store(name, stacked)
        values |= {members[index]: found[index] for index in sorted(members)}
    return written, values


def _rearranged(
    architecture: str, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], store: Store
) -> tuple[dict[str, Blocks], dict[str, np.ndarray]]:
    """Do the same for those tensors alone that the file has in other pieces."""
    written: dict[str, Blocks] = {}
    values: dict[str, np.ndarray] = {}
    if architecture not in ARRANGEMENTS:
        return written, values
    layers: dict[int, tuple[str, dict[str, np.ndarray]]] = {}
    for name, array in tensors.items():
        match = _LAYER.fullmatch(name)
        if match is not None:
            layers.setdefault(int(match[1]), (name.removesuffix(match[2]), {}))[1][match[2]] = array
    for index, (prefix, layer) in layers.items():
        found: dict[str, np.ndarray] = {}
        for end, array in ARRANGEMENTS[architecture].apart(config, layer).items():
            written[f"blk.{index}.{end}"], found[end] = store(end, array)
        together = ARRANGEMENTS[architecture].together(config, found)
        values |= {f"{prefix}{end}": array for end, array in together.items()}
    return written, values


def _arrange(
    architecture: str, config: Mapping[str, Any], name: str, array: np.ndarray
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return a tensor as llama.cpp arranges it, and how to arrange it back."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if architecture in INTERLEAVED and heads is not None:
        count = config[heads]

        def back(found: np.ndarray) -> np.ndarray:
            size = len(found) // count
            order = interleave(np.arange(len(found)), count)
            assert size % 2 == 0
            result = np.empty_like(found)
            result[order] = found
            return result

        return interleave(array, count), back
    if architecture.startswith("gemma") and "norm" in name:
        return array + 1, lambda found: found - 1
    if name.endswith("shared_expert_gate.weight"):
        return array[0], lambda found: found[None]
    return array, lambda found: found


def metadata_of(architecture: str, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the metadata that describe a configuration's sizes, and further fields of the architecture; None leaves a
    field out."""
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "rope.dimension_count": config["head_dim"],
        **more,
    }
    given = {f"{architecture}.{name}": value for name, value in fields.items() if value is not None}
    return {"general.architecture": architecture, **given}
