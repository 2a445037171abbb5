"""Paged attention on pools of whole pages, [P, K, p, H], out of a decode kernel and a prefill kernel."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_parts import unsupported_parts
from pallas_kernels.page_writes import copy_pages, write_pages
from pallas_kernels.paged_attention import AttentionBatch, PoolSpec, token_contexts

_NUM_PROGRAMS = 4 * 132  # of a decode step, enough for the processors of an H200
_MOST_SPLITS = 128
_SPLIT_TOKENS = 256  # a split of the longest context has as many at least
_FIXED_SPLITS = 8  # where results must not depend on the batch
_MOST_ROWS = 1024  # of one call there, to bound the memory that splits take

Pools = tuple[Float[Array, "P K p H"], Float[Array, "P K p H"]]


@runtime_checkable
class DecodeKernel(Protocol):
    """Compute attention of one query per row; see ``decode_attention_triton.decode_attention``."""

    def __call__(
        self,
        query: Float[Array, "R N H"],
        key_pool: Float[Array, "P K p H"],
        value_pool: Float[Array, "P K p H"],
        page_table: Int[Array, "Rt M"],
        rows: Int[Array, " R"],
        lens: Int[Array, " R"],
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Float[Array, " N"] | None,
        num_splits: int,
    ) -> Float[Array, "R N H"]: ...


@runtime_checkable
class PrefillKernel(Protocol):
    """Compute attention of rows of several queries; see ``prefill_attention_triton.prefill_attention``."""

    def __call__(
        self,
        query: Float[Array, "T N H"],
        key_pool: Float[Array, "P K p H"],
        value_pool: Float[Array, "P K p H"],
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Float[Array, " N"] | None,
    ) -> Float[Array, "T N H"]: ...


@runtime_checkable
class Check(Protocol):
    """Return why kernels cannot run on a device, or None; sizes are those of ``paged_attention``."""

    def __call__(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class PagedKernels:
    """An implementation of ``PagedAttention``.

    Attributes:
        name: Its name in the registry.
        decode: Kernel for rows of one query.
        prefill: Kernel for the other rows; its results for tokens of decode rows are ignored.
        check: Returns the result of ``unsupported``.
        writer: The implementation of ``qkv_write`` for such pools; None if callers must use ``write_kv``.
        stacks_pools: See ``PagedAttention``.
    """

    name: str
    decode: DecodeKernel
    prefill: PrefillKernel
    check: Check
    writer: Any = None
    stacks_pools: bool = False

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run there, or None; see ``PagedAttention.unsupported``."""
        return self.check(platform, device_kind, dtype, **sizes) or unsupported_parts(sizes)

    def pool_specs(self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[PoolSpec, PoolSpec]:
        """Allocate pools with two more pages: the null page, never written, and one never read, for padding."""
        spec = PoolSpec((num_pages + 2, num_kv_heads, page_size, head_dim), 1)
        return spec, spec

    def write_kv(
        self,
        pools: Pools,
        key: Float[Array, "T K H"],
        value: Float[Array, "T K H"],
        batch: AttentionBatch,
        page_size: int,
    ) -> Pools:
        """Return pools with this step's keys and values written; see ``write_pages``."""
        del page_size
        return write_pages(pools, key, value, batch)

    def copy_pages(self, pools: Pools, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> Pools:
        """Return pools with pages copied; see ``PagedAttention.copy_pages``."""
        return copy_pages(pools, sources, targets)

    def attend(
        self,
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
        """Compute attention of each query token over its row's context up to itself; see ``PagedAttention.attend``."""
        settings = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
        if row_tile is not None:
            return self._one_by_one(query, pools, batch, settings)
        num_rows = min(query.shape[0], batch.context_lens.shape[0])
        row, lens = jnp.arange(num_rows, dtype=jnp.int32), batch.context_lens[:num_rows]
        is_decode = jnp.full(num_rows, True) if decode_only else row < batch.num_single
        lens = jnp.where(is_decode, lens, 0)
        num_splits = decode_splits(num_rows, num_kv_heads, batch.page_table.shape[1] * page_size)
        decoded = self.decode(
            query[:num_rows],
            *pools,
            batch.page_table,
            jnp.where(lens > 0, row, 0),  # not a constant, which XLA would materialize in every layer
            lens,
            num_splits=num_splits,
            **settings,
        )
        if decode_only:
            return decoded
        out = self.prefill(query, *pools, batch, **settings)
        places = jnp.where(is_decode, row, query.shape[0] + row)  # a scatter, since it is done in place
        return out.at[places].set(decoded, mode="drop", unique_indices=True)

    def _one_by_one(
        self, query: Float[Array, "T N H"], pools: Pools, batch: AttentionBatch, settings: dict[str, Any]
    ) -> Float[Array, "T N H"]:
        """Return every query token as a decode row of its own, with the same operations at any position."""
        rows, lens = token_contexts(batch, query.shape[0])
        parts = [slice(start, start + _MOST_ROWS) for start in range(0, query.shape[0], _MOST_ROWS)]
        out = [
            self.decode(
                query[part], *pools, batch.page_table, rows[part], lens[part], num_splits=_FIXED_SPLITS, **settings
            )
            for part in parts
        ]
        return jnp.concatenate(out)


def decode_splits(num_rows: int, num_kv_heads: int, most_tokens: int) -> int:
    """Return the splits of each row's context that occupy all processors: a power of two, from static sizes alone.

    Args:
        num_rows: Rows of the step, empty ones too.
        num_kv_heads: Key/value heads on this device.
        most_tokens: Tokens of context that fit in a row of the page table.
    """
    wanted = min(_NUM_PROGRAMS // max(num_rows * num_kv_heads, 1), most_tokens // _SPLIT_TOKENS, _MOST_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)
