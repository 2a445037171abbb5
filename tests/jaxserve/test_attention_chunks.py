"""Rows that each see one chunk of their context, and the page sizes that chunks allow."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import ConfigError, EngineConfig
from jaxserve.device.layout_choice import page_size_of
from jaxserve.layers.attention_chunks import chunks_of, rows_in_chunks
from jaxserve.layers.parallel import Parallel
from pallas_kernels import AttentionBatch

CHUNK, PAGE = 6, 2
ROWS = {
    "decode": [(1, 1), (6, 1), (7, 1), (30, 1)],
    "one-chunk": [(6, 6), (11, 3)],
    "many-chunks": [(13, 1), (7, 1), (8, 3), (29, 29), (30, 13), (12, 7)],
    "mixed": [(19, 1), (25, 24), (5, 4)],
}


def make_batch(rows: list[tuple[int, int]], num_tokens: int, num_rows: int) -> AttentionBatch:
    """Rows of (context, query tokens), with a page table whose entries tell row and page apart."""
    contexts, lens = (np.array([row[i] for row in rows] + [0] * (num_rows - len(rows)), np.int32) for i in (0, 1))
    starts = np.where(lens > 0, np.cumsum(lens) - lens, num_tokens).astype(np.int32)
    table = (100 * np.arange(num_rows)[:, None] + np.arange(16)).astype(np.int32)
    unused = np.zeros(num_tokens, np.int32)
    fields = (table, contexts, starts, lens, np.int32(len(rows)), unused, unused, np.int32(3))
    return AttentionBatch(*map(jnp.asarray, fields))


def seen(batch: AttentionBatch, num_tokens: int) -> dict[int, list[int]]:
    """For each query token, the positions in the pages, ``page * PAGE + offset``, that it sees."""
    found = dict[int, list[int]]()
    for row in range(int(batch.num_rows)):
        context, start, length = (int(a[row]) for a in (batch.context_lens, batch.query_starts, batch.query_lens))
        for i in range(length):
            visible = range(context - length + i + 1)
            found[start + i] = [int(batch.page_table[row, j // PAGE]) * PAGE + j % PAGE for j in visible]
    assert all(token < num_tokens for token in found)
    return found


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("spare", [0, 3])
def test_each_token_sees_its_own_chunk_up_to_itself(name: str, spare: int) -> None:
    rows = ROWS[name]
    num_tokens, num_rows = sum(length for _, length in rows) + spare, len(rows) + spare
    batch = make_batch(rows, num_tokens, num_rows)
    owners = [(row, context - length + i) for row, (context, length) in enumerate(rows) for i in range(length)]
    positions = jnp.array([position for _, position in owners] + [0] * spare, jnp.int32)
    (chunk,) = chunks_of([CHUNK], PAGE)
    assert chunk is not None
    cut = rows_in_chunks(batch, positions, chunk, decode_only=name == "decode" and num_rows == num_tokens)
    expected = {
        token: [row * 100 * PAGE + each for each in range(position // CHUNK * CHUNK, position + 1)]
        for token, (row, position) in enumerate(owners)
    }
    assert seen(cut, num_tokens) == expected
    assert int(cut.query_lens.sum()) == len(owners) and not cut.num_shared_pages
    assert (cut.token_pages == batch.token_pages).all()


def test_no_chunks() -> None:
    assert chunks_of([None, None], PAGE) == ()


@pytest.mark.parametrize(("size", "chunk", "expected"), [(None, 8192, 64), (None, 48, 16), (16, 48, 16), (None, 6, 2)])
def test_chunks_are_whole_pages(size: int | None, chunk: int, expected: int) -> None:
    config = EngineConfig(model="demo", block_size=size)
    assert page_size_of(config, Parallel(), "tensor_parallel", chunk) == expected


def test_a_page_size_that_does_not_divide_the_chunks() -> None:
    config = EngineConfig(model="demo", block_size=64)
    message = "block_size=64 does not divide the model's attention chunks of 48 tokens; use one of 8, 16, or omit it"
    with pytest.raises(ConfigError, match=message):
        page_size_of(config, Parallel(), "tensor_parallel", 48)
