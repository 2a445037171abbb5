"""Paged prefill attention in Triton: a program owns a tile of a row's queries and one key/value head.

Queries and the query heads of a key/value head together fill the rows of a matmul, so that short chunks do too. The
grid has as many tiles as any lengths can need; a program finds its row from the lengths itself. Tiles of context that
all its queries see come first, without masks.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels import jax_triton
from pallas_kernels.decode_attention_jax_triton import context_tile, pointer, scoring_constants
from pallas_kernels.paged_attention import AttentionBatch, row_tokens


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
) -> Float[Array, "T N H"]:
    """Compute attention of the tokens of rows ``num_single`` to ``num_rows``; zeros for all others.

    Args:
        query: Each row's queries are consecutive, and the last of its context.
        key_pool: Pages of keys.
        value_pool: Pages of values; all finite.
        batch: Row and position of each token.
        scale: Factor of the scores.
        window: Number of latest tokens that a query sees; None: all.
        soft_cap: Bound of the scores, or None.
        sinks: Logit of each query head that has no value, or None.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, page_size = key_pool.shape[1:3]
    num_rows = batch.page_table.shape[0]
    group = num_heads // num_kv_heads
    query_rows = 16 if query.dtype == jnp.float32 else 128 if head_dim <= 128 else 64
    query_rows = max(query_rows, pl.next_power_of_2(group))
    tiles = num_tokens // (query_rows // group) + min(num_rows, num_tokens)
    out = jax_triton.call(
        jax_triton.kernels("attention_jax_triton_kernels").prefill_kernel,
        query,
        key_pool,
        value_pool,
        batch.page_table,
        batch.context_lens,
        batch.query_starts,
        batch.query_lens,
        jnp.stack([batch.num_single, batch.num_rows]),
        pointer(sinks, query),
        batch.page_table.shape[1],
        out_type=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(tiles, num_kv_heads),
        num_warps=8,
        num_stages=3 if query.dtype == jnp.float32 or head_dim > 128 else 5,
        SHAPE=(num_kv_heads, group, page_size, head_dim),
        SCORING=tuple(scoring_constants(scale, window, soft_cap, sinks is not None)),
        TILES=(pl.next_power_of_2(num_rows), query_rows, context_tile(query.dtype)),
    )
    row = jnp.arange(num_rows)
    is_written = row_tokens(batch, num_tokens) & (row >= batch.num_single) & (row < batch.num_rows)
    return jnp.where(is_written.any(1)[:, None, None], out, 0)
