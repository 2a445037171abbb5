"""A Llama in plain NumPy that rounds what the engine's quantized matmuls round: the other side of the accuracy table.

It reads decoded weights and the formats' own words about groups, and computes in float64 between the roundings, with
none of the engine's layers and kernels.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints import open_checkpoint
from checkpoints.quantized.reader import QuantizedReader, quantized_in
from checkpoints.quantized.records import SPANS, Records
from checkpoints.tensor_info import whole_index
from jaxserve.models.loading import read_model_fields
from pallas_kernels.native_library import instructions

ACTIVATIONS = ("float32", "bfloat16", "int8")
"""How rows are rounded that weights multiply: not at all, as dtype bfloat16 does, or to 8 bits."""
_BFLOAT16 = ml_dtypes.bfloat16


class _Matrix(NamedTuple):
    """A matmul's weight [out, in], and how it rounds rows: to the type ``kind``, for int8 with a scale for each group
    of features."""

    weight: np.ndarray
    kind: str | None
    group: int = 0

    def of(self, x: np.ndarray) -> np.ndarray:
        """Multiply rows."""
        x = x.astype(np.float32)
        if self.kind == "bfloat16":
            x = x.astype(_BFLOAT16)
        elif self.kind == "int8":
            groups = x.reshape(len(x), -1, self.group)
            scale = np.abs(groups).max(axis=2, keepdims=True) * np.float32(1 / 127)
            scale[scale == 0] = 1
            x = (np.rint(groups * (1 / scale)).clip(-127, 127) * scale).reshape(x.shape)
        return x.astype(np.float64) @ self.weight.T


class Llama:
    """The model of a checkpoint.

    Args:
        path: Its directory or GGUF file.
        activations: One of ``ACTIVATIONS``.
        is_decoded: Whether quantized weights are floats, whose rows are not rounded.

    Raises:
        ValueError: The model is no plain Llama.
    """

    def __init__(self, path: Path, activations: str, is_decoded: bool = False) -> None:
        self._fields, _ = read_model_fields(path)
        if self._fields.get("architectures") != ["LlamaForCausalLM"] or self._fields.get("rope_scaling"):
            raise ValueError(f"{path}: only a Llama without scaled RoPE has an emulation")
        self._is_bfloat16 = activations == "bfloat16"
        self._has_tiles = self._is_bfloat16 and instructions() == "amx"
        self._rounds_rows = self._has_tiles or self._is_bfloat16 and instructions() == "avx512bf16"
        self._activations, self._is_decoded = activations, is_decoded
        with open_checkpoint(path) as reader:
            quantized = quantized_in(reader)
            self._weights = {
                name: reader.read(name, whole_index(info.shape)).astype(np.float32)
                for name, info in reader.tensors.items()
            }
            self._records = {} if quantized is None else _records(quantized)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits after each token of a text, in float64."""
        fields = self._fields
        x = self._plain("model.embed_tokens.weight")[tokens].astype(np.float64)
        head = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        for layer in range(fields["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            normed = self._norm(x, f"{at}.input_layernorm.weight")
            q, k, v = (
                self._matrix(f"{at}.self_attn.{part}_proj.weight").of(normed).reshape(len(x), -1, head)
                for part in "qkv"
            )
            mixed = _attend(
                self._rotated(q), self._rotated(k), v, self._is_bfloat16, self._has_tiles and head % 32 == 0
            )
            x = x + self._matrix(f"{at}.self_attn.o_proj.weight").of(mixed.reshape(len(x), -1))
            normed = self._norm(x, f"{at}.post_attention_layernorm.weight")
            gate, up = (self._matrix(f"{at}.mlp.{part}_proj.weight").of(normed) for part in ("gate", "up"))
            x = x + self._matrix(f"{at}.mlp.down_proj.weight").of(gate / (1 + np.exp(-gate)) * up)
        own = "lm_head.weight" if "lm_head.weight" in self._weights else "model.embed_tokens.weight"
        return self._matrix(own).of(self._norm(x, "model.norm.weight"))

    def _plain(self, name: str) -> np.ndarray:
        """Return a tensor as the engine keeps it: floats in its dtype."""
        weight = self._weights[name]
        if name in self._records and not self._is_decoded:
            return weight
        return weight.astype(_BFLOAT16).astype(np.float32) if self._is_bfloat16 else weight

    def _matrix(self, name: str) -> _Matrix:
        weight, records = self._plain(name), self._records.get(name)
        if records is None or self._is_decoded:
            return _Matrix(weight, "bfloat16" if self._rounds_rows else None)
        if records.rounds_activations:
            return _Matrix(weight, "int8", weight.shape[1])
        if self._activations == "int8":
            return _Matrix(weight, "int8", records.group or weight.shape[1])
        is_exact = records.table is None or all(float(_BFLOAT16(each)) == each for each in records.table)
        return _Matrix(weight, "bfloat16" if self._has_tiles and is_exact else None)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.square(x).mean(axis=1, keepdims=True)
        return x / np.sqrt(mean + self._fields["rms_norm_eps"]) * self._plain(name)

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[2] // 2
        frequencies = self._fields.get("rope_theta", 10000.0) ** -(np.arange(half) / half)
        angles = np.arange(len(x))[:, None, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


def _records(reader: QuantizedReader) -> Mapping[str, Records]:
    """Return what stays quantized, as the engine decides it: records divide the features."""
    found: dict[str, Records] = {}
    for name, tensor in reader.quantized.items():
        records: Any = None if tensor.records is None else tensor.records()
        if records is not None and (records.group or tensor.shape[-1]) % SPANS[-1] == 0:
            found[name] = records
    return found


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, is_narrow: bool, has_tiles: bool) -> np.ndarray:
    """Attention of each token to those up to it, [T, heads, size].

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        is_narrow: Whether pages hold keys and values in bfloat16.
        has_tiles: Whether they are multiplied with queries, and with the weights of a softmax, in bfloat16.
    """
    repeats = q.shape[1] // k.shape[1]
    k, v = (np.repeat(_narrow(each) if is_narrow else each, repeats, axis=1) for each in (k, v))
    q = q / np.sqrt(q.shape[2])
    scores = np.einsum("qhd,khd->hqk", _narrow(q) if has_tiles else q, k)
    scores[:, ~np.tri(len(q), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", _narrow(weights) if has_tiles else weights, v)
    return mixed / weights.sum(axis=2).T[..., None]


def _narrow(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16."""
    return x.astype(np.float32).astype(_BFLOAT16).astype(np.float64)
