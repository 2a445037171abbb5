"""Put JAX's own Pallas-Triton paged attention in the place of an implementation of ours, to be measured as they are."""

import dataclasses
import importlib
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import AttentionBatch, Case, PoolSpec
from pallas_kernels.paged_attention_triton import TRITON

_SPLITS = 16  # its default, of the page table's width
_BLOCK_TOKENS = 128  # read at a time: its default of 8 pages is made for small ones, of 64 they overflow shared memory


def suited(case: Case) -> Case:
    """Return a decode case as suits JAX's kernel best: no spare rows, and no page table wider than the contexts are.

    It splits the width of the table, not each context, and takes widths that its splits divide.
    """
    width = max(case.row_pages())
    return case._replace(spare_rows=0, table_pages=-(-width // _SPLITS) * _SPLITS)


@dataclasses.dataclass(frozen=True)
class JaxPagedAttention:
    """``jax.experimental.pallas.ops.gpu.paged_attention``, for decode steps. Its pools are [K, P, p, H]."""

    is_interpreted: bool = False
    name: str = "paged_attention of JAX"
    writer: Any = None
    stacks_pools: bool = False

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on a device, or None."""
        return None if self.is_interpreted else TRITON.unsupported(platform, device_kind, dtype, **sizes)

    def pool_specs(self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[PoolSpec, PoolSpec]:
        """Return the pools of our own kernels, whose heads ``write_kv`` moves to the front."""
        return TRITON.pool_specs(num_pages, page_size, num_kv_heads, head_dim)

    def write_kv(
        self,
        pools: tuple[Array, Array],
        key: Float[Array, "T K H"],
        value: Float[Array, "T K H"],
        batch: AttentionBatch,
        page_size: int,
    ) -> tuple[Array, Array]:
        """Write keys and values, and move the heads to the front."""
        first, second = TRITON.write_kv(pools, key, value, batch, page_size)
        return first.swapaxes(0, 1), second.swapaxes(0, 1)

    def copy_pages(
        self, pools: tuple[Array, Array], sources: Int[Array, " C"], targets: Int[Array, " C"]
    ) -> tuple[Array, Array]:
        """Copy pages, which are the pools' second dimension."""
        first, second = (pool.at[:, targets].set(jnp.take(pool, sources, 1), mode="drop") for pool in pools)
        return first, second

    def attend(
        self,
        query: Float[Array, "T N H"],
        pools: tuple[Array, Array],
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
        """Compute attention of one query per row."""
        assert decode_only and window is None and row_tile is None and sinks is None
        kernel = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention").paged_attention
        return kernel(
            query * jnp.asarray(scale, query.dtype),
            *pools,
            batch.page_table,
            batch.context_lens,
            k_splits=_SPLITS,
            pages_per_compute_block=max(1, _BLOCK_TOKENS // page_size),
            attn_logits_soft_cap=soft_cap,
            interpret=self.is_interpreted,
        )
