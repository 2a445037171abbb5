"""Attention over paged latents in plain XLA, which runs anywhere and is the reference of other implementations.

Latents are stored transposed inside a page, [P, H * p], like the keys of ``paged_attention_xla``, which does the work:
its values are the first features of the keys.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_parts import Part
from pallas_kernels.latent_attention import Pools
from pallas_kernels.page_writes import as_stored_latents, copy_pool_pages
from pallas_kernels.paged_attention import AttentionBatch, PoolSpec
from pallas_kernels.paged_attention_xla import attend_grouped
from pallas_kernels.xla_softmax import Scoring

name = "xla"
writer = None
stacks_pools = False


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return None: it runs everywhere."""
    del platform, device_kind, dtype, sizes
    return None


def pool_specs(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[PoolSpec]:
    """Return the shape of a pool of flat pages, with the null page and one for padding tokens."""
    del num_kv_heads
    return (PoolSpec((num_pages + 2, head_dim * page_size), None),)


def write_kv(
    pools: Pools,
    key: Float[Array, "T 1 rotated"],
    value: Float[Array, "T 1 latent"],
    batch: AttentionBatch,
    page_size: int,
) -> Pools:
    """Return the pool with this step's latents and rotated keys written; see ``LatentAttention.write_kv``."""
    (pool,) = pools
    latents = as_stored_latents(pool, key, value)
    view = pool.reshape(pool.shape[0], latents.shape[1], page_size)
    view = view.at[batch.token_pages, :, batch.token_offsets].set(latents, mode="promise_in_bounds")
    return (view.reshape(pool.shape),)


def copy_pages(pools: Pools, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> Pools:
    """Return the pool with pages copied; see ``PagedAttention.copy_pages``."""
    (pool,) = pools
    return (copy_pool_pages(pool, sources, targets),)


def read_pages(pools: Pools, pages: Int[Array, "*shape"], page_size: int) -> Float[Array, "*shape p H"]:
    """Return all features of all tokens of pages; see ``LatentAttention.read_pages``."""
    found = jnp.take(pools[0], pages, axis=0, mode="clip")
    return found.reshape(*pages.shape, -1, page_size).swapaxes(-1, -2)


def read_tokens(
    pools: Pools, pages: Int[Array, "*shape"], offsets: Int[Array, "*shape"], page_size: int
) -> Float[Array, "*shape H"]:
    """Return all features of one token of each page; see ``LatentAttention.read_tokens``."""
    (pool,) = pools
    return pool.reshape(len(pool), -1, page_size).at[pages, :, offsets].get(mode="clip")


def attend(
    query: Float[Array, "T N H"],
    pools: Pools,
    batch: AttentionBatch,
    *,
    page_size: int,
    value_dim: int,
    scale: float,
    decode_only: bool,
    row_tile: int | None = None,
) -> Float[Array, "T N latent"]:
    """Compute attention of each query token over its row's context up to itself; see ``LatentAttention.attend``."""
    scoring = Scoring(scale, None, None, value_dim)
    out = attend_grouped(query[:, None], pools, batch, page_size, scoring, decode_only, row_tile)
    return out[:, 0].astype(query.dtype)


def attend_part(
    query: Float[Array, "T N H"],
    pools: Pools,
    batch: AttentionBatch,
    part: Part,
    *,
    page_size: int,
    value_dim: int,
    scale: float,
    decode_only: bool,
    row_tile: int | None = None,
) -> Float[Array, "T N partial"]:
    """Compute partial attention over the part of each context that the pool holds; see ``LatentPartAttention``."""
    scoring = Scoring(scale, None, None, value_dim, part=part)
    return attend_grouped(query[:, None], pools, batch, page_size, scoring, decode_only, row_tile)[:, 0]
