"""Random DFlash heads on disk, and what they draft, read from the files with NumPy alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.draft_heads import Tensors, attention, below, mlp, norm, rotate
from tests.head_pairs import MASK
from tests.random_checkpoint import LLAMA

HEAD: dict[str, Any] = {
    **LLAMA,
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 360,
    "rms_norm_eps": 1e-6,
    "block_size": 4,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 3, 5]},
}
"""A ``config.json`` for a target of 16 features and 8 layers."""


def write_dflash(directory: Path, config: dict[str, Any], seed: int = 0, **changed: Any) -> dict[str, np.ndarray]:
    """Writes a head and returns its tensors; ``changed`` are tensors that are added."""
    size, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    num_aux = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, num_aux * size)}
    shapes |= {f"{name}.weight": (size,) for name in ("hidden_norm", "norm")}
    for index in range(config["num_hidden_layers"]):
        name = f"layers.{index}"
        shapes |= {f"{name}.{part}_layernorm.weight": (size,) for part in ("input", "post_attention")}
        shapes |= {f"{name}.self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
        widths = {"q": (query, size), "k": (key, size), "v": (key, size), "o": (size, query)}
        shapes |= {f"{name}.self_attn.{part}_proj.weight": shape for part, shape in widths.items()}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (ffn, size) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (size, ffn)
    generator = np.random.default_rng(seed)
    tensors = {name: generator.normal(0.0, 0.4, shape).astype(np.float32) for name, shape in sorted(shapes.items())}
    for name in tensors:  # so that attention to single tokens of the context changes drafts
        tensors[name] = (
            1 + tensors[name] if "norm" in name else 3 * tensors[name] if "o_proj" in name else tensors[name]
        )
    tensors |= changed
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return tensors


def block_hidden(
    tensors: Tensors, config: dict[str, Any], aux: np.ndarray, block: np.ndarray, *, causal: bool = False
) -> np.ndarray:
    """Normalized outputs for the embeddings of a block after a context, whose hidden states in the target are given."""
    context = norm(aux @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], 1e-6)
    head_dim, num_context = config["head_dim"], len(aux)
    positions, x = np.arange(num_context + len(block)), block
    for index in range(config["num_hidden_layers"]):
        weight = below(tensors, f"layers.{index}.")
        normed = norm(x, weight["input_layernorm.weight"], 1e-6)
        both = np.concatenate([context, normed])
        query = _heads(normed, weight, "q", head_dim, positions[num_context:])
        key = _heads(both, weight, "k", head_dim, positions)
        value = (both @ weight["self_attn.v_proj.weight"].T).reshape(len(both), -1, head_dim)
        group = query.shape[1] // key.shape[1]
        key, value = np.repeat(key, group, 1), np.repeat(value, group, 1)
        attended = attention(query, key, value, head_dim**-0.5, causal=causal)
        x = x + attended.reshape(len(x), -1) @ weight["self_attn.o_proj.weight"].T
        x = x + mlp(norm(x, weight["post_attention_layernorm.weight"], 1e-6), weight, "mlp.")
    return norm(x, tensors["norm.weight"], 1e-6)


def _heads(x: np.ndarray, weight: Tensors, part: str, head_dim: int, positions: np.ndarray) -> np.ndarray:
    """Queries or keys, each head normalized and rotated."""
    found = (x @ weight[f"self_attn.{part}_proj.weight"].T).reshape(len(x), -1, head_dim)
    return rotate(norm(found, weight[f"self_attn.{part}_norm.weight"], 1e-6), positions, halves=True)
