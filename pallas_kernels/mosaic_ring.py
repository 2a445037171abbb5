"""What Pallas Mosaic GPU attention kernels share: a ring of tiles of paged keys and values in shared memory.

A producer warpgroup copies each tile page by page through the tensor memory accelerator. Keys and values of a tile have
barriers of their own, so that scores begin before the values are there.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.mosaic_support import mosaic_gpu


class Tiles(NamedTuple):
    """How a context is read: ``size`` tokens at a time, ``num_stages`` of these in the ring."""

    size: int
    num_stages: int
    page_size: int

    @property
    def num_pages(self) -> int:
        """Copies that fill a tile; a larger page fills several tiles."""
        return max(1, self.size // self.page_size)

    def scratch(self, head_dim: int, dtype: Any, num_consumers: int) -> "Ring":
        """What to allocate for a ring."""
        plgpu = mosaic_gpu()
        ring = plgpu.SMEM((self.num_stages, self.size, head_dim), dtype, transforms=swizzled())
        filled = plgpu.Barrier(num_arrivals=self.num_pages, num_barriers=self.num_stages)
        free = plgpu.Barrier(num_arrivals=num_consumers, num_barriers=self.num_stages)
        return Ring(ring, ring, filled, filled, free, free)


class Span(NamedTuple):
    """What a program reads of a context of ``length`` tokens: ``num_tiles`` tiles from ``first`` on."""

    length: Int[Array, ""]
    first: Int[Array, ""]
    num_tiles: Int[Array, ""]


class Ring(NamedTuple):
    """The ring and its barriers: which slots the producer has filled and the consumers have freed."""

    key_ref: Any  # [stages, size, H]
    value_ref: Any  # [stages, size, H]
    key_filled: Any
    value_filled: Any
    key_free: Any
    value_free: Any


def swizzled() -> tuple[Any, ...]:
    """How operands of ``wgmma`` lie in shared memory."""
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
    """The producer: fills the ring in order as far as the consumers free it, and returns when they have freed it all.

    Page numbers of a tile are loaded before the wait for its slot. Behind the context its last page stands in, whose
    tokens do not count there.
    """
    plgpu = mosaic_gpu()
    chunk = tiles.size // tiles.num_pages
    last_page = lax.div(jnp.maximum(span.length - 1, 0), tiles.page_size)

    def page_ids(tile):
        first = lax.div(tile * tiles.size, tiles.page_size)
        return tuple(pages_ref[jnp.minimum(first + i, last_page)] for i in range(tiles.num_pages))

    def await_free(i, free):
        @pl.when(i >= tiles.num_stages)
        def _():
            plgpu.barrier_wait(free.at[lax.rem(i, tiles.num_stages)])

    def fill(i, ids, pool_ref, ring_ref, filled, free):
        slot = lax.rem(i, tiles.num_stages)
        start = 0 if tiles.num_pages > 1 else lax.rem((span.first + i) * tiles.size, tiles.page_size)
        await_free(i, free)
        for j, page in enumerate(ids):
            source = pool_ref.at[page, head, pl.ds(start, chunk)]
            plgpu.copy_gmem_to_smem(source, ring_ref.at[slot, pl.ds(j * chunk, chunk)], filled.at[slot])

    def round_(i, ids):
        fill(i, ids, key_hbm_ref, ring.key_ref, ring.key_filled, ring.key_free)
        fill(i, ids, value_hbm_ref, ring.value_ref, ring.value_filled, ring.value_free)
        return page_ids(span.first + i + 1)

    def drain(i, _):
        await_free(span.num_tiles + i, ring.key_free)
        await_free(span.num_tiles + i, ring.value_free)

    lax.fori_loop(0, span.num_tiles, round_, page_ids(span.first))
    lax.fori_loop(0, tiles.num_stages, drain, None)
