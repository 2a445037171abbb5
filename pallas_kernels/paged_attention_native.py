"""Paged attention in native kernels for x86 CPUs (``pallas_kernels/native``), called through ``jax.ffi``.

Pools have the layout of ``qkv_write_native``. A token's result has the same bits in every batch, in a decode step and
in a chunk of any length, with any number of threads. Cost follows each row's context; what all decode rows begin with
is read once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import qkv_write_native
from pallas_kernels.attention_parts import Part
from pallas_kernels.native_library import target
from pallas_kernels.paged_attention import AttentionBatch, PoolSpec
from pallas_kernels.qkv_write import Pools

_MOST_GROUP = 64

name = "native"
writer = qkv_write_native
stacks_pools = True


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why it cannot run on a device with such sizes, or None; sizes that are missing are taken for granted."""
    group = sizes.get("num_heads", 1) // sizes.get("num_kv_heads", 1)
    if platform == "cpu" and group > _MOST_GROUP:
        return f"at most {_MOST_GROUP} query heads can share a key/value head, not {group}"
    return writer.unsupported(platform, device_kind, dtype, **sizes)


def pool_specs(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[PoolSpec, PoolSpec]:
    """Allocate pools with two more pages: the null page, never written, and one never read, for padding."""
    pages = num_pages + 2
    keys = PoolSpec((pages, num_kv_heads, head_dim, page_size), 1)
    return keys, PoolSpec((pages, num_kv_heads, page_size, head_dim), 1)


def write_kv(
    pools: Pools,
    key: Float[Array, "T K H"],
    value: Float[Array, "T K H"],
    batch: AttentionBatch,
    page_size: int,
) -> Pools:
    """Write this step's keys and values into the pools, in place where the caller gives them up."""
    call = jax.ffi.ffi_call(
        target("write_kv"),
        tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
        input_output_aliases={2: 0, 3: 1},
    )
    keys, values = call(
        key.astype(jnp.float32),
        value.astype(jnp.float32),
        *pools,
        batch.token_pages,
        batch.token_offsets,
        jnp.asarray(batch.first_page, jnp.int32),
        page_size=np.int32(page_size),
    )
    return keys, values


def copy_pages(pools: Pools, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> Pools:
    """Copy pages inside the pools, in place where the caller gives them up; see ``PagedAttention.copy_pages``."""
    call = jax.ffi.ffi_call(
        target("copy_pages"),
        tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
        input_output_aliases={0: 0, 1: 1},
    )
    keys, values = call(*pools, sources.astype(jnp.int32), targets.astype(jnp.int32))
    return keys, values


def attend(
    query: Float[Array, "T N H"],
    pools: Pools,
    batch: AttentionBatch,
    *,
    page_size: int,
    num_kv_heads: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    decode_only: bool,
    row_tile: int | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "T N H"]:
    """Compute the attention of each query token over its row's context up to itself; zeros for tokens of no row.

    Rows of one token and of several take the same path, and results never depend on the batch, with a ``row_tile`` or
    without; see ``PagedAttention.attend``.
    """
    del decode_only, row_tile
    settings = {"window": np.int32(window or 0), "scale": np.float32(scale), "soft_cap": np.float32(soft_cap or 0)}
    sizes = {"num_kv_heads": np.int32(num_kv_heads), "page_size": np.int32(page_size)}
    return _attend(query, pools, batch, None, sinks, sizes | settings).astype(query.dtype)


def attend_part(
    query: Float[Array, "T N H"],
    pools: Pools,
    batch: AttentionBatch,
    part: Part,
    *,
    page_size: int,
    num_kv_heads: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    decode_only: bool,
    row_tile: int | None = None,
) -> Float[Array, "T N partial"]:
    """Compute partial attention over the part of each context that the pools hold; see ``PartAttention``."""
    del decode_only, row_tile
    settings = {"window": np.int32(window or 0), "scale": np.float32(scale), "soft_cap": np.float32(soft_cap or 0)}
    sizes = {"num_kv_heads": np.int32(num_kv_heads), "page_size": np.int32(page_size)}
    return _attend(query, pools, batch, part, None, sizes | settings)


def _attend(
    query: Float[Array, "T N H"],
    pools: Pools,
    batch: AttentionBatch,
    part: Part | None,
    sinks: Float[Array, " N"] | None,
    settings: dict[str, Any],
) -> Float[Array, "T N result"]:
    """Call the handler."""
    shape = query.shape if part is None else (*query.shape[:2], query.shape[2] + 2)
    call: Any = jax.ffi.ffi_call(target("attend"), jax.ShapeDtypeStruct(shape, jnp.float32))
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
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        jnp.asarray(0 if part is None else part.device, jnp.int32),
        parts=np.int32(0 if part is None else part.num_devices),
        **settings,
    )
