"""Describes the model of a GGUF file as Hugging Face's ``config.json`` would, from its metadata and tensors."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from checkpoints import CheckpointError
from checkpoints.quantized.gguf_file import GgufFiles, Metadata
from jaxserve.api.errors import ConfigError
from jaxserve.models.gguf_families import GGUF_FAMILIES
from jaxserve.models.gguf_fields import GgufFields

_END_TEXTS: Final = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<EOT>",
)
"""Tokens that end a generation in llama.cpp too, whatever the metadata say."""
_CONTROL: Final = 3
_NEUTRAL: Final[Mapping[str, object]] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "expert_gating_func": 1,
    "expert_group_count": 1,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "expert_weights_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "interleave_moe_layer_step": 1,
    "leading_dense_block_count": 0,
    "logit_scale": 1.0,
    "nextn_predict_layers": 0,
    "residual_scale": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}
"""Fields that change the numbers, each with the value that does not."""


def config_of_gguf(path: Path) -> dict[str, Any]:
    """Return the object of a ``config.json`` for a file.

    Raises:
        UnsupportedModelError: The architecture is not supported.
        ConfigError: The file is damaged, or a field is missing or has another type.
    """
    try:
        with GgufFiles(path) as files:
            return _config(GgufFields(files))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _config(gguf: GgufFields) -> dict[str, Any]:
    """Return the object of a ``config.json``."""
    _check_unread(gguf)
    num_heads = gguf.integer("attention.head_count")
    hidden_size = gguf.integer("embedding_length")
    head_dim = gguf.integer("attention.key_length", hidden_size // max(num_heads, 1))
    fields: dict[str, Any] = {
        "architectures": [gguf.architecture.hf_class],
        "model_type": gguf.architecture.model_type,
        "hidden_size": hidden_size,
        "num_hidden_layers": gguf.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": gguf.integer("feed_forward_length", 0) or gguf.integer("expert_feed_forward_length"),
        **_norm_eps(gguf),
        "max_position_embeddings": gguf.integer("context_length"),
        "rope_theta": gguf.number("rope.freq_base", 10000.0),
        "vocab_size": _shape(gguf, "token_embd.weight")[0],
        "tie_word_embeddings": not gguf.has_tensor("output.weight"),
        "attention_bias": gguf.has_tensor("blk.0.attn_q.bias"),
        "torch_dtype": _dtype(gguf),
        "bos_token_id": gguf.metadata.optional_integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(gguf.metadata) or None,
    }
    scaling = _rope_scaling(gguf, head_dim)
    if scaling is not None:
        fields["rope_scaling"] = scaling
    family = GGUF_FAMILIES.get(gguf.name)
    return fields if family is None else {**fields, **family.fields(gguf, fields)}


def _check_unread(gguf: GgufFields) -> None:
    """Raise a CheckpointError for a field that would change the numbers and is not read."""
    read = GGUF_FAMILIES[gguf.name].reads if gguf.name in GGUF_FAMILIES else ()
    for name, neutral in _NEUTRAL.items():
        value = gguf.metadata.fields.get(f"{gguf.name}.{name}", neutral)
        if name not in read and np.any(value != neutral):
            raise gguf.metadata.error(f"{gguf.name}.{name}", f"{value!r} is not supported; expected {neutral}")


def _norm_eps(gguf: GgufFields) -> dict[str, float]:
    """Return what is added to the mean square or the variance in norms, in the names of Hugging Face's fields."""
    if gguf.is_given("attention.layer_norm_epsilon"):
        value = gguf.number("attention.layer_norm_epsilon")
        return {"layer_norm_eps": value, "layer_norm_epsilon": value}
    return {"rms_norm_eps": gguf.number("attention.layer_norm_rms_epsilon")}


def _shape(gguf: GgufFields, tensor: str) -> tuple[int, ...]:
    if tensor not in gguf.files.stored:
        raise CheckpointError(f"{gguf.metadata.path}: tensor {tensor!r} is missing")
    shape = gguf.files.stored[tensor].shape
    if len(shape) != 2:
        raise CheckpointError(f"{gguf.metadata.path}: tensor {tensor!r} has shape {list(shape)}, expected two axes")
    return shape


def _dtype(gguf: GgufFields) -> str:
    """Return the type that loses least of the matrices in half the bytes; float32 if all of them have it."""
    types = {tensor.type.name for tensor in gguf.files.stored.values() if len(tensor.shape) > 1}
    if types <= {"F32"}:
        return "float32"
    return "float16" if types <= {"F32", "F16"} else "bfloat16"


def _rope_scaling(gguf: GgufFields, head_dim: int) -> dict[str, Any] | None:
    """Return how rotary frequencies are scaled; None for not at all."""
    frequencies = gguf.factors("rope_freqs.weight")
    if frequencies is not None:
        return _divided(frequencies, frequencies, gguf.integer("context_length"), 1.0)
    name = f"{gguf.name}.rope.scaling.type"
    kind = gguf.metadata.text(name, "linear" if gguf.is_given("rope.scale_linear") else "none")
    long, short = gguf.factors("rope_factors_long.weight"), gguf.factors("rope_factors_short.weight")
    if kind == "longrope" or (long is not None and short is not None):
        if long is None or short is None:
            raise gguf.metadata.error(name, "expected rope_factors_long.weight and rope_factors_short.weight")
        original = gguf.integer("rope.scaling.original_context_length")
        return _divided(short, long, original, gguf.number("rope.scaling.attn_factor", 1.0))
    if kind == "none":
        return None
    factor = gguf.number("rope.scaling.factor", gguf.number("rope.scale_linear", 0.0))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else None
    if kind == "yarn":
        original = gguf.integer("rope.scaling.original_context_length")
        found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if gguf.is_given("rope.scaling.attn_factor"):
            own = 1.0 + 0.1 * math.log(max(factor, 1.0))  # what a file's factor multiplies
            found["attention_factor"] = gguf.number("rope.scaling.attn_factor") * own
        for name in ("beta_fast", "beta_slow"):
            if gguf.is_given(f"rope.scaling.yarn_{name}"):
                found[name] = gguf.number(f"rope.scaling.yarn_{name}")
        return found
    raise gguf.metadata.error(name, f"{kind!r} is not supported; supported: none, linear, yarn, longrope")


def _divided(short: list[float], long: list[float], original: int, attention: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": attention,
    }


def end_token_ids(metadata: Metadata) -> list[int]:
    """Return the tokens that end a generation: those that the metadata name, and control tokens with such a text."""
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = [metadata.integer(name) for name in names if name in metadata.fields]
    if "tokenizer.ggml.token_type" in metadata.fields:
        tokens = metadata.strings("tokenizer.ggml.tokens")
        types = metadata.numbers("tokenizer.ggml.token_type", len(tokens))
        assert types is not None
        found += [int(token) for token in np.flatnonzero(types == _CONTROL) if tokens[int(token)] in _END_TEXTS]
    return list(dict.fromkeys(found))
