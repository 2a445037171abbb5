"""Compute decode attention over paged latents (MLA) for NVIDIA Hopper in Pallas Mosaic GPU: one query token per row.

A program handles one (row, split) and a block of up to 64 query heads, the rows of ``wgmma``; fewer heads leave rows
unused. Each tile of 64 latents is copied into shared memory once, through the tensor memory accelerator (TMA), and is
both keys and values. Four warpgroups form a pipeline: one copies tiles; one multiplies queries by latents and computes
the softmax's weights; two add weighted latents, each in its half of the value columns, since the registers of one
cannot hold them (64 x 512 float32). So the scores of a tile are computed while the values of the previous one are
added. ``combine_attention_mosaic`` combines the splits of a row.

What limits it: of a token's 1152 bytes, 128 heads make 2 x 128 x (576 + 512) = 279 kFLOP, 242 per byte, which is beyond
the card's balance (990 TFLOP/s and 4.8 TB/s: 206), so that many heads are bound by the matrix units and 16 heads (30
per byte; 121 with the unused rows) by memory. Shared memory holds only two tiles of 74 KB beside the queries, one
program runs on a multiprocessor, and each block of 64 heads reads all latents, from the L2 cache if blocks run side by
side. The roles of the warpgroups and the halves of columns follow FlashMLA, the splits flash decoding, the online
softmax arXiv:1805.02867. Needs JAX 0.11; see ``mosaic_support``.
"""

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_scores import MASKED
from pallas_kernels.combine_attention_mosaic import combine_splits
from pallas_kernels.mosaic_ring import Lane, Span, Splits, Tiles, copy_lanes, swizzled
from pallas_kernels.mosaic_support import Scoring, mosaic_gpu, registers_of

TILE = 64  # tokens that a round reads
HEADS = 64  # query heads of a program: the rows of wgmma
_NUM_STAGES = 2  # tiles in the ring
_MOST_COLUMNS = 128  # of one wgmma: its operands must fit into the 128 registers that each thread starts with
_CHUNK = 64  # features of queries that lie together in shared memory
_HEADS_MULTIPLE = 8  # rows of the tiles of swizzled shared memory, which copies fill whole
_PRODUCER, _SCORER, _FIRST_ADDER, _NUM_ADDERS = 0, 1, 2, 2
_REGISTERS = registers_of(40, 120, 176, 176)  # of each warpgroup


class _Plan(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        heads: Query heads of a block, at most ``HEADS``.
        head_dim: Width of a latent with its rotated key.
        value_dim: Width of the latent.
        splits: How contexts are split.
        tiles: How a context is read.
        scoring: Scale of the scores.
        in_place: Whether ``wgmma`` adds to the registers that hold the values, which the interpreter cannot do.
    """

    heads: int
    head_dim: int
    value_dim: int
    splits: Splits
    tiles: Tiles
    scoring: Scoring
    in_place: bool

    @property
    def part(self) -> int:
        """Return the number of value columns of a warpgroup."""
        return self.value_dim // _NUM_ADDERS


class _Weights(NamedTuple):
    """Shared memory through which the weights of a tile pass to the adders, and its barriers.

    ``factor_ref`` holds what sums so far are to be multiplied by; after the last tile, one more round passes the
    reciprocals of the weights' sums.
    """

    ref: Any  # [HEADS, TILE]
    factor_ref: Any  # [HEADS] float32
    filled: Any
    free: Any


@functools.partial(jax.jit, static_argnames=("value_dim", "scale", "num_splits", "interpret"))
def decode_latents(
    query: Float[Array, "R N H"],
    pool: Float[Array, "P p H"],
    page_table: Int[Array, "rows M"],
    rows: Int[Array, " R"],
    lens: Int[Array, " R"],
    *,
    value_dim: int,
    scale: float,
    num_splits: int,
    interpret: Any = None,
) -> Float[Array, "R N latent"]:
    """Compute the attention of each query over the context that it is the last token of.

    A row's result depends on its own operands and ``num_splits`` only, bit for bit. The function is jitted by itself so
    that the layers of a step share one compiled kernel.

    Args:
        query: bfloat16 or float16, like the pool; H is a multiple of 64, at most 576.
        pool: Pages of latents with rotated keys; p is 16, 32, 64 or 128. Latents are finite everywhere.
        page_table: Pages of each context, in order.
        rows: Row of the page table that each query belongs to.
        lens: Length of each query's context in tokens, itself included; a row of length 0 gets zeros.
        value_dim: Width of the latent, the first part of H: 128, 256, 384 or 512.
        scale: Factor that query-key dot products are multiplied by.
        num_splits: Number of parts, equal in tiles, that each context is split into and that run side by side.
        interpret: ``InterpretGPUParams`` to run on a CPU. Values are then added to registers apart from ``wgmma``.
    """
    num_rows, num_heads, head_dim = query.shape
    blocks = num_blocks(num_heads)
    heads = -(-num_heads // (blocks * _HEADS_MULTIPLE)) * _HEADS_MULTIPLE
    splits, tiles = Splits(num_splits, TILE, None), Tiles(TILE, _NUM_STAGES, pool.shape[1])
    plan = _Plan(heads, head_dim, value_dim, splits, tiles, Scoring(scale, None, None), interpret is None)
    padded = jnp.pad(query, ((0, 0), (0, blocks * heads - num_heads), (0, 0)))
    launch = _launch(plan, num_rows, blocks, query.dtype, interpret)
    out = launch(page_table, rows, lens, padded.reshape(num_rows, blocks, heads, head_dim), pool)
    if num_splits > 1:
        parts, lse = out
        settings = {"splits": splits, "group": heads, "dtype": query.dtype, "by_head": True}
        out = (combine_splits(parts, lse, lens, interpret=interpret, **settings),)
    return out[0].reshape(num_rows, blocks * heads, value_dim)[:, :num_heads]


def num_blocks(num_heads: int) -> int:
    """Return the number of programs that the heads of a row are divided among."""
    return -(-num_heads // HEADS)


def _launch(plan: _Plan, num_rows: int, blocks: int, dtype: Any, interpret: Any) -> Any:
    """Return the kernel as a function of arrays; see ``_kernel`` for its operands and results."""
    plgpu = mosaic_gpu()
    if plan.splits.num_splits == 1:
        out_type = (jax.ShapeDtypeStruct((num_rows, blocks, plan.heads, plan.value_dim), dtype),)
    else:
        sizes = (num_rows, blocks, plan.splits.num_splits, HEADS)
        out_type = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*sizes, plan.value_dim), sizes))
    return plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=out_type,
        scratch_types={
            "lane": plan.tiles.lane(plan.head_dim, dtype, _NUM_ADDERS),
            "query_ref": plgpu.SMEM((plan.head_dim // _CHUNK, HEADS, _CHUNK), dtype, transforms=swizzled()),
            "query_filled": plgpu.Barrier(num_arrivals=plan.head_dim // _CHUNK),
            "weights": _Weights(
                plgpu.SMEM((HEADS, TILE), dtype, transforms=swizzled()),
                plgpu.SMEM((HEADS,), jnp.float32),
                plgpu.Barrier(),
                plgpu.Barrier(num_arrivals=_NUM_ADDERS),
            ),
        },
        grid=(num_rows, plan.splits.num_splits, blocks),  # blocks that read the same latents start together
        grid_names=("row", "split", "block"),
        num_threads=_FIRST_ADDER + _NUM_ADDERS,
        thread_name="warpgroup",
        # Rows of wgmma are reduced inside a warp, which takes no shared memory; there is none left.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )


def _kernel(
    plan: _Plan,
    table_ref: Any,  # [rows, M] int32
    rows_ref: Any,  # [R] int32
    lens_ref: Any,  # [R] int32
    query_hbm_ref: Any,  # [R, blocks, heads, H]
    pool_hbm_ref: Any,  # [P, p, H]
    out_ref: Any,  # [R, blocks, heads, latent]; or [R, blocks, splits, HEADS, latent] float32
    *lse_refs: Any,  # none; or [R, blocks, splits, HEADS] float32
    lane: Lane,
    query_ref: Any,  # [H / _CHUNK, HEADS, _CHUNK]: queries, then results of a context that is not split
    query_filled: Any,
    weights: _Weights,
) -> None:
    """Run one (row, split, block)."""
    plgpu = mosaic_gpu()
    warpgroup = lax.axis_index("warpgroup")
    row, split, block = lax.axis_index("row"), lax.axis_index("split"), lax.axis_index("block")
    span = plan.splits.span(lens_ref[row], split)
    # A row that is not split needs its zeros; the combining kernel does not read splits without tiles.
    has_result = span.num_tiles > 0 if lse_refs else True
    index = (row, block, split) if lse_refs else (row, block)

    @pl.when((warpgroup == _PRODUCER) & has_result)
    def _produce():
        plgpu.set_max_registers(_REGISTERS[_PRODUCER], action="decrease")
        for i in range(plan.head_dim // _CHUNK):
            source = query_hbm_ref.at[row, block, :, pl.ds(i * _CHUNK, _CHUNK)]
            plgpu.copy_gmem_to_smem(source, query_ref.at[i, pl.ds(0, plan.heads)], query_filled)
        copy_lanes(plan.tiles, span, table_ref.at[rows_ref[row]], ((pool_hbm_ref, lane),))

    @pl.when((warpgroup == _SCORER) & has_result)
    def _score():
        plgpu.set_max_registers(_REGISTERS[_SCORER], action="decrease")
        plgpu.barrier_wait(query_filled)
        lse = _compute_weights(plan, span, lane, query_ref, weights)
        for lse_ref in lse_refs:
            lse_ref.at[index][...] = lse

    for i in range(_NUM_ADDERS):

        @pl.when((warpgroup == _FIRST_ADDER + i) & has_result)
        def _add(first_column=i * plan.part):
            plgpu.set_max_registers(_REGISTERS[_FIRST_ADDER], action="increase")
            pieces = _add_values(plan, span, lane, weights, first_column)
            _store(plan, pieces, first_column, query_ref, out_ref.at[index])


def _store(
    plan: _Plan,
    pieces: tuple[Float[Array, "HEADS columns"], ...],
    column: int,
    staging_ref: Any,  # [H / _CHUNK, HEADS, _CHUNK]
    out_ref: Any,  # [heads, latent], or [HEADS, latent] float32
) -> None:
    """Store the results of an adder, whose first column is given."""
    plgpu = mosaic_gpu()
    width = pieces[0].shape[1]
    for i, piece in enumerate(pieces):
        if plan.splits.num_splits > 1:
            out_ref.at[:, pl.ds(column + i * width, width)][...] = piece
            continue
        for start in range(0, width, _CHUNK):
            chunk = lax.slice(piece, (0, start), (HEADS, start + _CHUNK)).astype(staging_ref.dtype)
            staging_ref.at[(column + i * width + start) // _CHUNK][...] = chunk
    if plan.splits.num_splits > 1:
        return
    plgpu.commit_smem()
    for start in range(column, column + plan.part, _CHUNK):
        source = staging_ref.at[start // _CHUNK, pl.ds(0, plan.heads)]
        plgpu.copy_smem_to_gmem(source, out_ref.at[:, pl.ds(start, _CHUNK)])
    plgpu.wait_smem_to_gmem(0)


def _spread(per_head: Array, columns: int) -> Array:
    """Broadcast [HEADS] to [HEADS, columns]."""
    return lax.broadcast_in_dim(per_head, (HEADS, columns), [0])


def _compute_weights(
    plan: _Plan,
    span: Span,
    lane: Lane,
    query_ref: Any,  # [H / _CHUNK, HEADS, _CHUNK]
    weights: _Weights,
) -> Float[Array, " HEADS"]:
    """Pass the weights of each tile to the adders, and return the base-2 logarithms of their sums."""
    plgpu = mosaic_gpu()
    layout = plgpu.Layout.WGMMA
    per_head = layout.reduce(1)

    def product(slot):
        def multiply(acc_ref):
            for i in range(plan.head_dim // _CHUNK):
                plgpu.wgmma(acc_ref, query_ref.at[i], lane.ref.at[slot, :, pl.ds(i * _CHUNK, _CHUNK)].T)
            return acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((HEADS, TILE), jnp.float32))

    def await_free(i):
        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(weights.free)

    def round_(i, state):
        maximum, total = state
        slot = lax.rem(i, plan.tiles.num_stages)
        plgpu.barrier_wait(lane.filled.at[slot])
        scores = plan.scoring(product(slot))
        position = (span.first + i) * TILE + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
        scores = jnp.where(position < span.length, scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(1))
        kept = jnp.exp2(maximum - new_maximum)
        parts = jnp.exp2(scores - _spread(new_maximum, TILE))
        total = total * kept + parts.sum(1)
        await_free(i)
        weights.ref[...] = parts.astype(weights.ref.dtype)
        weights.factor_ref[...] = kept
        plgpu.commit_smem()
        plgpu.barrier_arrive(weights.filled)
        return new_maximum, total

    state = (
        plgpu.layout_cast(jnp.full((HEADS,), MASKED, jnp.float32), per_head),
        plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), per_head),
    )
    maximum, total = lax.fori_loop(0, span.num_tiles, round_, state)
    total = jnp.maximum(total, 1e-30)
    await_free(span.num_tiles)
    weights.factor_ref[...] = 1 / total
    plgpu.commit_smem()
    plgpu.barrier_arrive(weights.filled)
    return maximum + jnp.log2(total)


def _add_values(
    plan: _Plan, span: Span, lane: Lane, weights: _Weights, first_column: int
) -> tuple[Float[Array, "HEADS columns"], ...]:
    """Return the weighted means of the latents in an adder's columns, in pieces."""
    plgpu = mosaic_gpu()
    layout = plgpu.Layout.WGMMA
    width = math.gcd(plan.part, _MOST_COLUMNS)
    columns = [pl.ds(first_column + start, width) for start in range(0, plan.part, width)]

    def scaled(values):
        """Multiply by the factors that the scorer has passed."""
        factor = plgpu.load(weights.factor_ref, layout=layout.reduce(1), optimized=False)
        return tuple(piece * _spread(factor, width) for piece in values)

    def multiply(acc_refs, slot):
        for acc_ref, place in zip(acc_refs, columns, strict=True):
            plgpu.wgmma(acc_ref, weights.ref, lane.ref.at[slot, :, place])

    def multiply_apart(*acc_refs, slot):
        multiply(acc_refs, slot)
        return tuple(acc_ref[...] for acc_ref in acc_refs)

    def add(values, slot):
        if plan.in_place:
            return pl.run_state(functools.partial(multiply, slot=slot))(tuple(map(plgpu.ACC.init, values)))
        shape = plgpu.ACC((HEADS, width), jnp.float32)
        added = pl.run_scoped(functools.partial(multiply_apart, slot=slot), *(shape,) * len(columns))
        return tuple(map(operator.add, values, added))

    def round_(i, values):
        slot = lax.rem(i, plan.tiles.num_stages)
        plgpu.barrier_wait(lane.filled.at[slot])
        plgpu.barrier_wait(weights.filled)
        values = add(scaled(values), slot)
        plgpu.barrier_arrive(weights.free)
        plgpu.barrier_arrive(lane.free.at[slot])
        return values

    zeros = plgpu.layout_cast(jnp.zeros((HEADS, width), jnp.float32), layout)
    values = lax.fori_loop(0, span.num_tiles, round_, (zeros,) * len(columns))
    plgpu.barrier_wait(weights.filled)
    return scaled(values)
