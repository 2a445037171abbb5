"""Checkpoints of random tensors, in the names and shapes that a model's layers declare."""

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.layers.parallel import Scope
from jaxserve.models.abstract import abstract_model
from jaxserve.models.loading import read_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 51,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "eos_token_id": None,
    "dtype": "float32",
}
"""A small ``config.json``, for tests to change."""
DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
"""One with latents and experts."""

SHARING: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 5,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 51,
}
"""One whose last layers read the keys and values of others, with embeddings for each layer."""


def write_checkpoint(directory: Path, config: dict[str, Any], seed: int) -> None:
    """Writes ``config.json`` and the tensors; the same for a seed."""
    text = json.dumps(config)
    (directory / "config.json").write_text(text)
    generator = np.random.default_rng(seed)
    tensors = {name: generator.normal(0.0, 0.5, shape).astype(np.float32) for name, shape in _shapes(text)}
    save_file(tensors, directory / "model.safetensors")


@functools.cache
def _shapes(config: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a ``config.json``, sorted."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        recipes = abstract_model(read_model_config(Path(folder)), Scope(), lambda axes: device).recipes
    return sorted(dict(source for recipe in recipes.values() for source in recipe.sources).items())


def write_checkpoint_with_tokenizer(directory: Path, config: dict[str, Any], seed: int) -> None:
    """Writes a checkpoint with the demo model's tokenizer."""
    write_checkpoint(directory, config, seed)
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """Copies the demo model's tokenizer, of 360 tokens."""
    for path in MODEL_DIRECTORY.glob("*token*.json"):
        shutil.copy(path, directory)
