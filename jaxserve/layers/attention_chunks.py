"""Attention within chunks of the context (Llama 4): a query sees the tokens of its own chunk up to itself.

No kernel knows of chunks. A row whose query tokens are in one chunk is a row whose context starts with that chunk, so
its page table is cut there; a row whose tokens are in several chunks becomes a row for each of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import AttentionBatch


class Chunk(NamedTuple):
    """Size of a chunk, which begins with a page: its tokens, and its pages."""

    num_tokens: int
    num_pages: int


def chunks_of(sizes: Sequence[int | None], page_size: int) -> tuple[Chunk | None, ...]:
    """Return the chunks of page tables from their tokens; empty if none has chunks.

    Args:
        sizes: Tokens of a chunk, or None, of each page table.
        page_size: Tokens per page, on all devices that share them.
    """
    if not any(sizes):
        return ()
    assert all(size is None or size % page_size == 0 for size in sizes), (sizes, page_size)
    return tuple(None if size is None else Chunk(size, size // page_size) for size in sizes)


def rows_in_chunks(
    batch: AttentionBatch, positions: Int[Array, " T"], chunk: Chunk, decode_only: bool
) -> AttentionBatch:
    """Return a batch of rows that each see one chunk alone; the query tokens and where they are written stay the same.

    Args:
        batch: The batch, with R rows.
        positions: Position of each token in its context.
        chunk: Size of a chunk.
        decode_only: Whether every row has one token. The result then has R rows, else ``2 R`` and one for each chunk
            that T tokens have room for.
    """
    num_tokens, (num_rows, table_pages) = len(positions), batch.page_table.shape
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    if decode_only:
        rows, starts, lens, num_pieces = token, batch.query_starts, batch.query_lens, batch.num_rows
    else:
        most = min(num_tokens, 2 * num_rows + num_tokens // chunk.num_tokens)
        row = jnp.searchsorted(batch.query_starts, token, side="right").astype(jnp.int32) - 1
        is_used = token < batch.query_lens.sum()
        begins = is_used & ((token == batch.query_starts[row]) | (positions % chunk.num_tokens == 0))
        piece = jnp.cumsum(begins, dtype=jnp.int32) - 1
        starts = jnp.full(most, num_tokens, jnp.int32).at[jnp.where(begins, piece, most)].set(token, mode="drop")
        lens = jnp.zeros(most, jnp.int32).at[jnp.where(is_used, piece, most)].add(1, mode="drop")
        rows, num_pieces = row.at[starts].get(mode="clip"), begins.sum(dtype=jnp.int32)
    first = positions.at[starts].get(mode="clip")
    index = first // chunk.num_tokens
    columns = index[:, None] * chunk.num_pages + jnp.arange(min(table_pages, chunk.num_pages), dtype=jnp.int32)
    return batch._replace(
        page_table=batch.page_table[rows[:, None], jnp.minimum(columns, table_pages - 1)],
        context_lens=jnp.where(lens > 0, first + lens - index * chunk.num_tokens, 0),
        query_starts=starts,
        query_lens=lens,
        num_rows=num_pieces,
        num_shared_pages=jnp.zeros_like(batch.num_shared_pages),
    )
