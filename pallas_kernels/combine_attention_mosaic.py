"""Combine the splits of decode attention for NVIDIA Hopper in Pallas Mosaic GPU.

One program handles one row, one kv head, and a piece of the head's width that registers can hold. Its producer
warpgroup copies the splits' means into a ring in shared memory, several ahead of its consumer warpgroup, which adds
them up in the order of the splits. The order depends on the row's own length and the number of splits only, so a row's
bits do not depend on the batch. The combination itself is that of flash decoding; see ``decode_attention_mosaic`` and
``latent_decode_mosaic``, which write the parts.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_scores import LOG2_E, MASKED
from pallas_kernels.mosaic_ring import Splits
from pallas_kernels.mosaic_support import mosaic_gpu

_NUM_STAGES = 4
_MOST_CHUNK = 4  # splits per stage: their loads and exponentials overlap
_LSE_CHUNK = 8  # splits per round of the search for the maximum
_STAGE_ELEMENTS = 8192  # most float32 elements of a stage: the registers that a chunk takes
_MOST_WIDTH = 256  # what a copy can take
_PRODUCER, _CONSUMER = 0, 1


class _Plan(NamedTuple):
    """Compile-time parameters.

    Attributes:
        splits: How contexts are split.
        group: Query heads per kv head.
        columns: The same, padded.
        width: Width of a piece of a head.
        by_head: Whether parts are [columns, H]; they are [H, columns] otherwise.
        chunk: Splits per stage of the ring.
        num_stages: Stages of the ring.
    """

    splits: Splits
    group: int
    columns: int
    width: int
    by_head: bool
    chunk: int
    num_stages: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of a piece of a part."""
        return (self.columns, self.width) if self.by_head else (self.width, self.columns)


class _Ring(NamedTuple):
    """Shared memory that the splits' means pass through, and its barriers."""

    part_ref: Any  # [stages, chunk, width, columns] float32, or [stages, chunk, columns, width]
    filled: Any
    free: Any


def combine_splits(
    parts: Float[Array, "R K splits rows width"],
    lse: Float[Array, "R K splits columns"],
    lens: Int[Array, " R"],
    sinks: Float[Array, "K columns"] | None = None,
    *,
    splits: Splits,
    group: int,
    dtype: Any,
    by_head: bool = False,
    interpret: Any = None,
) -> Float[Array, "R K G H"]:
    """Return the attention over whole contexts, given the attention over each of their splits.

    Args:
        parts: Weighted means of the values, [H, columns] of each split. Splits without tokens are not read.
        lse: Base-2 logarithms of the sums of the weights.
        lens: Length of each context in tokens; a row of length 0 gets zeros.
        sinks: Logit of each query head that has no value; None for none.
        splits: How the contexts were split.
        group: Query heads per kv head, at most ``columns``.
        dtype: Element type of the result.
        by_head: Whether the parts of each split are [columns, H] instead; columns are then 64, of which those after
            the group are not read, and the group is a multiple of 8.
        interpret: ``InterpretGPUParams`` to run on a CPU.
    """
    num_rows, num_heads, _, *part = parts.shape
    head_dim, columns = reversed(part) if by_head else part
    width = math.gcd(head_dim, _MOST_WIDTH, 1 << (_STAGE_ELEMENTS // columns).bit_length() - 1)
    fitting = _STAGE_ELEMENTS // (width * columns)
    chunk = math.gcd(splits.num_splits, _MOST_CHUNK, 1 << (fitting.bit_length() - 1))
    plan = _Plan(splits, group, columns, width, by_head, chunk, min(_NUM_STAGES, splits.num_splits // chunk))
    launch = _launch(plan, (num_heads, num_rows, head_dim // width), head_dim, dtype, interpret)
    # Three dimensions, because a copy takes at most five and the tiles of swizzled shared memory add two.
    return launch(parts.reshape(-1, *part), lse, lens, *([] if sinks is None else [sinks]))


def _launch(plan: _Plan, grid: tuple[int, int, int], head_dim: int, dtype: Any, interpret: Any) -> Any:
    """Return the kernel as a function of arrays; see ``_kernel`` for its operands and results."""
    plgpu = mosaic_gpu()
    num_heads, num_rows, _ = grid
    return plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((num_rows, num_heads, plan.group, head_dim), dtype),
        scratch_types={
            "ring": _Ring(
                plgpu.SMEM((plan.num_stages, plan.chunk, *plan.shape), jnp.float32),
                plgpu.Barrier(num_barriers=plan.num_stages),
                plgpu.Barrier(num_barriers=plan.num_stages),
            ),
            "lse_ref": plgpu.SMEM((plan.splits.num_splits, plan.columns), jnp.float32),
            "lse_filled": plgpu.Barrier(),
            "out_ref": plgpu.SMEM((plan.columns, plan.width), dtype),
        },
        grid=grid,
        grid_names=("head", "row", "piece"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )


def _kernel(
    plan: _Plan,
    parts_hbm_ref: Any,  # [R * K * splits, H, columns] float32, or [R * K * splits, columns, H]
    lse_hbm_ref: Any,  # [R, K, splits, columns] float32
    lens_ref: Any,  # [R] int32
    *refs: Any,  # [K, columns] float32 if there are sinks; then the result [R, K, G, H]
    ring: _Ring,
    lse_ref: Any,  # [splits, columns] float32
    lse_filled: Any,
    out_ref: Any,  # [columns, width]
) -> None:
    """Run one (head, row, piece): one warpgroup copies, the other adds up."""
    plgpu, out_hbm_ref = mosaic_gpu(), refs[-1]
    warpgroup, head, row = lax.axis_index("warpgroup"), lax.axis_index("head"), lax.axis_index("row")
    first_part = (row * out_hbm_ref.shape[1] + head) * plan.splits.num_splits
    num_used = plan.splits.num_used(lens_ref[row])
    piece = pl.ds(lax.axis_index("piece") * plan.width, plan.width)

    @pl.when(warpgroup == _PRODUCER)
    def _produce():
        plgpu.copy_gmem_to_smem(lse_hbm_ref.at[row, head], lse_ref, lse_filled)
        place = (pl.ds(0, plan.group), piece) if plan.by_head else (piece, slice(None))
        _copy_parts(plan, num_used, ring, parts_hbm_ref.at[(pl.ds(first_part, plan.splits.num_splits), *place)])

    @pl.when(warpgroup == _CONSUMER)
    def _consume():
        plgpu.barrier_wait(lse_filled)
        sinks_ref = refs[0].at[head] if len(refs) > 1 else None
        mean_ref = out_ref if plan.by_head else out_ref.T
        mean_ref[...] = _mean(plan, num_used, ring, lse_ref, sinks_ref).astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_ref.at[pl.ds(0, plan.group)], out_hbm_ref.at[row, head, :, piece])
        plgpu.wait_smem_to_gmem(0)


def _copy_parts(
    plan: _Plan,
    num_used: Int[Array, ""],
    ring: _Ring,
    parts_hbm_ref: Any,  # [splits, width, columns] float32, or [splits, group, width]
) -> None:
    """Fill the ring as the consumer frees it, and return once the consumer has freed every stage."""
    plgpu = mosaic_gpu()
    num_chunks = _ceil_div(num_used, plan.chunk)

    def await_free(i):
        @pl.when(i >= plan.num_stages)
        def _():
            plgpu.barrier_wait(ring.free.at[lax.rem(i, plan.num_stages)])

    def fill(i, _):
        slot = lax.rem(i, plan.num_stages)
        await_free(i)
        source = parts_hbm_ref.at[pl.ds(i * plan.chunk, plan.chunk)]
        target = ring.part_ref.at[slot, :, pl.ds(0, source.shape[1])]
        plgpu.copy_gmem_to_smem(source, target, ring.filled.at[slot])

    lax.fori_loop(0, num_chunks, fill, None)
    lax.fori_loop(num_chunks, num_chunks + plan.num_stages, lambda i, _: await_free(i), None)


def _mean(
    plan: _Plan,
    num_used: Int[Array, ""],
    ring: _Ring,
    lse_ref: Any,  # [splits, columns] float32
    sinks_ref: Any | None,  # [columns] float32
) -> Float[Array, "rows width"]:
    """Return the mean of the used splits' means, weighted by their sums; zeros if no split is used."""
    plgpu = mosaic_gpu()
    layout = plgpu.Layout.WGMMA
    per_head = layout.reduce(1 if plan.by_head else 0)

    def spread(per_column):
        return lax.broadcast_in_dim(per_column, plan.shape, [0 if plan.by_head else 1])

    def load_lse(i):
        return plgpu.load(lse_ref.at[i], layout=per_head, optimized=False)

    def raise_maximum(i, most):
        for j in range(_LSE_CHUNK):  # the last split repeats, which does no harm to a maximum
            most = jnp.maximum(most, load_lse(jnp.minimum(i * _LSE_CHUNK + j, num_used - 1)))
        return most

    def add_chunk(i, state):
        values, total = state
        slot = lax.rem(i, plan.num_stages)
        plgpu.barrier_wait(ring.filled.at[slot])
        last = num_used - 1 - i * plan.chunk  # splits of the chunk after this one were not written
        chosen = [jnp.minimum(j, last) for j in range(plan.chunk)]
        parts = [plgpu.load(ring.part_ref.at[slot, j], layout=layout) for j in chosen]
        plgpu.commit_smem()  # orders these reads before the copy that refills the slot
        plgpu.barrier_arrive(ring.free.at[slot])
        for j, part in enumerate(parts):
            is_used = (j <= last).astype(jnp.float32)
            weight = jnp.exp2(load_lse(i * plan.chunk + chosen[j]) - maximum) * is_used
            values, total = values + part * spread(weight), total + weight
        return values, total

    masked = plgpu.layout_cast(jnp.full((plan.columns,), MASKED, jnp.float32), per_head)
    maximum = lax.fori_loop(0, _ceil_div(num_used, _LSE_CHUNK), raise_maximum, masked)
    state = (
        plgpu.layout_cast(jnp.zeros(plan.shape, jnp.float32), layout),
        plgpu.layout_cast(jnp.zeros((plan.columns,), jnp.float32), per_head),
    )
    values, total = lax.fori_loop(0, _ceil_div(num_used, plan.chunk), add_chunk, state)
    total = jnp.maximum(total, 1e-30)
    if sinks_ref is not None:
        sinks = plgpu.load(sinks_ref, layout=per_head, optimized=False)
        total = total + jnp.exp2(sinks * LOG2_E - maximum)
    return values / spread(total)


def _ceil_div(number: Int[Array, ""], divisor: int) -> Int[Array, ""]:
    """Return the quotient of two non-negative numbers, rounded up."""
    return lax.div(number + (divisor - 1), divisor)
