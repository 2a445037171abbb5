"""Which rows of which checkpoint tensors make up each parameter, for a given number of tensor-parallel devices.

A parameter's *global* array is cut into equal parts along its sharded axis, one a device. Where several projections
share one matrix (query, key and value; gate and up), its rows are therefore ordered by device first: each device's
part holds its own query heads, then its key heads, then its value heads. Key/value heads are repeated where there
are fewer than devices. Weights stay ``[out, in]``, as Hugging Face stores them.
"""

import dataclasses
import re
from typing import NamedTuple

from checkpoints import Piece, TensorRecipe, whole
from jaxserve.errors import ConfigError
from jaxserve.layers.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """Where a family's checkpoints keep each weight; the defaults are Llama's.

    Attributes:
        embed: Module of the embedding ``[V, D]``.
        head: Module of the output projection ``[V, D]``.
        norm: Module of the last norm.
        layers: What the layers are called; ``{layers}.{i}.`` precedes the names below.
        qkv: Query, key and value projections: three modules, or one whose rows are all of q, then k, then v.
        out: Output projection of attention.
        q_norm: Norm of queries.
        k_norm: Norm of keys.
        gate_up: Gate and up projections: two modules, or one whose rows are all of gate, then up.
        down: Down projection.
        attention_norm: Norm of the attention branch.
        mlp_norm: Norm of the MLP branch.
        ignored: Regular expressions; tensors whose whole names match one carry no weights.
    """

    embed: str = "model.embed_tokens"
    head: str = "lm_head"
    norm: str = "model.norm"
    layers: str = "model.layers"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)


class _Part(NamedTuple):
    """One projection: ``num_rows`` rows of the module ``source``, from ``start``, of its ``source_rows`` rows."""

    source: str
    start: int
    num_rows: int
    source_rows: int


class _Rows(NamedTuple):
    """``num_rows`` rows of a projection, from ``start``."""

    part: _Part
    start: int
    num_rows: int


def weight_recipes(config: ModelConfig, names: CheckpointNames, tensor_size: int) -> dict[str, TensorRecipe]:
    """The recipe of every parameter, by its path in the module (``layers.0.attention.qkv.weight``).

    Args:
        config: The model.
        names: Where its checkpoint keeps each weight.
        tensor_size: Devices that the heads, the MLP and the vocabulary are split over.

    Raises:
        ConfigError: The model cannot be split that many ways.
    """
    check_tensor_size(config, tensor_size)
    rows = -(-config.vocab_size // tensor_size) * tensor_size
    recipes = {"embed.weight": _padded_rows(f"{names.embed}.weight", config, rows)}
    if not config.tie_embeddings:
        recipes["head.weight"] = _padded_rows(f"{names.head}.weight", config, rows)
    recipes["norm.weight"] = whole(f"{names.norm}.weight", (config.hidden_size,))
    for layer in range(config.num_layers):
        prefix = f"{names.layers}.{layer}."
        parts = {
            **_attention_recipes(config, names, prefix, tensor_size),
            **_mlp_recipes(config, names, prefix, tensor_size),
        }
        recipes |= {f"layers.{layer}.{path}": recipe for path, recipe in parts.items()}
    return recipes


def param_shapes(config: ModelConfig, tensor_size: int) -> dict[str, tuple[int, ...]]:
    """The global shape of every parameter, by its path; arguments and errors as :func:`weight_recipes`."""
    recipes = weight_recipes(config, CheckpointNames(), tensor_size)
    return {path: recipe.shape for path, recipe in recipes.items()}


def ignored_patterns(config: ModelConfig, names: CheckpointNames) -> tuple[str, ...]:
    """Regular expressions of whole names of tensors that no parameter needs: a tied head may be stored all the same."""
    return (*names.ignored, re.escape(f"{names.head}.weight")) if config.tie_embeddings else names.ignored


def tensor_parallel_sizes(config: ModelConfig, limit: int = 64) -> list[int]:
    """Every number of tensor-parallel devices, up to ``limit``, that the model can be split over."""
    return [size for size in range(1, limit + 1) if _divides(config, size)]


def check_tensor_size(config: ModelConfig, tensor_size: int) -> None:
    """Raises ConfigError, saying which sizes work, unless the model can be split over ``tensor_size`` devices."""
    if not _divides(config, tensor_size):
        sizes = ", ".join(map(str, tensor_parallel_sizes(config)))
        raise ConfigError(
            f"tensor_parallel_size {tensor_size} does not fit {config.architecture} with {config.num_heads} query "
            f"heads, {config.num_kv_heads} key/value heads and intermediate_size {config.ffn_size}: expected one of "
            f"{sizes}"
        )


def _divides(config: ModelConfig, size: int) -> bool:
    if size < 1 or config.num_heads % size or config.ffn_size % size:
        return False
    return config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0


def _attention_recipes(config: ModelConfig, names: CheckpointNames, prefix: str, size: int) -> dict[str, TensorRecipe]:
    width, head = config.hidden_size, config.head_dim
    query, key, value = _split(
        prefix, names.qkv, (config.num_heads * head, config.num_kv_heads * head, config.num_kv_heads * head)
    )
    rows: list[_Rows] = []
    for device in range(size):
        rows += [_share(query, size, device), *(_kv_rows(config, part, size, device) for part in (key, value))]
    recipes = {
        "attention.qkv.weight": _stack_matrix(rows, width),
        "attention.out.weight": whole(f"{prefix}{names.out}.weight", (width, config.num_heads * head)),
        "attention_norm.weight": whole(f"{prefix}{names.attention_norm}.weight", (width,)),
    }
    if config.qkv_bias:
        recipes["attention.qkv.bias"] = _stack_vector(rows, "bias")
    if config.out_bias:
        recipes["attention.out.bias"] = whole(f"{prefix}{names.out}.bias", (width,))
    if config.qk_norm == "head":
        recipes["attention.q_norm.weight"] = whole(f"{prefix}{names.q_norm}.weight", (head,))
        recipes["attention.k_norm.weight"] = whole(f"{prefix}{names.k_norm}.weight", (head,))
    elif config.qk_norm == "width":
        recipes["attention.q_norm.weight"] = whole(f"{prefix}{names.q_norm}.weight", (config.num_heads * head,))
        (part,) = _split(prefix, (names.k_norm,), (config.num_kv_heads * head,))
        recipes["attention.k_norm.weight"] = _stack_vector(
            [_kv_rows(config, part, size, device) for device in range(size)], "weight"
        )
    return recipes


def _mlp_recipes(config: ModelConfig, names: CheckpointNames, prefix: str, size: int) -> dict[str, TensorRecipe]:
    width, ffn = config.hidden_size, config.ffn_size
    parts = _split(prefix, names.gate_up, (ffn, ffn))
    rows = [_share(part, size, device) for device in range(size) for part in parts]
    recipes = {
        "mlp_norm.weight": whole(f"{prefix}{names.mlp_norm}.weight", (width,)),
        "mlp.gate_up.weight": _stack_matrix(rows, width),
        "mlp.down.weight": whole(f"{prefix}{names.down}.weight", (width, ffn)),
    }
    if config.mlp_bias:
        recipes["mlp.gate_up.bias"] = _stack_vector(rows, "bias")
        recipes["mlp.down.bias"] = whole(f"{prefix}{names.down}.bias", (width,))
    return recipes


def _split(prefix: str, modules: tuple[str, ...], counts: tuple[int, ...]) -> list[_Part]:
    """Where projections of these row counts lie: each in its own module, or all in one, in order."""
    if len(modules) == len(counts):
        return [_Part(prefix + module, 0, count, count) for module, count in zip(modules, counts, strict=True)]
    (module,) = modules
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [_Part(prefix + module, start, count, sum(counts)) for start, count in zip(starts, counts, strict=True)]


def _share(part: _Part, size: int, device: int) -> _Rows:
    """A device's equal share of a projection."""
    count = part.num_rows // size
    return _Rows(part, device * count, count)


def _kv_rows(config: ModelConfig, part: _Part, size: int, device: int) -> _Rows:
    """A device's key or value heads: its share, or the one head that its query heads read."""
    num_local = max(1, config.num_kv_heads // size)
    first = device * config.num_kv_heads // size
    return _Rows(part, first * config.head_dim, num_local * config.head_dim)


def _stack_matrix(rows: list[_Rows], width: int) -> TensorRecipe:
    """Rows of ``[rows, width]`` weights, one below the other."""
    return _stack(rows, "weight", (width,))


def _stack_vector(rows: list[_Rows], suffix: str) -> TensorRecipe:
    """Elements of vectors, one after the other."""
    return _stack(rows, suffix, ())


def _stack(rows: list[_Rows], suffix: str, trailing: tuple[int, ...]) -> TensorRecipe:
    zeros = (0,) * len(trailing)
    pieces: list[Piece] = []
    target = 0
    for part, start, count in rows:
        pieces.append(
            Piece(f"{part.source}.{suffix}", (part.start + start, *zeros), (target, *zeros), (count, *trailing))
        )
        target += count
    sources = {f"{part.source}.{suffix}": (part.source_rows, *trailing) for part, _, _ in rows}
    return TensorRecipe((target, *trailing), tuple(pieces), tuple(sources.items()))


def _padded_rows(source: str, config: ModelConfig, rows: int) -> TensorRecipe:
    """The vocabulary's rows, and zeros up to ``rows``."""
    shape = (config.vocab_size, config.hidden_size)
    return TensorRecipe((rows, config.hidden_size), (Piece(source, (0, 0), (0, 0), shape),), ((source, shape),))
