"""Attention over paged latents in native kernels for x86 CPUs (``pallas_kernels/native``), called through ``jax.ffi``.

Inside a page latents lie as the keys of ``paged_attention_native`` do: [p / 16, H, 16], in bfloat16 in pairs of
features (groups of 8 tokens where the page size is no multiple of 16). A block's values are unpacked once for up to 16
query heads. A token's result has the same bits in every batch, in a decode step and in a chunk of any length, with any
number of threads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import qkv_write_native
from pallas_kernels.attention_parts import Part
from pallas_kernels.latent_attention import Pools
from pallas_kernels.native_library import target
from pallas_kernels.page_writes import as_stored_latents
from pallas_kernels.paged_attention import AttentionBatch, PoolSpec

_MOST_WIDTH = 1024

name = "native"
writer = None
stacks_pools = True


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why it cannot run on a device with such sizes, or None; sizes that are missing are taken for granted."""
    width = sizes.pop("head_dim", 2)
    if platform == "cpu" and width > _MOST_WIDTH:
        return f"a latent and its rotated key have at most {_MOST_WIDTH} features, not {width}"
    if platform == "cpu" and dtype == "bfloat16" and width % 2:
        return f"a latent and its rotated key must have an even number of features in bfloat16, not {width}"
    return qkv_write_native.unsupported(platform, device_kind, dtype, **sizes)


def pool_specs(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[PoolSpec]:
    """Return the shape of a pool with two more pages: the null page, never written, and one for padding tokens."""
    del num_kv_heads
    return (PoolSpec((num_pages + 2, head_dim, page_size), None),)


def write_kv(
    pools: Pools,
    key: Float[Array, "T 1 rotated"],
    value: Float[Array, "T 1 latent"],
    batch: AttentionBatch,
    page_size: int,
) -> Pools:
    """Write this step's latents and rotated keys, in place where the caller gives the pool up."""
    (pool,) = pools
    result = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    call: Any = jax.ffi.ffi_call(target("write_latents"), result, input_output_aliases={1: 0})
    written = call(
        as_stored_latents(pool, key, value).astype(jnp.float32),
        pool,
        batch.token_pages,
        batch.token_offsets,
        jnp.asarray(batch.first_page, jnp.int32),
        page_size=np.int32(page_size),
    )
    return (written,)


def copy_pages(pools: Pools, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> Pools:
    """Copy pages inside the pool, in place where the caller gives it up; see ``PagedAttention.copy_pages``."""
    (pool,) = pools
    result = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    call: Any = jax.ffi.ffi_call(target("copy_pages"), result, input_output_aliases={0: 0})
    return (call(pool, sources.astype(jnp.int32), targets.astype(jnp.int32)),)


def read_pages(pools: Pools, pages: Int[Array, "*shape"], page_size: int) -> Float[Array, "*shape p H"]:
    """Return all features of all tokens of pages; see ``LatentAttention.read_pages``."""
    view = _view(pools, page_size)
    found = jnp.take(view, pages, axis=0, mode="clip").swapaxes(-3, -2)
    return found.reshape(*pages.shape, page_size, -1)


def read_tokens(
    pools: Pools, pages: Int[Array, "*shape"], offsets: Int[Array, "*shape"], page_size: int
) -> Float[Array, "*shape H"]:
    """Return all features of one token of each page; see ``LatentAttention.read_tokens``."""
    view = _view(pools, page_size)
    group = view.shape[3]
    found = view.at[pages, offsets // group, :, offsets % group].get(mode="clip")
    return found.reshape(*pages.shape, -1)


def _view(pools: Pools, page_size: int) -> Float[Array, "P groups features G pair"]:
    """Return the pool as it lies in memory: groups of tokens, of which each has its features, alone or in pairs."""
    (pool,) = pools
    pair, group = qkv_write_native.layout_of(pool, page_size)
    return pool.reshape(len(pool), page_size // group, -1, group, pair)


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
    """Compute the attention of each query token over its row's context up to itself; zeros for tokens of no row.

    Results never depend on the batch, with a ``row_tile`` or without; see ``LatentAttention.attend``.
    """
    del decode_only, row_tile
    return _attend(query, pools, batch, None, page_size, value_dim, scale).astype(query.dtype)


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
    del decode_only, row_tile
    return _attend(query, pools, batch, part, page_size, value_dim, scale)


def _attend(
    query: Float[Array, "T N H"],
    pools: Pools,
    batch: AttentionBatch,
    part: Part | None,
    page_size: int,
    value_dim: int,
    scale: float,
) -> Float[Array, "T N result"]:
    """Call the handler."""
    result = jax.ShapeDtypeStruct((*query.shape[:2], value_dim if part is None else value_dim + 2), jnp.float32)
    call: Any = jax.ffi.ffi_call(target("attend_latents"), result)
    return call(
        query.astype(jnp.float32),
        *pools,
        batch.page_table,
        batch.context_lens,
        batch.query_starts,
        batch.query_lens,
        batch.num_single,
        batch.num_shared_pages,
        jnp.asarray(batch.first_page, jnp.int32),
        jnp.asarray(0 if part is None else part.device, jnp.int32),
        page_size=np.int32(page_size),
        scale=np.float32(scale),
        parts=np.int32(0 if part is None else part.num_devices),
    )
