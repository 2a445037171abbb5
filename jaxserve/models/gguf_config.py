"""Describes the model of a GGUF file as Hugging Face's ``config.json`` would, from its metadata and tensors."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from checkpoints import CheckpointError
from checkpoints.quantized.gguf_file import GgufFiles, Metadata
from checkpoints.quantized.gguf_names import architecture_of
from jaxserve.api.errors import ConfigError, UnsupportedModelError

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
    "expert_weights_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "interleave_moe_layer_step": 1,
    "leading_dense_block_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}
"""Fields that change the numbers, each with the value that does not."""
_FAMILY_READS: Final[Mapping[str, tuple[str, ...]]] = {
    "gemma2": ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3": ("attention.sliding_window",),
    "granite": ("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
    "phi3": ("attention.sliding_window",),
}
"""Those that some architectures read."""
_LARGE_GEMMA: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion parameters, whose scores have another scale."""


def config_of_gguf(path: Path) -> dict[str, Any]:
    """Return the object of a ``config.json`` for a file.

    Raises:
        UnsupportedModelError: The architecture is not supported.
        ConfigError: The file is damaged, or a field is missing or has another type.
    """
    try:
        with GgufFiles(path) as files:
            return _Reader(files).config()
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


class _Reader:
    """Reads the fields of one file."""

    def __init__(self, files: GgufFiles) -> None:
        self._files, self._metadata = files, files.metadata
        try:
            self._architecture = architecture_of(files.metadata)
        except CheckpointError as error:
            raise UnsupportedModelError(str(error)) from error
        self._name = files.metadata.text("general.architecture")

    def config(self) -> dict[str, Any]:
        """Return the object of a ``config.json``."""
        self._check_unread()
        num_heads = self.integer("attention.head_count")
        hidden_size = self.integer("embedding_length")
        head_dim = self.integer("attention.key_length", hidden_size // max(num_heads, 1))
        fields: dict[str, Any] = {
            "architectures": [self._architecture.hf_class],
            "model_type": self._architecture.model_type,
            "hidden_size": hidden_size,
            "num_hidden_layers": self.integer("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "intermediate_size": self.integer("feed_forward_length", 0) or self.integer("expert_feed_forward_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self.integer("context_length"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "vocab_size": self._shape("token_embd.weight")[0],
            "tie_word_embeddings": "output.weight" not in self._files.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._files.tensors,
            "torch_dtype": self._dtype(),
            "bos_token_id": self._metadata.optional_integer("tokenizer.ggml.bos_token_id"),
            "eos_token_id": end_token_ids(self._metadata) or None,
        }
        scaling = self._rope_scaling(head_dim)
        if scaling is not None:
            fields["rope_scaling"] = scaling
        more = _FAMILY_FIELDS.get(self._name)
        return fields if more is None else {**fields, **more(self, fields)}

    def _check_unread(self) -> None:
        """Raise a CheckpointError for a field that would change the numbers and is not read."""
        read = _FAMILY_READS.get(self._name, ())
        for name, neutral in _NEUTRAL.items():
            value = self._metadata.fields.get(f"{self._name}.{name}", neutral)
            if name not in read and np.any(value != neutral):
                raise self._metadata.error(f"{self._name}.{name}", f"{value!r} is not supported; expected {neutral}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a field of the architecture, the same for all layers."""
        return self._metadata.one_for_all_layers(f"{self._name}.{name}", default)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a field of the architecture."""
        return self._metadata.number(f"{self._name}.{name}", default)

    def flag(self, name: str, default: bool) -> bool:
        """Return a field of the architecture."""
        return self._metadata.flag(f"{self._name}.{name}", default)

    def is_given(self, name: str) -> bool:
        """Return whether the architecture has a field."""
        return f"{self._name}.{name}" in self._metadata.fields

    def factors(self, tensor: str) -> list[float] | None:
        """Return the divisors of rotary frequencies that a tensor has; None if there is none."""
        info = self._files.tensors.get(tensor)
        if info is None:
            return None
        values = self._files.read(tensor, tuple(slice(0, length) for length in info.shape))
        return values.astype(np.float64).reshape(-1).tolist()

    def _shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self._files.stored:
            raise CheckpointError(f"{self._metadata.path}: tensor {tensor!r} is missing")
        shape = self._files.stored[tensor].shape
        if len(shape) != 2:
            raise CheckpointError(
                f"{self._metadata.path}: tensor {tensor!r} has shape {list(shape)}, expected two axes"
            )
        return shape

    def _dtype(self) -> str:
        """Return the type that loses least of the matrices in half the bytes; float32 if all of them have it."""
        types = {tensor.type.name for tensor in self._files.stored.values() if len(tensor.shape) > 1}
        if types <= {"F32"}:
            return "float32"
        return "float16" if types <= {"F32", "F16"} else "bfloat16"

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        """Return how rotary frequencies are scaled; None for not at all."""
        frequencies = self.factors("rope_freqs.weight")
        if frequencies is not None:
            return self._divided(frequencies, frequencies, self.integer("context_length"), 1.0)
        name = f"{self._name}.rope.scaling.type"
        kind = self._metadata.text(name, "linear" if self.is_given("rope.scale_linear") else "none")
        long, short = self.factors("rope_factors_long.weight"), self.factors("rope_factors_short.weight")
        if kind == "longrope" or (long is not None and short is not None):
            if long is None or short is None:
                raise self._metadata.error(name, "expected rope_factors_long.weight and rope_factors_short.weight")
            original = self.integer("rope.scaling.original_context_length")
            return self._divided(short, long, original, self.number("rope.scaling.attn_factor", 1.0))
        if kind == "none":
            return None
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 0.0))
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else None
        if kind == "yarn":
            original = self.integer("rope.scaling.original_context_length")
            found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            if self.is_given("rope.scaling.attn_factor"):
                own = 1.0 + 0.1 * math.log(max(factor, 1.0))  # what a file's factor multiplies
                found["attention_factor"] = self.number("rope.scaling.attn_factor") * own
            for name in ("beta_fast", "beta_slow"):
                if self.is_given(f"rope.scaling.yarn_{name}"):
                    found[name] = self.number(f"rope.scaling.yarn_{name}")
            return found
        raise self._metadata.error(name, f"{kind!r} is not supported; supported: none, linear, yarn, longrope")

    def _divided(self, short: list[float], long: list[float], original: int, attention: float) -> dict[str, Any]:
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


def _gemma2(reader: _Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_scale(fields),
        "sliding_window": reader.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": reader.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": reader.number("final_logit_softcapping", 30.0),
    }


def _gemma3(reader: _Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gemma_scale(fields),
        "sliding_window": reader.integer("attention.sliding_window", 1024),
        "rope_local_base_freq": reader.number("rope.freq_base_swa", 10000.0),
        "rope_theta": reader.number("rope.freq_base", 1000000.0),
    }


def _gemma_scale(fields: Mapping[str, Any]) -> int:
    """Return the number whose inverse root scales the scores: a head's size, in the largest models D / N."""
    if fields["num_hidden_layers"] == _LARGE_GEMMA[fields["model_type"].removesuffix("_text")]:
        return fields["hidden_size"] // fields["num_attention_heads"]
    return fields["head_dim"]


def _granite(reader: _Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "attention_multiplier": ("attention.scale", fields["head_dim"] ** -0.5),
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
    }
    return {name: reader.number(stored, default) for name, (stored, default) in names.items()}


def _llama(reader: _Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Mixtral; nothing for a model without experts."""
    if not reader.integer("expert_count", 0):
        return {}
    return {
        "num_local_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
    }


def _phi3(reader: _Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    rotated = reader.integer("rope.dimension_count", fields["head_dim"])
    window = reader.integer("attention.sliding_window", 0)
    return {"partial_rotary_factor": rotated / fields["head_dim"], "sliding_window": window or None}


def _qwen_moe(reader: _Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    is_third = fields["model_type"] == "qwen3_moe"
    more = {} if is_third else {"shared_expert_intermediate_size": reader.integer("expert_shared_feed_forward_length")}
    return {
        "num_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "norm_topk_prob": reader.flag("expert_weights_norm", is_third),
        "qkv_bias": fields["attention_bias"],
        **more,
    }


_FAMILY_FIELDS: Final[dict[str, Callable[[_Reader, Mapping[str, Any]], dict[str, Any]]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "phi3": _phi3,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
}
"""What some architectures have besides the fields of all."""
