"""Compute paged prefill attention for NVIDIA Hopper in Pallas Mosaic GPU: rows of several query tokens.

A program handles a block of one row's query tokens and one key/value head with all query heads that share it. A
producer warpgroup copies tiles of keys and values page by page through the tensor memory accelerator (TMA) into a ring
in shared memory; each of two consumer warpgroups computes 64 rows, and one multiplies matrices while the other computes
weights (the schedule of FlashAttention-3, arXiv:2407.08608). Tiles that every query sees in full are not masked.

Needs JAX 0.11; see ``mosaic_support``.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_scores import LOG2_E, MASKED
from pallas_kernels.mosaic_ring import Ring, Span, Tiles, copy_tiles, swizzled
from pallas_kernels.mosaic_support import Scoring, mosaic_gpu, registers_of
from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.prefill_blocks import block_map

_ROWS = 64  # rows of a consumer's matmuls: query tokens times heads of a group
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS, _ = registers_of(40, 232, 232)


class _Plan(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        tokens: Query tokens per consumer; its row i is token i % tokens of head i // tokens of the group.
        consumers: Number of warpgroups that compute.
        in_registers: Whether the matmul with the values reads the weights from registers, not from shared memory.
    """

    num_tokens: int
    group: int
    head_dim: int
    num_blocks: int
    tokens: int
    consumers: int
    in_registers: bool
    tiles: Tiles
    scoring: Scoring

    @property
    def tile(self) -> int:
        """Return the number of tokens of context that a round reads."""
        return self.tiles.size


class _Block(NamedTuple):
    """The query tokens of a program, the tokens that they see, and the tiles that need masks."""

    row: Int[Array, ""]
    token: Int[Array, ""]
    used: Int[Array, ""]  # tokens
    position: Int[Array, ""]
    visible: Int[Array, ""]
    first: Int[Array, ""]  # tile
    whole: Int[Array, ""]  # first tile that every query sees in full
    diagonal: Int[Array, ""]  # first tile after those
    stop: Int[Array, ""]


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "interpret"))
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
    interpret: Any = None,
) -> Float[Array, "T N H"]:
    """Compute the attention of the query tokens of all rows after the decode rows; all other tokens get zeros.

    The function is jitted by itself so that the layers of a step share one compiled kernel.

    Args:
        query: Each row's tokens are the last ones of its context; bfloat16 or float16, like the pools.
        key_pool: Keys, including this step's; H is 64, 128 or 256, p is 16, 32, 64 or 128.
        value_pool: Values, all of them finite.
        batch: Row and position of each token.
        scale: Factor that query-key dot products are multiplied by.
        window: Number of tokens that a query sees, itself included; None for all.
        soft_cap: Bound that scores approach by a tanh; None for no bound.
        sinks: Logit of each query head that has no value; None for none.
        interpret: ``InterpretGPUParams`` to run on a CPU. Weights then pass through shared memory, since the
            interpreter cannot run ``wgmma`` with an operand in registers.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, page_size = key_pool.shape[1:3]
    group = num_heads // num_kv_heads
    tokens, consumers = _ROWS // group, 2 if head_dim <= 128 else 1
    tiles = Tiles(128, 256 // head_dim, page_size) if head_dim <= 128 else Tiles(64, 2, page_size)
    blocks = block_map(batch, num_tokens, tokens * consumers)
    padding = max(tokens - num_tokens, 0)
    plan = _Plan(
        num_tokens + padding,
        group,
        head_dim,
        blocks.rows.shape[0],
        tokens,
        consumers,
        interpret is None,
        tiles,
        Scoring(scale, window, soft_cap),
    )
    padded = jnp.pad(query, ((0, padding), (0, 0), (0, 0)))
    launch = _launch(plan, num_kv_heads, query.dtype, interpret)
    arrays = [batch.page_table, jnp.stack(blocks), padded, key_pool, value_pool]
    if sinks is not None:
        own = jnp.repeat(sinks.reshape(num_kv_heads, group), tokens, axis=1)
        arrays.append(jnp.pad(own, ((0, 0), (0, _ROWS - group * tokens))))
    return launch(*arrays)[:num_tokens]


def _launch(plan: _Plan, num_kv_heads: int, dtype: Any, interpret: Any) -> Any:
    """Return the kernel as a function of arrays; see ``_kernel`` for its operands and results."""
    plgpu = mosaic_gpu()
    queries = (plan.consumers, _ROWS, plan.head_dim)
    scratch = {
        "ring": plan.tiles.scratch(plan.head_dim, dtype, plan.consumers),
        "plain_ref": plgpu.SMEM(queries, dtype),
        "query_ref": plgpu.SMEM(queries, dtype, transforms=swizzled()),
        "query_filled": plgpu.Barrier(num_arrivals=plan.group, num_barriers=plan.consumers),
        "turn": plgpu.Barrier(num_arrivals=plan.consumers),
    }
    if not plan.in_registers:
        scratch["weights_ref"] = plgpu.SMEM((plan.consumers, _ROWS, plan.tile), dtype, transforms=swizzled())
    return plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((plan.num_tokens, num_kv_heads * plan.group, plan.head_dim), dtype),
        scratch_types=scratch,
        grid=(num_kv_heads, plan.num_blocks),
        grid_names=("head", "block"),
        num_threads=plan.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _kernel(
    plan: _Plan,
    table_ref: Any,  # [R, M] int32
    blocks_ref: Any,  # [5, blocks] int32: a BlockMap
    query_hbm_ref: Any,  # [T, N, H]
    key_hbm_ref: Any,  # [P, K, p, H]
    value_hbm_ref: Any,  # [P, K, p, H]
    *refs: Any,  # [K, _ROWS] float32 if there are sinks; then the result [T, N, H]
    ring: Ring,
    **scratch: Any,
) -> None:
    """Run one (kv head, block): the last warpgroup copies, the others compute."""
    plgpu = mosaic_gpu()
    warpgroup, head = lax.axis_index("warpgroup"), lax.axis_index("head")
    block = _block(
        plan, blocks_ref, (plan.num_blocks - 1) - lax.axis_index("block")
    )  # the longest blocks come last in the map, so start them first
    is_used = block.used > 0

    @pl.when(is_used & (warpgroup < plan.consumers))
    def _consume():
        if plan.consumers > 1:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        *given, out_ref = refs
        sinks_ref = given[0].at[head] if given else None
        _attend(plan, block, warpgroup, head * plan.group, query_hbm_ref, sinks_ref, out_ref, ring=ring, **scratch)

    @pl.when(is_used & (warpgroup == plan.consumers))
    def _produce():
        if plan.consumers > 1:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        span = Span(block.visible, block.first, block.stop - block.first)
        copy_tiles(plan.tiles, span, ring, table_ref.at[block.row], key_hbm_ref, value_hbm_ref, head)


def _block(plan: _Plan, blocks_ref: Any, index: Any) -> _Block:
    """Return a block and its tiles: masked for the window, then unmasked, then masked after its first query."""
    row, token, count, position, visible = (blocks_ref[i, index] for i in range(5))
    stop = lax.div(visible + (plan.tile - 1), plan.tile)
    first = whole = jnp.int32(0)
    if plan.scoring.window is not None:
        first = lax.div(jnp.maximum(position - plan.scoring.window + 1, 0), plan.tile)
        whole = lax.div(jnp.maximum(visible - plan.scoring.window, 0) + (plan.tile - 1), plan.tile)
        first, whole = jnp.minimum(first, stop), jnp.minimum(whole, stop)
    diagonal = jnp.maximum(jnp.minimum(lax.div(position + 1, plan.tile), stop), whole)
    return _Block(row, token, count, position, visible, first, whole, diagonal, stop)


class _Consumer(NamedTuple):
    """The operands of a consumer warpgroup."""

    plan: _Plan
    block: _Block
    index: Any
    query_ref: Any  # [_ROWS, H]
    weights_ref: Any  # [_ROWS, tile], or None
    ring: Ring
    turn: Any

    def end_turn(self) -> None:
        """Let the other consumer pass its next ``await_turn``."""
        if self.plan.consumers > 1:
            mosaic_gpu().barrier_arrive(self.turn)

    def await_turn(self) -> None:
        """Wait until the other consumer has ended its turn as often as this one."""
        if self.plan.consumers > 1:
            mosaic_gpu().barrier_wait(self.turn)

    def take_turns(self) -> None:
        """Wait for the other consumer to reach the same point."""
        self.end_turn()
        self.await_turn()

    def products(self, slot: Any) -> Float[Array, "_ROWS tile"]:
        """Multiply the queries by the keys in a slot of the ring."""
        plgpu = mosaic_gpu()

        def multiply(acc_ref):
            plgpu.wgmma(acc_ref, self.query_ref, self.ring.key_ref.at[slot].T)
            self.take_turns()
            return acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC((_ROWS, self.plan.tile), jnp.float32))

    def add_weighted(self, values: Any, weights: Any, slot: Any) -> Float[Array, "_ROWS H"]:
        """Add the values in a slot of the ring, weighted, to ``values``."""
        plgpu = mosaic_gpu()
        value_ref = self.ring.value_ref.at[slot]
        if self.weights_ref is None:
            return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, value_ref))(plgpu.ACC.init(values))
        self.weights_ref[...] = weights
        plgpu.commit_smem()

        def multiply(acc_ref):
            plgpu.wgmma(acc_ref, self.weights_ref, value_ref)
            return acc_ref[...]

        return values + pl.run_scoped(multiply, plgpu.ACC(values.shape, jnp.float32))

    def round(self, i: Any, state: Any, *, is_masked: bool) -> Any:
        """Update the online softmax with tile i."""
        plgpu = mosaic_gpu()
        plan = self.plan
        values, maximum, total = state
        slot = lax.rem(i - self.block.first, plan.tiles.num_stages)
        plgpu.barrier_wait(self.ring.key_filled.at[slot])
        scores = plan.scoring(self.products(slot))
        plgpu.barrier_arrive(self.ring.key_free.at[slot])
        if is_masked:
            scores = jnp.where(_seen(plan, self.block, self.index, i), scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(1))
        kept = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - _spread(new_maximum, plan.tile))
        total = total * kept + weights.sum(1)
        values = values * _spread(kept, plan.head_dim)
        weights = weights.astype(self.query_ref.dtype)
        self.end_turn()  # before the wait for the values, which must not hold up the other consumer
        plgpu.barrier_wait(self.ring.value_filled.at[slot])
        self.await_turn()
        values = self.add_weighted(values, weights, slot)
        plgpu.barrier_arrive(self.ring.value_free.at[slot])
        return values, new_maximum, total

    def softmax(self, sinks_ref: Any | None) -> Float[Array, "_ROWS H"]:
        """Return the weighted means of the values over all tiles; zeros if there are none."""
        plgpu = mosaic_gpu()
        layout, block = plgpu.Layout.WGMMA, self.block
        masked, whole = (functools.partial(self.round, is_masked=is_masked) for is_masked in (True, False))
        state = (
            plgpu.layout_cast(jnp.zeros((_ROWS, self.plan.head_dim), jnp.float32), layout),
            plgpu.layout_cast(jnp.full((_ROWS,), MASKED, jnp.float32), layout.reduce(1)),
            plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), layout.reduce(1)),
        )
        pl.when(self.index == 1)(self.take_turns)  # so that one multiplies while the other computes weights
        if self.plan.scoring.window is not None:
            state = lax.fori_loop(block.first, block.whole, masked, state)
        state = lax.fori_loop(block.whole, block.diagonal, whole, state)
        values, maximum, total = lax.fori_loop(block.diagonal, block.stop, masked, state)
        pl.when(self.index == 0)(self.take_turns)
        total = jnp.maximum(total, 1e-30)
        if sinks_ref is not None:
            sinks = plgpu.load(sinks_ref, layout=layout.reduce(1), optimized=False)
            total = total + jnp.exp2(sinks * LOG2_E - maximum)
        return values / _spread(total, self.plan.head_dim)


def _spread(per_row: Array, columns: int) -> Array:
    """Broadcast [_ROWS] to [_ROWS, columns]."""
    return lax.broadcast_in_dim(per_row, (_ROWS, columns), [0])


def _attend(
    plan: _Plan,
    block: _Block,
    index: Any,
    first_head: Any,
    query_hbm_ref: Any,  # [T, N, H]
    sinks_ref: Any | None,  # [_ROWS] float32
    out_ref: Any,  # [T, N, H]
    *,
    plain_ref: Any,  # [consumers, _ROWS, H]
    query_ref: Any,  # [consumers, _ROWS, H]
    query_filled: Any,
    weights_ref: Any = None,  # [consumers, _ROWS, tile]
    ring: Ring,
    turn: Any,
) -> None:
    """Load a consumer's queries, compute, and store its results."""
    plgpu = mosaic_gpu()
    plain_ref, query_ref = plain_ref.at[index], query_ref.at[index]
    token = block.token + index * plan.tokens
    _load_queries(plan, token, first_head, query_hbm_ref, plain_ref, query_filled.at[index])
    query_ref[...] = plgpu.layout_cast(plgpu.load(plain_ref, optimized=False), plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    weights_ref = None if weights_ref is None else weights_ref.at[index]
    consumer = _Consumer(plan, block, index, query_ref, weights_ref, ring, turn)
    plain_ref[...] = consumer.softmax(sinks_ref).astype(plain_ref.dtype)
    plgpu.commit_smem()
    count = jnp.clip(block.used - index * plan.tokens, 0, plan.tokens)
    _store_results(plan, token, count, first_head, plain_ref, out_ref)


def _load_queries(
    plan: _Plan,
    token: Any,
    first_head: Any,
    query_hbm_ref: Any,  # [T, N, H]
    plain_ref: Any,  # [_ROWS, H]
    filled: Any,
) -> None:
    """Load a consumer's queries, head by head."""
    plgpu = mosaic_gpu()
    for i in range(plan.group):
        source = query_hbm_ref.at[pl.ds(token, plan.tokens), first_head + i]
        plgpu.copy_gmem_to_smem(source, plain_ref.at[pl.ds(i * plan.tokens, plan.tokens)], filled)
    plgpu.barrier_wait(filled)


def _seen(plan: _Plan, block: _Block, consumer: Any, tile: Any) -> Bool[Array, "_ROWS tile"]:
    """Return which tokens of a tile each row sees."""
    plgpu = mosaic_gpu()
    layout = plgpu.Layout.WGMMA
    row = plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=layout.reduce(1))
    last = block.position + consumer * plan.tokens - tile * plan.tile + lax.rem(row, plan.tokens)
    column = plgpu.broadcasted_iota(jnp.int32, (_ROWS, plan.tile), 1, layout=layout)
    seen = column <= _spread(last, plan.tile)
    if plan.scoring.window is None:
        return seen
    return seen & (column > _spread(last - plan.scoring.window, plan.tile))


def _store_results(
    plan: _Plan,
    token: Any,
    count: Any,
    first_head: Any,
    plain_ref: Any,  # [_ROWS, H]
    out_ref: Any,  # [T, N, H]
) -> None:
    """Store the results of the first ``count`` tokens, in runs whose lengths are powers of two."""
    plgpu = mosaic_gpu()
    length = 1 << (plan.tokens.bit_length() - 1)
    done = jnp.int32(0)
    while length:
        is_due = lax.rem(lax.div(count, length), 2) == 1

        @pl.when(is_due)
        def _(done=done, length=length):
            for i in range(plan.group):
                source = plain_ref.at[pl.ds(i * plan.tokens + done, length)]
                plgpu.copy_smem_to_gmem(source, out_ref.at[pl.ds(token + done, length), first_head + i])

        done = done + jnp.where(is_due, length, 0)
        length //= 2
    plgpu.wait_smem_to_gmem(0)
