"""Paged decode attention for NVIDIA Hopper in Pallas Mosaic GPU: one query token a row.

A program owns one (row, kv head, split). Its producer warpgroup copies 64-token tiles of keys and values page by page
through the tensor memory accelerator into a ring in shared memory; its consumer warpgroup computes scores and weighted
values with tokens and head dimensions along the 64 rows of ``wgmma`` and the group's query heads along its columns
(S^T = K Q^T, O^T = V^T P^T), so that a group is padded to 8 heads, not to 64, and two programs fit a multiprocessor.

The ideas are public: packing a group's heads, splits by real length and a log-sum-exp combine (flash decoding,
FlashInfer, FlashMLA), the online softmax (arXiv:1805.02867). Needs JAX 0.11; see ``mosaic_support``.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_scores import MASKED
from pallas_kernels.mosaic_ring import Ring, Span, Tiles, copy_tiles, swizzled
from pallas_kernels.mosaic_support import Scoring, mosaic_gpu

TILE = 64  # tokens that a round reads
_HEADS_MULTIPLE = 8  # columns that wgmma computes at least
_NUM_STAGES = 3  # tiles of the ring: with two programs a multiprocessor, 192 KB of it are under way
_WIDE_GROUP = 24  # query heads of 256 that leave room in shared memory for so many tiles
_PRODUCER, _CONSUMER = 0, 1


class _Plan(NamedTuple):
    """What is fixed when the kernel is compiled."""

    num_kv_heads: int
    group: int
    head_dim: int
    num_splits: int
    tiles: Tiles
    scoring: Scoring

    @property
    def columns(self) -> int:
        """Query heads of a group, padded."""
        return -(-self.group // _HEADS_MULTIPLE) * _HEADS_MULTIPLE


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "num_splits", "interpret"))
def decode_attention(
    query: Float[Array, "R N H"],
    key_pool: Float[Array, "P K p H"],
    value_pool: Float[Array, "P K p H"],
    page_table: Int[Array, "rows M"],
    rows: Int[Array, " R"],
    lens: Int[Array, " R"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    num_splits: int,
    interpret: Any = None,
) -> Float[Array, "R N H"]:
    """Attention of each query over a context whose last token it is.

    A function of its own for XLA (``jax.jit``), so that a step's layers share one compiled kernel.

    Args:
        query: bfloat16 or float16, like the pools.
        key_pool: Pages of every kv head; H is a multiple of 64, p one of 16, 32, 64, 128.
        value_pool: The same; finite everywhere.
        page_table: Pages of each context in order.
        rows: Row of the page table that each query belongs to.
        lens: Tokens of its context, its own included; zeros come out for 0.
        scale: Factor of the products.
        window: Tokens that a query sees, itself included; None for all.
        soft_cap: Bound that scores approach by a tanh; None for none.
        num_splits: Parts of equally many tiles that a context is cut into, computed side by side.
        interpret: ``InterpretGPUParams`` to run on a CPU.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, page_size = key_pool.shape[1:3]
    group, scoring = num_heads // num_kv_heads, Scoring(scale, window, soft_cap)
    is_crowded = head_dim > 128 and group > _WIDE_GROUP
    tiles = Tiles(TILE, _NUM_STAGES - is_crowded, page_size)
    plan = _Plan(num_kv_heads, group, head_dim, num_splits, tiles, scoring)
    grouped = query.reshape(num_rows, num_kv_heads, plan.group, head_dim)
    launch = _launch(plan, num_rows, query.dtype, interpret)
    out = launch(page_table, rows, lens, grouped, key_pool, value_pool)
    if num_splits > 1:
        return _combine(*out)[:, :, : plan.group].astype(query.dtype).reshape(query.shape)
    return out[0].reshape(query.shape)


def _combine(
    partial: Float[Array, "splits R K H columns"], lse: Float[Array, "splits R K columns"]
) -> Float[Array, "R K columns H"]:
    """The mean of the splits' means, weighted by their sums, whose base-2 logarithms are ``lse``."""
    weights = jnp.exp2(lse - lse.max(0))
    mean = (partial * weights[:, :, :, None]).sum(0) / weights.sum(0)[:, :, None]
    return mean.swapaxes(2, 3)


def _launch(plan: _Plan, num_rows: int, dtype: Any, interpret: Any) -> Any:
    """The kernel as a function of arrays; see ``_kernel`` for what it takes and gives."""
    plgpu = mosaic_gpu()
    splits, heads, columns = plan.num_splits, plan.num_kv_heads, plan.columns
    if splits == 1:
        out_type = (jax.ShapeDtypeStruct((num_rows, heads, plan.group, plan.head_dim), dtype),)
    else:
        sizes = (splits, num_rows, heads, plan.head_dim, columns)
        out_type = tuple(jax.ShapeDtypeStruct(a, jnp.float32) for a in (sizes, (*sizes[:3], columns)))
    return plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=out_type,
        scratch_types={
            "ring": plan.tiles.scratch(plan.head_dim, dtype, 1),
            "plain_ref": plgpu.SMEM((columns, plan.head_dim), dtype),
            "query_ref": plgpu.SMEM((columns, plan.head_dim), dtype, transforms=swizzled()),
            "weights_ref": plgpu.SMEM((columns, TILE), dtype, transforms=swizzled()),
            "query_filled": plgpu.Barrier(),
        },
        grid=(heads, num_rows, splits),
        grid_names=("head", "row", "split"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _span(plan: _Plan, length: Int[Array, ""]) -> Span:
    """The part of a context that this program's split has."""
    first = jnp.int32(0) if plan.scoring.window is None else lax.div(jnp.maximum(length - plan.scoring.window, 0), TILE)
    num_tiles = lax.div(length + (TILE - 1), TILE) - first
    if plan.num_splits == 1:
        return Span(length, first, num_tiles)
    per_split = lax.div(num_tiles + (plan.num_splits - 1), plan.num_splits)
    skipped = jnp.minimum(lax.axis_index("split") * per_split, num_tiles)
    return Span(length, first + skipped, jnp.minimum(per_split, num_tiles - skipped))


def _kernel(
    plan: _Plan,
    table_ref: Any,  # [rows, M] int32
    rows_ref: Any,  # [R] int32
    lens_ref: Any,  # [R] int32
    query_hbm_ref: Any,  # [R, K, G, H]
    key_hbm_ref: Any,  # [P, K, p, H]
    value_hbm_ref: Any,  # [P, K, p, H]
    *out_refs: Any,  # [R, K, G, H]; or [splits, R, K, H, columns] and [splits, R, K, columns] float32
    ring: Ring,
    plain_ref: Any,  # [columns, H]
    query_filled: Any,
    **scratch: Any,
) -> None:
    """One (head, row, split): a warpgroup that copies and one that computes."""
    warpgroup = lax.axis_index("warpgroup")
    head, row, split = lax.axis_index("head"), lax.axis_index("row"), lax.axis_index("split")
    span = _span(plan, lens_ref[row])

    @pl.when(warpgroup == _PRODUCER)
    def _produce():
        mosaic_gpu().copy_gmem_to_smem(query_hbm_ref.at[row, head], plain_ref.at[pl.ds(0, plan.group)], query_filled)
        copy_tiles(plan.tiles, span, ring, table_ref.at[rows_ref[row]], key_hbm_ref, value_hbm_ref, head)

    @pl.when(warpgroup == _CONSUMER)
    def _consume():
        mosaic_gpu().barrier_wait(query_filled)
        index = (row, head) if plan.num_splits == 1 else (split, row, head)
        _attend(plan, span, ring, plain_ref, *(ref.at[index] for ref in out_refs), **scratch)


def _attend(
    plan: _Plan,
    span: Span,
    ring: Ring,
    plain_ref: Any,  # [columns, H]: queries, and later results
    *out_refs: Any,  # [G, H]; or [H, columns] and [columns] float32
    query_ref: Any,  # [columns, H]
    weights_ref: Any,  # [columns, TILE]
) -> Any:
    """The consumer: the softmax over this split's tiles, and what comes out of it."""
    plgpu = mosaic_gpu()
    layout = plgpu.Layout.WGMMA
    per_head = layout.reduce(0)
    query_ref.T[...] = plgpu.layout_cast(plgpu.load(plain_ref.T, optimized=False), layout)
    plgpu.commit_smem()

    def product(left_ref, right_ref):
        def multiply(acc_ref):
            plgpu.wgmma(acc_ref, left_ref, right_ref)
            return acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((left_ref.shape[0], right_ref.shape[1]), jnp.float32))

    def spread(per_column, rows):
        return lax.broadcast_in_dim(per_column, (rows, plan.columns), [1])

    def round_(i, state):
        values, maximum, total = state
        slot = lax.rem(i, plan.tiles.num_stages)
        plgpu.barrier_wait(ring.key_filled.at[slot])
        scores = plan.scoring(product(ring.key_ref.at[slot], query_ref.T))
        plgpu.barrier_arrive(ring.key_free.at[slot])
        position = (span.first + i) * TILE + plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=layout)
        seen = position < span.length
        if plan.scoring.window is not None:
            seen &= position >= span.length - plan.scoring.window
        scores = jnp.where(seen, scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(0))
        kept = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - spread(new_maximum, TILE))
        weights_ref.T[...] = weights.astype(weights_ref.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(ring.value_filled.at[slot])
        added = product(ring.value_ref.at[slot].T, weights_ref.T)
        plgpu.barrier_arrive(ring.value_free.at[slot])
        return values * spread(kept, plan.head_dim) + added, new_maximum, total * spread(kept, TILE) + weights

    state = (
        plgpu.layout_cast(jnp.zeros((plan.head_dim, plan.columns), jnp.float32), layout),
        plgpu.layout_cast(jnp.full((plan.columns,), MASKED, jnp.float32), per_head),
        plgpu.layout_cast(jnp.zeros((TILE, plan.columns), jnp.float32), layout),
    )
    values, maximum, total = lax.fori_loop(0, span.num_tiles, round_, state)
    total = jnp.maximum(total.sum(0), 1e-30)
    mean = values / spread(total, plan.head_dim)
    if plan.num_splits > 1:
        out_refs[0][...] = mean
        out_refs[1][...] = maximum + jnp.log2(total)
        return
    plain_ref.T[...] = mean.astype(plain_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(plain_ref.at[pl.ds(0, plan.group)], out_refs[0])
    plgpu.wait_smem_to_gmem(0)
