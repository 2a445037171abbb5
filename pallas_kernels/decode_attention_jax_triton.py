"""Paged decode attention in Triton: one program per row, key/value head and split of the row's context.

The same algorithm as the Pallas kernel ``decode_attention_triton``: the query heads of a key/value head stand together
in the rows of a product, splits cut the context's real length, and their parts in float32 are weighted by their
denominators.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import jax_triton


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
) -> Float[Array, "R N H"]:
    """Compute attention of one query per row, the last token of a context.

    Args:
        query: A row each; its result depends on that row's data and ``num_splits`` alone.
        key_pool: Pages of keys.
        value_pool: Pages of values; all finite.
        page_table: Pages of contexts.
        rows: Which of those each query belongs to.
        lens: Tokens of each context; 0 gives zeros.
        scale: Factor of the scores.
        window: Number of latest tokens that are seen; None: all.
        soft_cap: Bound of the scores, or None.
        sinks: Logit of each query head that has no value, or None.
        num_splits: Programs that share a context.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, page_size = key_pool.shape[1:3]
    kernels = jax_triton.kernels("attention_jax_triton_kernels")
    part_type = query.dtype if num_splits == 1 else jnp.float32
    parts, logs = jax_triton.call(
        kernels.decode_kernel,
        query,
        key_pool,
        value_pool,
        page_table,
        rows,
        lens,
        pointer(sinks, query),
        page_table.shape[1],
        out_type=(
            jax.ShapeDtypeStruct((num_rows, num_heads, num_splits, head_dim), part_type),
            jax.ShapeDtypeStruct((num_rows, num_heads, num_splits), jnp.float32),
        ),
        grid=(num_rows, num_kv_heads, num_splits),
        num_warps=8 if query.dtype == jnp.float32 else 4,
        num_stages=3 if query.dtype == jnp.float32 else 5,  # half of them for pages: their numbers come first
        SHAPE=(num_kv_heads, num_heads // num_kv_heads, page_size, head_dim),
        SCORING=tuple(scoring_constants(scale, window, soft_cap, sinks is not None)),
        TILE=context_tile(query.dtype),
    )
    if num_splits == 1:
        return parts.reshape(query.shape)
    return jax_triton.call(
        kernels.combine_kernel,
        parts,
        logs,
        pointer(sinks, query),
        out_type=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(num_rows * num_heads,),
        num_warps=4,
        num_stages=2,
        SPLITS=num_splits,
        HEAD_DIM=head_dim,
        SINKS=0 if sinks is None else num_heads,
    )


class ScoringConstants(NamedTuple):
    """How scores are made, as kernels take it: 0 stands for none."""

    scale: float
    window: int
    soft_cap: float
    has_sinks: bool


def scoring_constants(scale: float, window: int | None, soft_cap: float | None, has_sinks: bool) -> ScoringConstants:
    """Return the constants of a kernel call."""
    return ScoringConstants(float(scale), window or 0, float(soft_cap or 0), has_sinks)


def pointer(optional: Array | None, other: Array) -> Array:
    """Return an array that a kernel's pointer to an optional one can name: ``other``, which it does not read, if there
    is none."""
    return other if optional is None else optional


def context_tile(dtype: jnp.dtype) -> int:
    """Tokens of context that a program reads at a time."""
    return 16 if dtype == jnp.float32 else 64
