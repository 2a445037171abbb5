"""Shared parts of the Pallas Mosaic GPU attention kernels: splits of contexts, and rings of tiles of pools.

A producer warpgroup copies each tile page by page through the tensor memory accelerator (TMA) into shared memory. The
keys and the values of a tile have separate barriers, so that computing scores can start before the values arrive.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.mosaic_support import mosaic_gpu


class Tiles(NamedTuple):
    """How a context is read: in tiles of ``size`` tokens, with ``num_stages`` tiles in the ring."""

    size: int
    num_stages: int
    page_size: int

    @property
    def num_pages(self) -> int:
        """Return the number of copies that fill a tile; a page larger than a tile fills several tiles."""
        return max(1, self.size // self.page_size)

    def lane(self, width: int, dtype: Any, num_consumers: int) -> "Lane":
        """Return the allocation of a ring of tiles of one pool."""
        plgpu = mosaic_gpu()
        return Lane(
            plgpu.SMEM((self.num_stages, self.size, width), dtype, transforms=swizzled()),
            plgpu.Barrier(num_arrivals=self.num_pages, num_barriers=self.num_stages),
            plgpu.Barrier(num_arrivals=num_consumers, num_barriers=self.num_stages),
        )

    def scratch(self, head_dim: int, dtype: Any, num_consumers: int) -> "Ring":
        """Return the allocation of a ring."""
        lane = self.lane(head_dim, dtype, num_consumers)
        return Ring(lane.ref, lane.ref, lane.filled, lane.filled, lane.free, lane.free)


class Span(NamedTuple):
    """The part of a context of ``length`` tokens that a program reads: ``num_tiles`` tiles from tile ``first`` on."""

    length: Int[Array, ""]
    first: Int[Array, ""]
    num_tiles: Int[Array, ""]


class Splits(NamedTuple):
    """How contexts are split among programs that run side by side: by each context's own length, in whole tiles.

    Attributes:
        num_splits: Programs per context. A short context leaves the last ones without tiles.
        tile: Tokens per tile.
        window: Sliding window in tokens, or None.
    """

    num_splits: int
    tile: int
    window: int | None

    def span(self, length: Int[Array, ""], split: Int[Array, ""]) -> Span:
        """Return the part of a context that a split covers."""
        first, num_tiles, per_split = self._deal(length)
        skipped = jnp.minimum(split * per_split, num_tiles)
        return Span(length, first + skipped, jnp.minimum(per_split, num_tiles - skipped))

    def num_used(self, length: Int[Array, ""]) -> Int[Array, ""]:
        """Return the number of leading splits of a context that have tiles."""
        _, num_tiles, per_split = self._deal(length)
        return lax.div(num_tiles + (per_split - 1), per_split)

    def _deal(self, length: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
        """Return a context's first visible tile, its number of visible tiles, and the tiles per split, at least 1."""
        first = jnp.int32(0) if self.window is None else lax.div(jnp.maximum(length - self.window, 0), self.tile)
        num_tiles = lax.div(length + (self.tile - 1), self.tile) - first
        return first, num_tiles, jnp.maximum(lax.div(num_tiles + (self.num_splits - 1), self.num_splits), 1)


class Lane(NamedTuple):
    """A ring of tiles of one pool and its barriers, which say which slots are filled and which are free."""

    ref: Any  # [stages, size, width]
    filled: Any
    free: Any


class Ring(NamedTuple):
    """The ring and its barriers, which say which slots the producer has filled and the consumers have freed."""

    key_ref: Any  # [stages, size, H]
    value_ref: Any  # [stages, size, H]
    key_filled: Any
    value_filled: Any
    key_free: Any
    value_free: Any


def swizzled() -> tuple[Any, ...]:
    """Return the shared-memory layout that ``wgmma`` needs for its operands."""
    plgpu = mosaic_gpu()
    return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def copy_tiles(
    tiles: Tiles,
    span: Span,
    ring: Ring,
    pages_ref: Any,  # [M] int32
    key_hbm_ref: Any,  # [P, K, p, H]
    value_hbm_ref: Any,  # [P, K, p, H]
    head: Int[Array, ""],
) -> None:
    """Fill a ring with keys and values as the consumers free it; see ``copy_lanes``."""
    keys = Lane(ring.key_ref, ring.key_filled, ring.key_free)
    values = Lane(ring.value_ref, ring.value_filled, ring.value_free)
    copy_lanes(tiles, span, pages_ref, ((key_hbm_ref, keys), (value_hbm_ref, values)), head)


def copy_lanes(
    tiles: Tiles,
    span: Span,
    pages_ref: Any,  # [M] int32
    lanes: Sequence[tuple[Any, Lane]],  # pools [P, ..., p, width] with their rings
    *index: Int[Array, ""],
) -> None:
    """Fill rings as the consumers free them, and return once they have freed every slot: the work of the producer.

    The page numbers of a tile are loaded before the wait for its slot. Past the end of the context the last page is
    copied again; consumers mask its tokens.

    Args:
        tiles: How the context is read.
        span: The part of it to copy.
        pages_ref: Its pages.
        lanes: Pools and the rings that their tiles pass through.
        index: Position in the dimensions of a pool between pages and tokens.
    """
    plgpu = mosaic_gpu()
    chunk = tiles.size // tiles.num_pages
    last_page = lax.div(jnp.maximum(span.length - 1, 0), tiles.page_size)

    def page_ids(tile):
        first = lax.div(tile * tiles.size, tiles.page_size)
        return tuple(pages_ref[jnp.minimum(first + i, last_page)] for i in range(tiles.num_pages))

    def await_free(i, lane):
        @pl.when(i >= tiles.num_stages)
        def _():
            plgpu.barrier_wait(lane.free.at[lax.rem(i, tiles.num_stages)])

    def fill(i, ids, pool_ref, lane):
        slot = lax.rem(i, tiles.num_stages)
        start = 0 if tiles.num_pages > 1 else lax.rem((span.first + i) * tiles.size, tiles.page_size)
        await_free(i, lane)
        for j, page in enumerate(ids):
            source = pool_ref.at[(page, *index, pl.ds(start, chunk))]
            plgpu.copy_gmem_to_smem(source, lane.ref.at[slot, pl.ds(j * chunk, chunk)], lane.filled.at[slot])

    def round_(i, ids):
        for pool_ref, lane in lanes:
            fill(i, ids, pool_ref, lane)
        return page_ids(span.first + i + 1)

    def drain(i, _):
        for _, lane in lanes:
            await_free(span.num_tiles + i, lane)

    lax.fori_loop(0, span.num_tiles, round_, page_ids(span.first))
    lax.fori_loop(0, tiles.num_stages, drain, None)
