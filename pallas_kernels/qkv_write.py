"""Norms, RoPE and the write of keys and values to their pages, from the fused projection: interface and cases.

An implementation has ``unsupported`` and ``write``, whose pools are those of the paged attention that it goes with, in
a layout of their own. It updates the pools in place if the caller donates them.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from pallas_kernels.operation import BFLOAT16_HEADS, Comparison, Cost, Tolerance, add_twins, compare_rows
from pallas_kernels.paged_attention import AttentionBatch

Pools = tuple[Float[Array, "P K _ _"], Float[Array, "P K _ _"]]
Rotation = tuple[Float[Array, "T half"], Float[Array, "T half"]]


class QkNorms(NamedTuple):
    """Norms of each head of queries and keys."""

    query_weight: Float[Array, " H"]
    key_weight: Float[Array, " H"]
    eps: float


class Heads(NamedTuple):
    """Queries, keys and values of tokens, by head."""

    query: Float[Array, "T N H"]
    key: Float[Array, "T K H"]
    value: Float[Array, "T K H"]


@runtime_checkable
class QkvWriter(Protocol):
    """The functions of an implementation module."""

    def to_layout(self, pools: Pools) -> Pools:
        """Return pools whose keys and values both lie as [P, K, p, H] in the layout of the implementation."""
        ...

    def from_layout(self, pools: Pools) -> Pools:
        """Return pools of the implementation's layout as [P, K, p, H]: the inverse of ``to_layout``."""
        ...

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device, or None."""
        ...

    def write(
        self,
        qkv: Float[Array, "T width"],
        pools: Pools,
        batch: AttentionBatch,
        *,
        rotation: Rotation | None,
        norms: QkNorms | None,
        num_heads: int,
        num_kv_heads: int,
        page_size: int,
    ) -> tuple[Float[Array, "T N H"], Pools]:
        """Queries, normalized and rotated, and pools with every token's key and value written.

        Norms and RoPE compute in float32; each may round its result to the type of ``qkv``. A value that is not
        finite moves to its key as NaN and leaves zero; see ``page_writes.as_stored``.

        Args:
            qkv: The query heads, key heads and value heads of each token, in this order.
            pools: Of keys and of values.
            batch: Pages of the tokens. The first ``query_lens.sum()`` are in use; the padding tokens after them have
                a separate page; its content and their queries are undefined but finite.
            rotation: Cosines and sines, float32, of the leading features, which rotate in pairs (i, i + half).
            norms: Applied before RoPE.
            num_heads: N.
            num_kv_heads: K.
            page_size: p.
        """
        ...


def split_heads(
    qkv: Float[Array, "T width"], rotation: Rotation | None, norms: QkNorms | None, num_heads: int, num_kv_heads: int
) -> Heads:
    """Compute normalized and rotated queries, keys and values in plain JAX; see :meth:`QkvWriter.write`."""
    by_head = qkv.reshape(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    query, key, value = jnp.split(by_head, [num_heads, num_heads + num_kv_heads], axis=1)
    if norms is not None:
        query, key = (
            normed(x, weight, norms.eps) for x, weight in ((query, norms.query_weight), (key, norms.key_weight))
        )
    if rotation is not None:
        query, key = apply_rope(query, *rotation), apply_rope(key, *rotation)
    return Heads(query, key, value)


def normed(x: Float[Array, "... H"], weight: Float[Array, " H"], eps: float) -> Float[Array, "... H"]:
    """Normalize the last axis by its root mean square, in float32, and return the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    return (scaled * weight.astype(jnp.float32)).astype(x.dtype)


def apply_rope(
    x: Float[Array, "T N H"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T N H"]:
    """Rotate the leading features of every head in pairs (i, i + half), in float32; return the dtype of ``x``.

    Args:
        x: Queries or keys.
        cos: Cosines of each token's angles.
        sin: Sines of each token's angles.
    """
    half = cos.shape[-1]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = [(first * cos - second * sin).astype(x.dtype), (second * cos + first * sin).astype(x.dtype)]
    return jnp.concatenate([*turned, x[..., 2 * half :]], axis=-1)


class Case(NamedTuple):
    """One shape.

    Attributes:
        rotary_dim: Number of rotated features; None for all, 0 for none.
        num_padding: Number of tokens at the end that are written to the padding page.
        is_poisoned: Whether some numbers are not finite; ``run`` then also returns the NaN values as numbers.
    """

    num_tokens: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    rotary_dim: int | None = None
    is_normed: bool = False
    num_padding: int = 0
    is_poisoned: bool = False
    dtype: str = "bfloat16"


class Inputs(NamedTuple):
    """Arrays of a case."""

    qkv: Float[Array, "T width"]
    pools: Pools
    batch: AttentionBatch
    rotation: Rotation | None
    weights: tuple[Float[Array, " H"], Float[Array, " H"]] | None


IS_IN_PLACE = True
CASES: dict[str, Case] = {
    "one_token": Case(1),
    "three_tokens": Case(3, is_normed=True),
    "padded": Case(64, num_padding=7, is_normed=True),
    "float32": Case(3, is_normed=True, head_dim=16, dtype="float32"),
    "float32_wide": Case(64, head_dim=64, dtype="float32"),
    "multi_query": Case(3, num_heads=7, num_kv_heads=1, head_dim=64, is_normed=True),
    "multi_head": Case(3, num_heads=8, num_kv_heads=8, head_dim=32),
    "group_of_eight": Case(3, num_heads=64, num_kv_heads=8, head_dim=16, is_normed=True),
    "group_of_seven": Case(5, num_heads=28, num_kv_heads=4, head_dim=16, is_normed=True),
    "three_kv_heads": Case(3, num_heads=9, num_kv_heads=3, head_dim=64),
    "tiny_head": Case(3, head_dim=8, page_size=8, is_normed=True),
    "head_of_80": Case(3, head_dim=80, is_normed=True),
    "partial_rotation": Case(3, head_dim=80, rotary_dim=32, is_normed=True),
    "partial_rotation_alone": Case(3, head_dim=128, rotary_dim=24, dtype="float32"),
    "no_rotation": Case(3, rotary_dim=0, is_normed=True),
    "plain": Case(5, rotary_dim=0, head_dim=80, page_size=128),
    "poisoned": Case(9, num_padding=2, is_poisoned=True),
    "poisoned_float32": Case(9, head_dim=24, is_normed=True, is_poisoned=True, dtype="float32"),
}

DEVICE_CASES: dict[str, Case] = add_twins(CASES, BFLOAT16_HEADS)

_LLAMA_8B = Case(2, num_heads=32, num_kv_heads=8, page_size=64)
_QWEN3_14B = Case(2, num_heads=40, num_kv_heads=8, page_size=64, is_normed=True)
BENCHES: dict[str, Case] = {
    f"{model}_{num_tokens}": case._replace(num_tokens=num_tokens)
    for model, case in (("llama_8b", _LLAMA_8B), ("qwen3_14b", _QWEN3_14B))
    for num_tokens in (2, 64, 256, 8192)
}


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make filled pools, and tokens with shuffled positions in them."""
    keys = jax.random.split(key, 6)
    usable = -(-case.num_tokens // case.page_size) + 3
    shape = (usable + 2, case.num_kv_heads, case.page_size, case.head_dim)
    key_pool, value_pool = (jax.random.normal(k, shape, jnp.float32).astype(case.dtype) for k in keys[:2])
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    qkv = jax.random.normal(keys[2], (case.num_tokens, width), jnp.float32)
    qkv = _poisoned(qkv, case) if case.is_poisoned else qkv
    half = (case.head_dim if case.rotary_dim is None else case.rotary_dim) // 2
    angles = jax.random.uniform(keys[3], (case.num_tokens, half), jnp.float32, 0, 2 * np.pi)
    weights = jax.random.uniform(keys[4], (2, case.head_dim), jnp.float32, 0.5, 1.5).astype(case.dtype)
    slots = jax.random.permutation(keys[5], usable * case.page_size)[: case.num_tokens].astype(jnp.int32)
    is_padding = jnp.arange(case.num_tokens) >= case.num_tokens - case.num_padding
    pages = jnp.where(is_padding, usable + 1, slots // case.page_size)
    unused = [jnp.zeros(shape, jnp.int32) for shape in ((1, 1), (1,), (1,), (1,), ())]
    offsets = jnp.where(is_padding, 0, slots % case.page_size)
    batch = AttentionBatch(*unused, token_pages=pages, token_offsets=offsets, num_shared_pages=jnp.zeros((), jnp.int32))
    batch = batch._replace(query_lens=jnp.full(1, case.num_tokens - case.num_padding, jnp.int32))
    return Inputs(
        qkv.astype(case.dtype),
        (key_pool, value_pool),
        batch,
        (jnp.cos(angles), jnp.sin(angles)) if half else None,
        (weights[0], weights[1]) if case.is_normed else None,
    )


def _poisoned(qkv: Float[Array, "T width"], case: Case) -> Float[Array, "T width"]:
    """Make a query, a key, and values of three kinds non-finite."""
    first_key = case.num_heads * case.head_dim
    first_value = first_key + case.num_kv_heads * case.head_dim
    rows = np.array([0, 1, 2, 3, 4, 4])
    columns = np.array([3, first_key + 5, *(first_value + i for i in (0, 7, case.head_dim, case.head_dim - 1))])
    return qkv.at[rows, columns].set(np.array([np.nan, np.nan, np.nan, np.inf, -np.inf, np.nan], np.float32))


def prepare(implementation: QkvWriter, case: Case, inputs: Inputs) -> Inputs:
    """Return the inputs with pools in the implementation's layout."""
    del case
    return inputs._replace(pools=implementation.to_layout(inputs.pools))


def write(implementation: QkvWriter, case: Case, prepared: Inputs) -> tuple[Float[Array, "T N H"], Pools]:
    """Call the implementation; the pools that it returns have its own layout."""
    return implementation.write(
        prepared.qkv,
        prepared.pools,
        prepared.batch,
        rotation=prepared.rotation,
        norms=None if prepared.weights is None else QkNorms(*prepared.weights, _EPS),
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        page_size=case.page_size,
    )


def run(implementation: QkvWriter, case: Case, prepared: Inputs) -> PyTree[Array]:
    """Return queries and both pools, all [P, K, p, H]."""
    query, pools = write(implementation, case, prepared)
    return _visible(case, (query, *implementation.from_layout(pools)))


def expected(case: Case, inputs: Inputs) -> PyTree[Array]:
    """Compute queries and pools in float32, rounded once."""
    norms = None if inputs.weights is None else QkNorms(*inputs.weights, _EPS)
    heads = split_heads(inputs.qkv.astype(jnp.float32), inputs.rotation, norms, case.num_heads, case.num_kv_heads)
    is_finite = jnp.isfinite(heads.value)
    pages, offsets = inputs.batch.token_pages, inputs.batch.token_offsets
    pools = (
        pool.astype(jnp.float32).at[pages, :, offsets].set(new)
        for pool, new in zip(
            inputs.pools,
            (jnp.where(is_finite, heads.key, jnp.nan), jnp.where(is_finite, heads.value, 0)),
            strict=True,
        )
    )
    return _visible(case, (heads.query, *pools))


def compare(case: Case, inputs: Inputs, found: PyTree[Array], expected: PyTree[Array]) -> Comparison:
    """Compare each head of each query and of each position in the pools, except padding tokens and their page."""
    num_pages = inputs.pools[0].shape[0]
    is_used = np.arange(case.num_tokens) < case.num_tokens - case.num_padding
    is_real = is_used[:, None], *[(np.arange(num_pages) < num_pages - 1)[:, None, None]] * 2
    return compare_rows(("queries", "keys", "values"), found, expected, is_real, tolerance(case))


def tolerance(case: Case) -> Tolerance:
    """Allow for two roundings to the operands' dtype; in float32 also for the order of a norm's sum."""
    return Tolerance(1e-5 if case.dtype == "float32" else 1e-2, floor=1e-3 * case.head_dim**0.5)


def cost(case: Case) -> Cost:
    """Return every projection is read and written once; a multiplication and an addition or two for each feature."""
    features = case.num_tokens * (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    return Cost(2 * features * jnp.dtype(case.dtype).itemsize, 8 * features)


def sizes(case: Case) -> dict[str, int]:
    """Return heads, their width, and tokens per page."""
    return {"num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim, "page_size": case.page_size}


def dtype(case: Case) -> str:
    """Return the dtype of projections and pools."""
    return case.dtype


_EPS = 1e-6


def _visible(case: Case, arrays: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """Return the arrays; of a poisoned case with 4 where NaN stood, which few numbers are near.

    Several padding tokens are written to one place in any order: their page is blank.
    """
    query, *pools = (jnp.where(jnp.isnan(a), 4.0, a) for a in arrays) if case.is_poisoned else arrays
    keys, values = (pool.at[-1].set(0) for pool in pools) if case.num_padding > 1 else pools
    return query, keys, values
