"""Compute paged decode attention for NVIDIA Hopper in Pallas Mosaic GPU: one query token per row.

A program handles one (row, kv head, split). Its producer warpgroup copies 64-token tiles of keys and values page by
page through the tensor memory accelerator (TMA) into a ring in shared memory; its consumer warpgroup computes scores
and weighted values with tokens and head dimensions along the 64 rows of ``wgmma`` and the group's query heads along its
columns (S^T = K Q^T, O^T = V^T P^T), so that a group is padded to 8 heads, not to 64, and two programs fit on a
multiprocessor. A second kernel, ``combine_attention_mosaic``, combines the splits of a row.

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

from pallas_kernels.attention_scores import LOG2_E, MASKED
from pallas_kernels.combine_attention_mosaic import combine_splits
from pallas_kernels.mosaic_ring import Ring, Span, Splits, Tiles, copy_tiles, swizzled
from pallas_kernels.mosaic_support import Scoring, mosaic_gpu

TILE = 64  # tokens that a round reads
_HEADS_MULTIPLE = 8  # the fewest columns that wgmma computes
_NUM_STAGES = 3  # tiles in the ring: with two programs per multiprocessor, 192 KB are in flight on it
_WIDE_GROUP = 24  # most query heads of width 256 that leave room in shared memory for that many tiles
_PRODUCER, _CONSUMER = 0, 1


class _Plan(NamedTuple):
    """Compile-time parameters of the kernel."""

    num_kv_heads: int
    group: int
    head_dim: int
    splits: Splits
    tiles: Tiles
    scoring: Scoring
    has_sinks: bool

    @property
    def columns(self) -> int:
        """Return the number of query heads in a group, padded."""
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
    sinks: Float[Array, " N"] | None = None,
    num_splits: int,
    interpret: Any = None,
) -> Float[Array, "R N H"]:
    """Compute the attention of each query over the context that it is the last token of.

    A row's result depends on its own operands and ``num_splits`` only, bit for bit. The function is jitted by itself so
    that the layers of a step share one compiled kernel.

    Args:
        query: bfloat16 or float16, like the pools.
        key_pool: Pages of every kv head; H is 64, 128 or 256, p is 16, 32, 64 or 128.
        value_pool: The same for values; finite everywhere.
        page_table: Pages of each context, in order.
        rows: Row of the page table that each query belongs to.
        lens: Length of each query's context in tokens, itself included; a row of length 0 gets zeros.
        scale: Factor that query-key dot products are multiplied by.
        window: Number of tokens that a query sees, itself included; None for all.
        soft_cap: Bound that scores approach by a tanh; None for no bound.
        sinks: Logit of each query head that has no value; None for none.
        num_splits: Number of parts, equal in tiles, that each context is split into and that run side by side.
        interpret: ``InterpretGPUParams`` to run on a CPU.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, page_size = key_pool.shape[1:3]
    group, scoring = num_heads // num_kv_heads, Scoring(scale, window, soft_cap)
    is_crowded = head_dim > 128 and group > _WIDE_GROUP
    tiles = Tiles(TILE, _NUM_STAGES - is_crowded, page_size)
    splits = Splits(num_splits, TILE, window)
    plan = _Plan(num_kv_heads, group, head_dim, splits, tiles, scoring, sinks is not None and num_splits == 1)
    grouped = query.reshape(num_rows, num_kv_heads, group, head_dim)
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(num_kv_heads, group), ((0, 0), (0, plan.columns - group)))
    launch = _launch(plan, num_rows, query.dtype, interpret)
    out = launch(page_table, rows, lens, grouped, key_pool, value_pool, *([sinks] if plan.has_sinks else []))
    if num_splits == 1:
        return out[0].reshape(query.shape)
    settings = {"splits": splits, "group": group, "dtype": query.dtype}
    parts, lse = out
    combined = combine_splits(parts, lse, lens, sinks, **settings, interpret=interpret)
    return combined.reshape(query.shape)


def _launch(plan: _Plan, num_rows: int, dtype: Any, interpret: Any) -> Any:
    """Return the kernel as a function of arrays; see ``_kernel`` for its operands and results."""
    plgpu = mosaic_gpu()
    num_splits, heads, columns = plan.splits.num_splits, plan.num_kv_heads, plan.columns
    if num_splits == 1:
        out_type = (jax.ShapeDtypeStruct((num_rows, heads, plan.group, plan.head_dim), dtype),)
    else:
        sizes = (num_rows, heads, num_splits)
        shapes = ((*sizes, plan.head_dim, columns), (*sizes, columns))
        out_type = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
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
        grid=(heads, num_rows, num_splits),
        grid_names=("head", "row", "split"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _kernel(
    plan: _Plan,
    table_ref: Any,  # [rows, M] int32
    rows_ref: Any,  # [R] int32
    lens_ref: Any,  # [R] int32
    query_hbm_ref: Any,  # [R, K, G, H]
    key_hbm_ref: Any,  # [P, K, p, H]
    value_hbm_ref: Any,  # [P, K, p, H]
    *refs: Any,  # [K, columns] float32 if there are sinks and one split; then the results:
    # [R, K, G, H]; or [R, K, splits, H, columns] and [R, K, splits, columns] float32
    ring: Ring,
    plain_ref: Any,  # [columns, H]
    query_filled: Any,
    **scratch: Any,
) -> None:
    """Run one (head, row, split): one warpgroup copies, the other computes."""
    warpgroup = lax.axis_index("warpgroup")
    head, row, split = lax.axis_index("head"), lax.axis_index("row"), lax.axis_index("split")
    is_split = plan.splits.num_splits > 1
    span = plan.splits.span(lens_ref[row], split)
    # A row that is not split needs its zeros; the combining kernel does not read splits without tiles.
    has_result = span.num_tiles > 0 if is_split else True

    @pl.when((warpgroup == _PRODUCER) & has_result)
    def _produce():
        mosaic_gpu().copy_gmem_to_smem(query_hbm_ref.at[row, head], plain_ref.at[pl.ds(0, plan.group)], query_filled)
        copy_tiles(plan.tiles, span, ring, table_ref.at[rows_ref[row]], key_hbm_ref, value_hbm_ref, head)

    @pl.when((warpgroup == _CONSUMER) & has_result)
    def _consume():
        mosaic_gpu().barrier_wait(query_filled)
        index = (row, head, split) if is_split else (row, head)
        sinks_ref, out_refs = (refs[0].at[head], refs[1:]) if plan.has_sinks else (None, refs)
        _attend(plan, span, ring, plain_ref, sinks_ref, *(ref.at[index] for ref in out_refs), **scratch)


def _attend(
    plan: _Plan,
    span: Span,
    ring: Ring,
    plain_ref: Any,  # [columns, H]: queries, then results
    sinks_ref: Any | None,  # [columns] float32
    *out_refs: Any,  # [G, H]; or [H, columns] and [columns] float32
    query_ref: Any,  # [columns, H]
    weights_ref: Any,  # [columns, TILE]
) -> Any:
    """Compute the attention over this split's tiles and store it: the work of the consumer."""
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
    if sinks_ref is not None:
        sinks = plgpu.load(sinks_ref, layout=per_head, optimized=False)
        total = total + jnp.exp2(sinks * LOG2_E - maximum)
    mean = values / spread(total, plan.head_dim)
    if plan.splits.num_splits > 1:
        out_refs[0][...] = mean
        out_refs[1][...] = maximum + jnp.log2(total)
        return
    plain_ref.T[...] = mean.astype(plain_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(plain_ref.at[pl.ds(0, plan.group)], out_refs[0])
    plgpu.wait_smem_to_gmem(0)
