"""Norms, RoPE and the write of keys and values to their pages, in plain XLA: for platforms without the kernel."""

from jaxtyping import Array, Float

from pallas_kernels.page_writes import write_pages
from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.qkv_write import Pools, QkNorms, Rotation, split_heads


def to_layout(pools: Pools) -> Pools:
    """Return the pools: [P, K, p, H] is the layout."""
    return pools


def from_layout(pools: Pools) -> Pools:
    """Return the pools."""
    return pools


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return None: it runs everywhere."""
    del platform, device_kind, dtype, sizes
    return None


def write(
    qkv: Float[Array, "T width"],
    pools: Pools,
    batch: AttentionBatch,
    *,
    rotation: Rotation | None,
    norms: QkNorms | None,
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
) -> tuple[Float[Array, "T N H"], Pools]:
    """Return queries, and pools with the step's keys and values; see ``QkvWriter.write``."""
    key_pool, value_pool = pools
    assert key_pool.shape == value_pool.shape and key_pool.shape[1:3] == (num_kv_heads, page_size), key_pool.shape
    query, key, value = split_heads(qkv, rotation, norms, num_heads, num_kv_heads)
    return query, write_pages(pools, key, value, batch)
