"""Paged decode attention in Pallas-Triton: one query per row, its context in splits that run in parallel.

A program takes one row, one key/value head with all query heads that share it, and one split of the row's context.
Splits are of the row's own length, not of the page table's, so that short rows use them too. Each computes its part's
mean and the logarithm of its sum; a second kernel combines them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_scores import LOG2_E, MASKED
from pallas_kernels.attention_tiles import (
    Pages,
    Scoring,
    Softmax,
    ceil_div,
    dot,
    load_heads,
    padded,
    require_indexable,
    store_heads,
)

_TILE = 64  # tokens of context that an iteration reads
_WIDE_TILE = 32  # with heads wider than 256 bytes
_FULL_TILE = 16  # in float32, whose matmuls use no tensor cores but many registers
_NUM_WARPS = 4
_LARGE_COMBINE = 8192  # partial results from which more warps combine them


class _Plan(NamedTuple):
    """Compile-time parameters of the kernels."""

    pages: Pages
    scoring: Scoring
    num_heads: int
    group: int
    num_splits: int

    def split_tiles(self, length: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
        """Return the half-open range of tiles inside the attention window, and the number of tiles per split."""
        tile, window = self.pages.tile, self.scoring.window
        first = jnp.int32(0) if window is None else lax.div(jnp.maximum(length - window, 0), tile)
        last = ceil_div(length, tile)
        return first, last, jnp.maximum(ceil_div(last - first, self.num_splits), 1)


def decode_attention(
    query: Float[Array, "R N H"],
    key_pool: Float[Array, "P K p H"],
    value_pool: Float[Array, "P K p H"],
    page_table: Int[Array, "Rt M"],
    rows: Int[Array, " R"],
    lens: Int[Array, " R"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None = None,
    num_splits: int,
    interpret: bool = False,
) -> Float[Array, "R N H"]:
    """Compute attention of one query per row over a paged context.

    Args:
        query: The query of each row: the last token of its context.
        key_pool: Keys; those after a context's end are ignored.
        value_pool: Values, all of them finite.
        page_table: Pages of contexts in order.
        rows: Index into ``page_table`` of each query's context.
        lens: Tokens of each row's context; 0 gives zeros.
        scale: Factor of the scores.
        window: Number of latest tokens that are seen, or None for all.
        soft_cap: Smooth bound of the scores, or None.
        sinks: Logit of each query head that has no value, or None.
        num_splits: Parts of a context that run in parallel. A row's result depends on its own context and this
            number, not on other rows.
        interpret: Run in plain JAX, on any platform.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, page_size = key_pool.shape[1:3]
    require_indexable(key_pool, value_pool)
    pages = Pages(page_size, page_table.shape[1], head_dim, _tile(head_dim, key_pool.dtype))
    plan = _Plan(pages, Scoring(scale, window, soft_cap), num_heads, num_heads // num_kv_heads, num_splits)
    whole = jax.ShapeDtypeStruct(query.shape, query.dtype)
    parts = (
        jax.ShapeDtypeStruct((num_rows, num_heads, num_splits, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_rows, num_heads, num_splits), jnp.float32),
    )
    attended = pl.pallas_call(
        functools.partial(_attend_kernel, plan=plan),
        grid=(num_rows, num_kv_heads, num_splits),
        out_shape=parts if num_splits > 1 else whole,
        compiler_params=pltriton.CompilerParams(num_warps=_NUM_WARPS, num_stages=_num_stages(pages, key_pool.dtype)),
        interpret=interpret,
        name="paged_decode_attention",
    )(query.astype(key_pool.dtype), key_pool, value_pool, page_table, rows, lens, sinks if num_splits == 1 else None)
    if num_splits == 1:
        return attended
    is_large = padded(num_splits) * pages.width > _LARGE_COMBINE
    return pl.pallas_call(
        functools.partial(_combine_kernel, plan=plan),
        grid=(num_rows, num_heads),
        out_shape=whole,
        compiler_params=pltriton.CompilerParams(num_warps=2 * _NUM_WARPS if is_large else _NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="paged_decode_combine",
    )(*attended, lens, sinks)


def _tile(head_dim: int, dtype: jnp.dtype) -> int:
    if dtype == jnp.float32:
        return _FULL_TILE
    return _TILE if padded(head_dim) * dtype.itemsize <= 256 else _WIDE_TILE


def _num_stages(pages: Pages, dtype: jnp.dtype) -> int:
    """Return the stages of the pipeline, one more than tiles in flight: 50 to 75 KB of shared memory, so that three
    fit."""
    return 4 if pages.width * dtype.itemsize <= 128 else 3


def _attend_kernel(
    query_ref: Any,  # [R, N, H]
    key_ref: Any,  # [P, K, p, H]
    value_ref: Any,  # [P, K, p, H]
    table_ref: Any,  # [Rt, M]
    rows_ref: Any,  # [R]
    lens_ref: Any,  # [R]
    sinks_ref: Any | None,  # [N]
    out_ref: Any,  # [R, N, H], or for several splits their means [R, N, S, H]
    log_ref: Any = None,  # [R, N, S], the base-2 logarithm of their sums
    *,
    plan: _Plan,
) -> Any:
    r, head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    pages, scoring = plan.pages, plan.scoring
    row, length = rows_ref[r], lens_ref[r]
    member = jnp.arange(padded(plan.group))
    heads, is_head = head * plan.group + member, member < plan.group
    query = load_heads(query_ref, (r, heads[:, None]), is_head, pages.head_dim)

    def score(i: Int[Array, ""], keys: Float[Array, "S H"]) -> Float[Array, "rows S"]:
        position = i * pages.tile + jnp.arange(pages.tile)
        is_seen = position < length
        if scoring.window is not None:
            is_seen &= position >= length - scoring.window
        return jnp.where(is_seen[None, :], scoring(dot(query, keys, 1)), MASKED)

    first, last, num_tiles = plan.split_tiles(length)
    start = first + split * num_tiles
    stop = jnp.minimum(start + num_tiles, last)
    begun = Softmax.empty(padded(plan.group), pages.width)
    softmax = pages.walk((table_ref, key_ref, value_ref), row, head, (start, stop), begun, score)
    if plan.num_splits == 1:
        sinks = None if sinks_ref is None else pltriton.load(sinks_ref.at[heads], mask=is_head, other=0)
        store_heads(out_ref, (r, heads[:, None]), softmax.mean(sinks), is_head, pages.head_dim)
        return
    is_used = is_head & (start < stop)
    store_heads(out_ref, (r, heads[:, None], split), softmax.mean(), is_used, pages.head_dim)
    logs = softmax.maximum + jnp.log2(jnp.where(softmax.total == 0, 1, softmax.total))
    pltriton.store(log_ref.at[r, heads, split], logs, mask=is_used)


def _combine_kernel(
    parts_ref: Any,  # [R, N, S, H]
    logs_ref: Any,  # [R, N, S]
    lens_ref: Any,  # [R]
    sinks_ref: Any | None,  # [N]
    out_ref: Any,  # [R, N, H]
    *,
    plan: _Plan,
) -> None:
    r, head = pl.program_id(0), pl.program_id(1)
    first, last, num_tiles = plan.split_tiles(lens_ref[r])
    split = jnp.arange(padded(plan.num_splits))
    is_used = split < ceil_div(last - first, num_tiles)
    logs = pltriton.load(logs_ref.at[r, head, split], mask=is_used, other=MASKED)
    maximum = jnp.max(logs)
    weights = jnp.where(is_used, jnp.exp2(logs - maximum), 0)
    parts = load_heads(parts_ref, (r, head, split[:, None]), is_used, plan.pages.head_dim)
    total = jnp.sum(weights)
    if sinks_ref is not None:
        total += jnp.exp2(sinks_ref[head] * LOG2_E - maximum)
    mean = jnp.sum(parts * weights[:, None], axis=0) / jnp.where(total == 0, 1, total)
    columns = jnp.arange(plan.pages.width)
    place = out_ref.at[r, head, columns]
    pltriton.store(place, mean.astype(out_ref.dtype), mask=columns < plan.pages.head_dim)
