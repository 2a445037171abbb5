"""Checkpoints of random weights in the shapes of real models, written as fast as the disk takes them."""

import concurrent.futures
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_SHARED = {"hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False, "use_cache": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        **_SHARED,
    },
    "qwen-14b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        **_SHARED,
    },
}
LLAMA_70B = CONFIGS["llama-8b"] | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
_CHUNK = (32 << 20) + 7919  # odd, so that no two rows of a matrix begin at the same number
_SHARD_BYTES = 2 << 30


class Sizes(NamedTuple):
    """What a step has to read, and what a token costs.

    Attributes:
        read_bytes: Weights that a decode step reads: all but the embedding.
        kv_bytes: Keys and values of one token over all layers.
        matmul_flops: Of a token in all layers, the head left out.
        attention_flops: Of a token for each token that it sees.
        weight_bytes: Of the whole checkpoint.
    """

    read_bytes: int
    kv_bytes: int
    matmul_flops: int
    attention_flops: int
    weight_bytes: int


def config_of(name: str, is_tiny: bool = False) -> dict[str, Any]:
    """Return the config.json of a model, or of a tiny one of its kind."""
    return CONFIGS[name] | (_TINY if is_tiny else {})


def sizes_of(config: dict[str, Any]) -> Sizes:
    """From the shapes."""
    tensors = dict(tensor_shapes(config))
    weight_bytes = 2 * sum(math.prod(shape) for shape in tensors.values())
    embedding = 2 * math.prod(tensors["model.embed_tokens.weight"])
    layers = [math.prod(s) for name, s in tensors.items() if ".layers." in name and len(s) == 2]
    head_dim = head_dim_of(config)
    return Sizes(
        read_bytes=weight_bytes - embedding,
        kv_bytes=2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim,
        matmul_flops=2 * sum(layers),
        attention_flops=4 * config["num_hidden_layers"] * config["num_attention_heads"] * head_dim,
        weight_bytes=weight_bytes,
    )


def head_dim_of(config: dict[str, Any]) -> int:
    """Given, or what the heads leave."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face's names and shapes, in file order."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], head_dim_of(config)
    query, key = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        for name, width in (("q", query), ("k", key), ("v", key)):
            yield f"{layer}self_attn.{name}_proj.weight", (width, hidden)
            if config["model_type"] == "qwen2":
                yield f"{layer}self_attn.{name}_proj.bias", (width,)
        yield layer + "self_attn.o_proj.weight", (hidden, query)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", (ffn, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def write_checkpoint(directory: Path, config: dict[str, Any], shard_bytes: int = _SHARD_BYTES) -> int:
    """Write config.json and safetensors files, several at once; config.json last, so that it says all is there.

    Weights are normal numbers of standard deviation 0.02, taken again and again from one random piece at ever other
    places; norms are 1. There is no tokenizer.

    Returns:
        Bytes of all tensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    held = total = 0
    for name, shape in tensor_shapes(config):
        size = 2 * math.prod(shape)
        if held and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append((name, shape))
        held += size
        total += size
    count = min(_CHUNK, max(4096, total))
    numbers = np.random.default_rng(0).standard_normal(count, np.float32) * np.float32(0.02)
    piece = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(_write_shard, [directory / name for name in names], shards, [piece] * len(shards)))
    placed = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor, _ in shard}
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return total


def has_checkpoint(directory: Path) -> bool:
    """Return whether one was written there to the end."""
    return (directory / "config.json").exists()


def make_room(folder: Path, num_bytes: int, keep: Path) -> bool:
    """Return whether the disk has room for this many bytes, removing other checkpoints of the folder if needed."""
    spare = 4 << 30
    for other in sorted(folder.glob("model-*")):
        if shutil.disk_usage(folder).free < num_bytes + spare and other != keep:
            shutil.rmtree(other)
    return shutil.disk_usage(folder).free >= num_bytes + spare


def _write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], piece: np.ndarray) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    one = np.ones(1, ml_dtypes.bfloat16).view(np.uint16)[0]
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        place = 0
        for name, shape in tensors:
            left = math.prod(shape)
            if "norm" in name:
                file.write(np.full(left, one, np.uint16).data)
                continue
            while left:
                taken = min(left, piece.size - place)
                file.write(piece[place : place + taken].data)
                left -= taken
                place = (place + taken) % piece.size
