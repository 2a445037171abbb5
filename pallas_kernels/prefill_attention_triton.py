"""Paged prefill attention in Pallas-Triton: chunks of several query tokens over a paged context.

A program takes a block of one row's query tokens and one key/value head with all query heads that share it: 128 (or 64)
rows of a matmul. The tokens of each block are computed once per step; the grid has the maximal number of blocks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_scores import MASKED
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
from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.prefill_blocks import block_map

_TILE = 64  # tokens of context that an iteration reads
_LARGE_BLOCK, _SMALL_BLOCK = 128, 64  # queries times heads of a block
_NUM_PROCESSORS = 132  # of an H200: with fewer large blocks than these, small ones


class _Plan(NamedTuple):
    """Compile-time parameters of the kernel."""

    pages: Pages
    scoring: Scoring
    group: int
    block_tokens: int
    num_blocks: int


def prefill_attention(
    query: Float[Array, "T N H"],
    key_pool: Float[Array, "P K p H"],
    value_pool: Float[Array, "P K p H"],
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None = None,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """Compute attention of the query tokens of all rows after the decode rows; zeros for other tokens.

    Args:
        query: Each row's tokens are the last ones of its context.
        key_pool: Keys, including this step's.
        value_pool: Values, all of them finite.
        batch: Row and position of each token.
        scale: Factor of the scores.
        window: Number of latest tokens that are seen, or None for all.
        soft_cap: Smooth bound of the scores, or None.
        sinks: Logit of each query head that has no value, or None.
        interpret: Run in plain JAX, on any platform.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, page_size = key_pool.shape[1:3]
    require_indexable(key_pool, value_pool)
    group = num_heads // num_kv_heads
    block_rows, num_warps, tile = _block_shape(num_tokens * num_heads, head_dim, key_pool.dtype)
    block_tokens = max(1, block_rows // pl.next_power_of_2(group))
    blocks = block_map(batch, num_tokens, block_tokens)
    pages = Pages(page_size, batch.page_table.shape[1], head_dim, tile)
    plan = _Plan(pages, Scoring(scale, window, soft_cap), group, block_tokens, blocks.rows.shape[0])
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(plan.num_blocks, num_kv_heads),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=3),
        interpret=interpret,
        name="paged_prefill_attention",
    )(query.astype(key_pool.dtype), key_pool, value_pool, batch.page_table, jnp.stack(blocks), sinks)


def _block_shape(num_queries: int, head_dim: int, dtype: jnp.dtype) -> tuple[int, int, int]:
    """Return a block's matmul rows, its warps, and the tokens of context that it reads per iteration."""
    if dtype == jnp.float32:  # its matmuls use no tensor cores but many registers
        return 16, 4, 16
    if padded(head_dim) * dtype.itemsize > 256:
        return _SMALL_BLOCK, 4, _TILE // 2
    if num_queries < _LARGE_BLOCK * _NUM_PROCESSORS:
        return _SMALL_BLOCK, 4, _TILE
    return _LARGE_BLOCK, 8, _TILE


def _kernel(
    query_ref: Any,  # [T, N, H]
    key_ref: Any,  # [P, K, p, H]
    value_ref: Any,  # [P, K, p, H]
    table_ref: Any,  # [R, M]
    blocks_ref: Any,  # [5, blocks]: a BlockMap
    sinks_ref: Any | None,  # [N]
    out_ref: Any,  # [T, N, H]
    *,
    plan: _Plan,
) -> Any:
    block, head = plan.num_blocks - 1 - pl.program_id(0), pl.program_id(1)  # the long ones tend to be last
    row, token, count, position, visible = (blocks_ref[i, block] for i in range(5))
    pages, scoring, tile = plan.pages, plan.scoring, plan.pages.tile
    spread = pl.next_power_of_2(plan.group)
    index = jnp.arange(plan.block_tokens * spread)
    place, member = lax.div(index, spread), lax.rem(index, spread)
    is_used = (place < count) & (member < plan.group)
    where = ((token + place)[:, None], (head * plan.group + member)[:, None])
    query = load_heads(query_ref, where, is_used, pages.head_dim)

    def score_all(i: Int[Array, ""], keys: Float[Array, "S H"]) -> Float[Array, "rows S"]:
        del i
        return scoring(dot(query, keys, 1))

    def score_seen(i: Int[Array, ""], keys: Float[Array, "S H"]) -> Float[Array, "rows S"]:
        distance = (position + place)[:, None] - (i * tile + jnp.arange(tile))[None, :]
        is_seen = distance >= 0 if scoring.window is None else (distance >= 0) & (distance < scoring.window)
        return jnp.where(is_seen, scoring(dot(query, keys, 1)), MASKED)

    walk = functools.partial(pages.walk, (table_ref, key_ref, value_ref), row, head)
    stop = ceil_div(visible, tile)
    diagonal = jnp.minimum(lax.div(position + 1, tile), stop)  # tiles from here on need masks
    softmax, start = Softmax.empty(index.shape[0], pages.width), jnp.int32(0)
    if scoring.window is not None:
        first = lax.div(jnp.maximum(position - scoring.window + 1, 0), tile)
        start = jnp.minimum(ceil_div(jnp.maximum(visible - scoring.window, 0), tile), stop)
        softmax = walk((first, start), softmax, score_seen)
    diagonal = jnp.maximum(diagonal, start)
    softmax = walk((start, diagonal), softmax, score_all)
    softmax = walk((diagonal, stop), softmax, score_seen)
    heads = head * plan.group + member
    sinks = None if sinks_ref is None else pltriton.load(sinks_ref.at[heads], mask=is_used, other=0)
    store_heads(out_ref, where, softmax.mean(sinks), is_used, pages.head_dim)
