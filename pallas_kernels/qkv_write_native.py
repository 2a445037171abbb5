"""Norms, RoPE and the write of keys and values to pages in a native kernel for x86 CPUs, called through ``jax.ffi``.

Pools are those of ``paged_attention_native``. Inside a page keys are transposed, in groups of 16 tokens (8 where the
page size is no multiple of 16): [p / 16, H, 16], in bfloat16 in pairs of features, [p / 16, H / 2, 16, 2]. Values lie
as [p, H], in bfloat16 in pairs of tokens, [p / 2, H, 2].

A token's results have the same bits in every batch, with any number of threads. Everything computes in float32, and
each result is rounded once, to the dtype of ``qkv`` or of the pools. Padding tokens are not written anywhere, and their
queries are zeros.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.native_library import target, unavailable
from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.qkv_write import Pools, QkNorms, Rotation

_DTYPES = ("float32", "bfloat16")
_MOST_HEAD_DIM = 512
_PAGE_MULTIPLE = 8


def to_layout(pools: Pools) -> Pools:
    """Return pools whose keys and values both lie as [P, K, p, H] in the layout of the kernels."""
    keys, values = pools
    num_pages, num_kv_heads, page_size, head_dim = keys.shape
    pair, group = layout_of(keys, page_size)
    keys = keys.reshape(num_pages, num_kv_heads, page_size // group, group, head_dim // pair, pair)
    values = values.reshape(num_pages, num_kv_heads, page_size // pair, pair, head_dim)
    by_feature, by_pair = keys.swapaxes(3, 4), values.swapaxes(3, 4)
    return (
        by_feature.reshape(num_pages, num_kv_heads, head_dim, page_size),
        by_pair.reshape(num_pages, num_kv_heads, page_size, head_dim),
    )


def from_layout(pools: Pools) -> Pools:
    """Return pools of the kernels' layout as [P, K, p, H]: the inverse of ``to_layout``."""
    keys, values = pools
    num_pages, num_kv_heads, page_size, head_dim = values.shape
    pair, group = layout_of(keys, page_size)
    keys = keys.reshape(num_pages, num_kv_heads, page_size // group, head_dim // pair, group, pair)
    values = values.reshape(num_pages, num_kv_heads, page_size // pair, head_dim, pair)
    return keys.swapaxes(3, 4).reshape(pools[1].shape), values.swapaxes(3, 4).reshape(pools[1].shape)


def layout_of(keys: Float[Array, "P ..."], page_size: int) -> tuple[int, int]:
    """Return the values per pair (1: no pairs), and the tokens per group of keys."""
    return 2 if keys.dtype == jnp.bfloat16 else 1, 8 if page_size % 16 else 16


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return why it cannot run on a device with such sizes, or None; sizes that are missing are taken for granted."""
    del device_kind
    if platform != "cpu":
        return "native kernels run on CPUs"
    if dtype not in _DTYPES:
        return f"keys and values must be {' or '.join(_DTYPES)}, not {dtype}"
    if sizes.get("head_dim", 1) > _MOST_HEAD_DIM:
        return f"head_dim must be at most {_MOST_HEAD_DIM}, not {sizes['head_dim']}"
    if dtype == "bfloat16" and sizes.get("head_dim", 2) % 2:
        return f"head_dim must be even in bfloat16, not {sizes['head_dim']}"
    if sizes.get("page_size", _PAGE_MULTIPLE) % _PAGE_MULTIPLE:
        return f"page_size must be a multiple of {_PAGE_MULTIPLE}, not {sizes['page_size']}"
    return unavailable()


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
    """Compute the queries, and write keys and values to the pools; see ``QkvWriter.write``."""
    num_tokens, head_dim = qkv.shape[0], qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    shapes = tuple(pool.shape[1:] for pool in pools)
    assert shapes == ((num_kv_heads, head_dim, page_size), (num_kv_heads, page_size, head_dim)), shapes
    cos, sin = (jnp.zeros((num_tokens, 0)),) * 2 if rotation is None else rotation
    weights = (jnp.zeros(0),) * 2 if norms is None else (norms.query_weight, norms.key_weight)
    call = jax.ffi.ffi_call(
        target("qkv_write"),
        (
            jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), jnp.float32),
            *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
        ),
        input_output_aliases={1: 1, 2: 2},
    )
    query, keys, values = call(
        qkv.astype(jnp.float32),
        *pools,
        *(table.astype(jnp.float32) for table in (cos, sin, *weights)),
        batch.token_pages,
        batch.token_offsets,
        batch.query_lens.sum(dtype=jnp.int32),
        jnp.asarray(batch.first_page, jnp.int32),
        num_kv_heads=np.int32(num_kv_heads),
        page_size=np.int32(page_size),
        is_normed=np.int32(norms is not None),
        eps=np.float32(0 if norms is None else norms.eps),
    )
    return query.astype(qkv.dtype), (keys, values)
