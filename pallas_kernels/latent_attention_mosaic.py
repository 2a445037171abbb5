"""Attention over paged latents in Pallas Mosaic GPU, for NVIDIA Hopper; and the same interpreted, for checks on a CPU.

Latents are stored as they are, [P, p, H]. There is one kernel, for decode rows: each token of a longer row is computed
as a decode row of its own, and reads its whole context again.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_parts import unsupported_parts
from pallas_kernels.latent_attention import Pools
from pallas_kernels.latent_decode_mosaic import decode_latents, num_blocks
from pallas_kernels.mosaic_support import cannot_interpret, interpreter, missing_jax, not_hopper, unsupported_pages
from pallas_kernels.page_writes import as_stored_latents, copy_pool_pages
from pallas_kernels.paged_attention import AttentionBatch, PoolSpec, token_contexts
from pallas_kernels.paged_attention_pages import decode_splits

_MOST_HEAD_DIM, _MOST_VALUE_DIM = 576, 512  # two tiles and the queries fill shared memory; values fill registers
_FIXED_SPLITS = 8  # where results must not depend on the batch
_MOST_PARTS = 1024  # of one call there: 128 MB of memory


@dataclasses.dataclass(frozen=True)
class LatentKernels:
    """An implementation of ``LatentAttention``.

    Attributes:
        name: Its name in the registry.
        is_interpreted: Whether the kernels run on a CPU, step by step.
        writer: None: callers use ``write_kv``.
        stacks_pools: See ``LatentAttention``.
    """

    name: str
    is_interpreted: bool
    writer: None = None
    stacks_pools: bool = False

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run there, or None; see ``LatentAttention.unsupported``."""
        if self.is_interpreted:
            reason = cannot_interpret(platform)
        else:
            reason = not_hopper(platform, device_kind) or missing_jax()
        return reason or _unsupported_latents(dtype, sizes) or unsupported_parts(sizes)

    def pool_specs(self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[PoolSpec]:
        """Return the shape of the pool; see ``LatentAttention.pool_specs``."""
        del num_kv_heads
        return (PoolSpec((num_pages + 2, page_size, head_dim), None),)

    def write_kv(
        self,
        pools: Pools,
        key: Float[Array, "T 1 rotated"],
        value: Float[Array, "T 1 latent"],
        batch: AttentionBatch,
        page_size: int,
    ) -> Pools:
        """Return the pool with this step's latents and rotated keys written; see ``LatentAttention.write_kv``."""
        del page_size
        (pool,) = pools
        place = batch.token_pages, batch.token_offsets
        return (pool.at[place].set(as_stored_latents(pool, key, value), mode="promise_in_bounds"),)

    def copy_pages(self, pools: Pools, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> Pools:
        """Return the pool with pages copied; see ``PagedAttention.copy_pages``."""
        (pool,) = pools
        return (copy_pool_pages(pool, sources, targets),)

    def read_pages(self, pools: Pools, pages: Int[Array, "*shape"], page_size: int) -> Float[Array, "*shape p H"]:
        """Return all features of all tokens of pages; see ``LatentAttention.read_pages``."""
        del page_size
        return jnp.take(pools[0], pages, axis=0, mode="clip")

    def read_tokens(
        self, pools: Pools, pages: Int[Array, "*shape"], offsets: Int[Array, "*shape"], page_size: int
    ) -> Float[Array, "*shape H"]:
        """Return all features of one token of each page; see ``LatentAttention.read_tokens``."""
        del page_size
        return pools[0].at[pages, offsets].get(mode="clip")

    def attend(
        self,
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
        num_tokens, num_heads, _ = query.shape
        if decode_only and row_tile is None:
            lens = batch.context_lens[:num_tokens]
            rows = jnp.where(lens > 0, jnp.arange(num_tokens), 0)  # not a constant, kept by XLA for every layer
        else:
            rows, lens = token_contexts(batch, num_tokens)
        blocks, most_tokens = num_blocks(num_heads), batch.page_table.shape[1] * page_size
        # Twice as many as there are, since one program runs on a multiprocessor and not two.
        num_splits = decode_splits(num_tokens, 2 * blocks, most_tokens) if row_tile is None else _FIXED_SPLITS
        step = num_tokens if row_tile is None else _MOST_PARTS // (num_splits * blocks)
        settings = {"value_dim": value_dim, "scale": scale, "num_splits": num_splits}
        interpret = interpreter() if self.is_interpreted else None
        parts = [slice(start, start + step) for start in range(0, num_tokens, step)]
        out = [
            decode_latents(
                query[part], *pools, batch.page_table, rows[part], lens[part], interpret=interpret, **settings
            )
            for part in parts
        ]
        return jnp.concatenate(out)


def _unsupported_latents(dtype: str, sizes: Mapping[str, int]) -> str | None:
    """Return why the kernel cannot take such latents, or None; missing sizes are assumed to be supported."""
    reason = unsupported_pages(dtype, sizes)
    if reason is not None:
        return reason
    for name, multiple, most in (("head_dim", 64, _MOST_HEAD_DIM), ("value_dim", 128, _MOST_VALUE_DIM)):
        size = sizes.get(name, most)
        if size % multiple or not 0 < size <= most:
            return f"{name} must be a multiple of {multiple} up to {most}, not {size}"
    return None


MOSAIC = LatentKernels("mosaic", is_interpreted=False)
INTERPRET = LatentKernels("mosaic-interpret", is_interpreted=True)
