"""Tiny random checkpoints of the fuzz test of speculative decoding: targets, draft models and heads."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests import block_heads
from tests.block_heads import write_dflash
from tests.draft_heads import HEAD, write_eagle, write_eagle3, write_mtp
from tests.random_checkpoint import DEEPSEEK, LLAMA, SHARING, write_checkpoint, write_tokenizer

VOCAB_SIZE = 360
MAX_LENGTH = 128
_BASE = {**LLAMA, "vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_LENGTH, "eos_token_id": [2, 90, 91]}
_BASE |= {"pard_token": 17}
_HEAD = {**HEAD, "vocab_size": VOCAB_SIZE}
_WINDOW = {"sliding_window": 12}
FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": _BASE,
        "deep": {**_BASE, "num_hidden_layers": 8},
        "tied": {**_BASE, "tie_word_embeddings": True},
        "windowed": {**_BASE, **_WINDOW, "architectures": ["MistralForCausalLM"]},
        "mixed windows": {
            **_BASE,
            **_WINDOW,
            "architectures": ["Qwen2ForCausalLM"],
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
        "gemma3": {
            **_BASE,
            **_WINDOW,
            "architectures": ["Gemma3ForCausalLM"],
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        "gpt-oss": {
            **_BASE,
            **_WINDOW,
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.2,
        },
        "sharing": {**SHARING, **_BASE, "architectures": SHARING["architectures"], "num_hidden_layers": 4}
        | {"vocab_size_per_layer_input": VOCAB_SIZE},
        "mixtral": {
            **_BASE,
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "deepseek": {**DEEPSEEK, **_BASE, "architectures": DEEPSEEK["architectures"]},
    }
)
"""The ``config.json`` of each family of targets."""
WITH_EXPERTS = ("gpt-oss", "mixtral", "deepseek")
DRAFTERS = ("itself", "near", "another", "llama")
"""Draft models: the target, one with noise on its weights, one of its family, and a llama of one layer."""


def write_target(folder: Path, family: str, seed: int, is_foreseeable: bool) -> Path:
    """Write a target with a tokenizer; one of ``deepseek`` also has an MTP layer.

    Args:
        folder: Where to write it.
        family: Key of ``FAMILIES``.
        seed: Seed of its weights.
        is_foreseeable: Make the next token depend on the latest above all, so that texts repeat themselves.
    """
    directory = folder / "target"
    directory.mkdir()
    config = dict(FAMILIES[family])
    if family == "deepseek":
        write_mtp(directory, config, seed)
    else:
        write_checkpoint(directory, config, seed)
    if is_foreseeable:
        _change(directory, directory, lambda name, tensor: tensor / 8 if _adds_to_residual(name) else tensor)
        if family == "deepseek":
            _change(directory, directory, _foreseeing)
    write_tokenizer(directory)
    return directory


def write_drafter(folder: Path, target: Path, family: str, method: str, drafter: str, seed: int) -> Path | None:
    """Write the draft model or head of a method, and return its directory; None if it is in the target's.

    Args:
        folder: Where to write it.
        target: Directory of the target.
        family: Its family.
        method: Method of speculative decoding.
        drafter: Which draft model; see ``DRAFTERS``.
        seed: Seed of its weights.
    """
    directory = folder / "drafter"
    if method == "eagle":
        write_eagle(directory, {**_HEAD, "architectures": ["LlamaForCausalLM"]}, seed)
        return directory
    if method == "eagle3":
        write_eagle3(directory, {**_HEAD, "draft_vocab_size": 200, "mask_token_id": 17}, seed, mask_size=48)
        return directory
    if method == "dflash":
        write_dflash(directory, block_heads.HEAD, seed)
        return directory
    if method != "draft_model":
        return None
    if drafter == "itself":
        return target
    directory.mkdir()
    llama = {**_BASE, "num_hidden_layers": 1}
    write_checkpoint(directory, llama if drafter == "llama" else dict(FAMILIES[family]), seed + 1)
    if drafter == "near":
        generator = np.random.default_rng(seed)
        _change(target, directory, lambda _, tensor: tensor * generator.normal(1.0, 0.05, tensor.shape))
    return directory


def _adds_to_residual(name: str) -> bool:
    return any(part in name for part in ("o_proj", "down_proj", "w2"))


def _foreseeing(name: str, tensor: np.ndarray) -> np.ndarray:
    """Have the MTP layer of a foreseeable model look at the latest token above all."""
    if name.endswith("eh_proj.weight"):
        size = len(tensor)
        return np.concatenate([np.eye(size), tensor[:, size:] / 8], 1)
    return np.ones_like(tensor) if name.endswith("enorm.weight") else tensor


def _change(source: Path, target: Path, change: Any) -> None:
    """Write the tensors of a checkpoint, changed by their name and value, to another whose names are the same."""
    tensors = load_file(source / "model.safetensors")
    names = load_file(target / "model.safetensors").keys()
    changed = {name: np.asarray(change(name, tensors[name]), tensors[name].dtype) for name in sorted(names)}
    save_file(changed, target / "model.safetensors")
