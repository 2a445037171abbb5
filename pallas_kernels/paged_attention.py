"""Paged attention: the operation's interface, its cases, and a plain reference that gathers everything.

Keys and values live in pages of p tokens. A row is one sequence of a step; it owns consecutive query tokens, and its
page
table lists the pages of its whole context in order. In a mixed step the first ``num_decode`` rows own one token each,
so that token r belongs to row r there; rows behind them are prefill chunks.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class AttentionBatch(NamedTuple):
    """Where each query token of a step stands and what it sees; all int32.

    Attributes:
        page_table: Pages of each row's context; entries past it name the null page, which stands behind the usable
            ones.
        context_lens: Tokens of each row's context, this step's included; 0 for an empty row.
        query_starts: First query token of each row.
        query_lens: Query tokens of each row.
        num_decode: Leading rows that own one token each.
        num_rows: Rows in use.
        token_pages: Page that takes each token's key and value; for a padding token the one behind the null page.
        token_offsets: Its place in the page.
        num_shared_pages: Leading pages that the contexts of all decode rows have in common, each full in all of them.
    """

    page_table: Int[Array, "R M"]
    context_lens: Int[Array, " R"]
    query_starts: Int[Array, " R"]
    query_lens: Int[Array, " R"]
    num_decode: Int[Array, ""]
    num_rows: Int[Array, ""]
    token_pages: Int[Array, " T"]
    token_offsets: Int[Array, " T"]
    num_shared_pages: Int[Array, ""]


class PoolSpec(NamedTuple):
    """Shape of one layer's key or value pool, and which of its dimensions is split by key/value heads."""

    shape: tuple[int, ...]
    heads_dimension: int


@runtime_checkable
class PagedAttention(Protocol):
    """What an implementation module offers. Pools are opaque to everyone else: their layout is its own."""

    def unsupported(self, platform: str, device_kind: str, dtype: str) -> str | None:
        """Why it cannot run on such a device, or None."""
        ...

    def pool_specs(self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[PoolSpec, PoolSpec]:
        """Pools of keys and of values for ``num_pages`` usable pages, a null page and one for padding tokens."""
        ...

    def write_kv(
        self,
        pools: tuple[Array, Array],
        key: Float[Array, "T K H"],
        value: Float[Array, "T K H"],
        batch: AttentionBatch,
        page_size: int,
    ) -> tuple[Array, Array]:
        """Pools with this step's keys and values in their places."""
        ...

    def copy_pages(
        self, pools: tuple[Array, Array], sources: Int[Array, " C"], targets: Int[Array, " C"]
    ) -> tuple[Array, Array]:
        """Pools with the content of page ``sources[i]`` in page ``targets[i]``.

        All sources are read before a target is written. No page is the target of two sources, but targets behind the
        pool's end are not written: entries that only fill up the arrays have one.
        """
        ...

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
    ) -> Float[Array, "T N H"]:
        """Each query token's attention over its row's context up to itself; padding tokens get anything finite.

        With a ``row_tile`` a token's result has the same bits in every batch, in a decode step and in a chunk of any
        length; the query tokens that rows own then stand together at the front.
        """
        ...


class Case(NamedTuple):
    """One shape to test an implementation on; lengths are (context, query) pairs, decode rows first."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None


CASES: dict[str, Case] = {
    "one_token": Case(rows=((1, 1),)),
    "page_minus_one": Case(rows=((15, 1),)),
    "page": Case(rows=((16, 1),)),
    "page_plus_one": Case(rows=((17, 1),)),
    "ragged_decode": Case(rows=((3, 1), (40, 1), (17, 1), (100, 1))),
    "long_decode": Case(rows=((700, 1), (5, 1))),
    "prefill": Case(rows=((37, 37),)),
    "chunk_with_prefix": Case(rows=((90, 25),)),
    "mixed": Case(rows=((33, 1), (5, 1), (64, 64), (150, 20), (7, 7))),
    "many_rows": Case(rows=tuple((7 * i + 1, 1) for i in range(20))),
    "multi_head": Case(rows=((33, 1), (20, 20)), num_heads=4, num_kv_heads=4),
    "multi_query": Case(rows=((33, 1), (20, 20)), num_heads=7, num_kv_heads=1),
    "group_of_eight": Case(rows=((33, 1), (20, 20)), num_heads=16, num_kv_heads=2),
    "small_page": Case(rows=((33, 1), (64, 50)), page_size=8),
    "large_page": Case(rows=((300, 1), (200, 130)), page_size=128),
    "window": Case(rows=((100, 1), (5, 1), (120, 60)), window=24),
    "window_one": Case(rows=((100, 1), (30, 30)), window=1),
    "soft_cap": Case(rows=((50, 1), (40, 40)), soft_cap=5.0),
}


def reference(
    query: Float[Array, "T N H"],
    key: Float[Array, "R S K H"],
    value: Float[Array, "R S K H"],
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    """Attention of every token over its row's keys and values, laid out densely; zero for tokens no row owns."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    token = jnp.arange(num_tokens)
    owned = (token[:, None] >= batch.query_starts) & (token[:, None] < batch.query_starts + batch.query_lens)
    row = jnp.argmax(owned, 1)
    position = batch.context_lens[row] - batch.query_lens[row] + token - batch.query_starts[row]
    grouped = query.reshape(num_tokens, num_kv_heads, -1, head_dim).astype(jnp.float32)
    high = lax.Precision.HIGHEST
    scores = jnp.einsum("tkgh,tskh->tkgs", grouped, key[row].astype(jnp.float32), precision=high) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    seen = jnp.arange(key.shape[1])[None, :] <= position[:, None]
    if window is not None:
        seen &= jnp.arange(key.shape[1])[None, :] > position[:, None] - window
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("tkgs,tskh->tkgh", weights, value[row].astype(jnp.float32), precision=high)
    return jnp.where(owned.any(1)[:, None, None], out.reshape(num_tokens, num_heads, head_dim), 0).astype(query.dtype)
