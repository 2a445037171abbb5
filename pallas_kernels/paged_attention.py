"""Paged attention: the operation's interface, its inputs, and a plain reference that gathers everything.

Keys and values live in pages of p tokens. A row is one sequence of a step; it owns consecutive query tokens, and its
page table lists the pages of its whole context in order. The first ``num_single`` rows of a step own one token each, so
that token r belongs to row r there; kernels compute those rows together, and each of the rows after them by itself.

Sizes that an implementation may not support are ``num_heads``, ``num_kv_heads``, ``head_dim``, ``page_size`` and
``token_parts``, the number of devices that share the tokens of pages, of which ``page_size`` counts those of one; sizes
that an implementation is not told it takes for granted. More than one part needs ``PartAttention``.
"""

import functools
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_scores import MASKED
from pallas_kernels.operation import Comparison, Cost, Tolerance, compare_rows
from pallas_kernels.paged_attention_cases import BENCHES, CASES, DEVICE_CASES, Case

__all__ = [
    "BENCHES",
    "CASES",
    "DEVICE_CASES",
    "IS_IN_PLACE",
    "AttentionBatch",
    "Case",
    "Inputs",
    "PagedAttention",
    "PoolSpec",
    "Prepared",
    "row_tokens",
    "token_contexts",
]

IS_IN_PLACE = False
_STALE = 9.0  # content of a page after its owner's last token
_MOST_GATHERED = 1 << 26  # elements of keys that the reference lays out at a time


class AttentionBatch(NamedTuple):
    """Position and visible context of each query token of a step; all int32.

    Attributes:
        page_table: Pages of each row's context; entries past it name the null page, which follows the usable
            ones.
        context_lens: Tokens of each row's context, this step's included; 0 for an empty row.
        query_starts: First query token of each row.
        query_lens: Query tokens of each row. Their sum is the number of tokens in use, which come first.
        num_rows: Rows in use.
        token_pages: Page that takes each token's key and value; for a padding token the one after the null page.
        token_offsets: Its index in the page.
        num_shared_pages: Leading pages that the contexts of the first ``num_single`` rows have in common, each full in
            all of them.
        first_page: Start of the pools in the arrays, which may hold other pools too; nonzero only with
            ``stacks_pools``.
    """

    page_table: Int[Array, "R M"]
    context_lens: Int[Array, " R"]
    query_starts: Int[Array, " R"]
    query_lens: Int[Array, " R"]
    num_rows: Int[Array, ""]
    token_pages: Int[Array, " T"]
    token_offsets: Int[Array, " T"]
    num_shared_pages: Int[Array, ""]
    first_page: Int[Array, ""] | int = 0

    @property
    def num_single(self) -> Int[Array, ""]:
        """Number of leading rows that own one token each; every layer computes it, and XLA keeps one of them."""
        return jnp.argmin(jnp.append(self.query_lens == 1, False)).astype(jnp.int32)


def row_tokens(batch: AttentionBatch, num_tokens: int) -> Bool[Array, "T R"]:
    """Return which query tokens each row owns; a token of no row is padding."""
    token = jnp.arange(num_tokens)[:, None]
    return (token >= batch.query_starts) & (token < batch.query_starts + batch.query_lens)


def token_contexts(batch: AttentionBatch, num_tokens: int) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Return the row of each query token, and how much of its context the token sees: all up to itself, none for
    padding."""
    is_owned = row_tokens(batch, num_tokens)
    rows = jnp.argmax(is_owned, 1)
    before = batch.context_lens - batch.query_lens - batch.query_starts
    return rows, jnp.where(is_owned.any(1), before[rows] + jnp.arange(num_tokens) + 1, 0)


class PoolSpec(NamedTuple):
    """Shape of one of a layer's pools, with pages first, and its dimension that is split by key/value heads, if any."""

    shape: tuple[int, ...]
    heads_dimension: int | None


@runtime_checkable
class PagedAttention(Protocol):
    """The functions of an implementation. The layout of pools is private to it.

    Attributes:
        name: Its name in the registry, for the log.
        writer: The implementation of ``qkv_write`` for these pools; None if the caller normalizes and
            applies RoPE, and then calls ``write_kv``.
        stacks_pools: Whether pools of several layers may be stacked in one array, so that a step has fewer
            arguments; ``AttentionBatch.first_page`` then says where those of a layer begin.
    """

    @property
    def name(self) -> str:
        """See the class."""
        ...

    @property
    def writer(self) -> Any:
        """See the class."""
        ...

    @property
    def stacks_pools(self) -> bool:
        """See the class."""
        ...

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device with such ``sizes``, or None."""
        ...

    def pool_specs(self, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[PoolSpec, PoolSpec]:
        """Allocate pools of keys and of values for ``num_pages`` usable pages, a null page and one for padding
        tokens."""
        ...

    def write_kv(
        self,
        pools: tuple[Array, Array],
        key: Float[Array, "T K H"],
        value: Float[Array, "T K H"],
        batch: AttentionBatch,
        page_size: int,
    ) -> tuple[Array, Array]:
        """Return pools with this step's keys and values written."""
        ...

    def copy_pages(
        self, pools: tuple[Array, Array], sources: Int[Array, " C"], targets: Int[Array, " C"]
    ) -> tuple[Array, Array]:
        """Copy the content of page ``sources[i]`` to page ``targets[i]``.

        All sources are read before a target is written. No page is the target of two sources, but targets after the
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
        sinks: Float[Array, " N"] | None = None,
    ) -> Float[Array, "T N H"]:
        """Return each query token's attention over its row's context up to itself; the results of padding tokens are
        undefined but finite.

        With a ``row_tile`` a token's result has the same bits in every batch, in a decode step and in a chunk of any
        length; the query tokens of rows must then come first. ``sinks`` has a logit for each query head: one more term
        of its softmax's denominator, without a value.
        """
        ...


def reference(
    query: Float[Array, "T N H"],
    key: Float[Array, "used S K H"],
    value: Float[Array, "used S K H"],
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "T N H"]:
    """Compute attention of every token over its row's dense keys and values; zero for tokens that no row owns.

    Args:
        query: Query tokens.
        key: Keys of the whole context of each row in use.
        value: Values of the same.
        batch: The batch; its rows past those of ``key`` are empty.
        scale: Factor of the scores.
        window: Sliding window in tokens, or None.
        soft_cap: Bound of the scores, or None.
        sinks: Logit of each query head that has no value, or None.
    """
    num_tokens, num_heads, head_dim = query.shape
    length, num_kv_heads = key.shape[1:3]
    row, visible = token_contexts(batch, num_tokens)
    grouped = query.reshape(num_tokens, num_kv_heads, -1, head_dim).astype(jnp.float32)
    high = lax.Precision.HIGHEST

    def attend_token(token: tuple[Array, Array, Array]) -> Float[Array, "K G H"]:
        heads, own_row, own_visible = token
        scores = jnp.einsum("kgh,skh->kgs", heads, key[own_row].astype(jnp.float32), precision=high) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        position = jnp.arange(length)
        seen = position < own_visible
        if window is not None:
            seen &= position >= own_visible - window
        scores = jnp.where(seen, scores, MASKED)
        if sinks is not None:
            scores = jnp.concatenate([scores, sinks.reshape(*scores.shape[:2], 1)], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :length]
        return jnp.einsum("kgs,skh->kgh", weights, value[own_row].astype(jnp.float32), precision=high)

    together = max(1, min(num_tokens, _MOST_GATHERED // (length * num_kv_heads * head_dim)))
    out = lax.map(attend_token, (grouped, row, visible), batch_size=together)
    out = jnp.where((visible > 0)[:, None, None], out.reshape(num_tokens, num_heads, head_dim), 0)
    return out.astype(query.dtype)


class Inputs(NamedTuple):
    """A step's queries, and the dense context of each row in use."""

    query: Float[Array, "T N H"]
    keys: Float[Array, "used S K H"]
    values: Float[Array, "used S K H"]
    batch: AttentionBatch


class Prepared(NamedTuple):
    """A step's queries and the pools of keys and values that hold all contexts."""

    query: Float[Array, "T N H"]
    pools: tuple[Array, Array]
    batch: AttentionBatch


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make normally distributed queries, keys and values of a case, with shuffled pages."""
    size = sum(math.prod(shape) for shape in _shapes(case))
    is_small = size < 1 << 20  # sizes of small cases are rounded, so that few programs make the numbers of all
    return _laid_out(case, _normal(key, 1 << size.bit_length() if is_small else size, case.dtype))


def _shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a case's queries, keys and values."""
    context = (len(case.rows), max(context for context, _ in case.rows), case.num_kv_heads, case.head_dim)
    return (case.num_tokens, case.num_heads, case.head_dim), context, context


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, size: int, dtype: str) -> Float[Array, " size"]:
    return jax.random.normal(key, (size,), dtype)


@functools.partial(jax.jit, static_argnums=0)
def _laid_out(case: Case, numbers: Float[Array, " size"]) -> Inputs:
    shapes = _shapes(case)
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = (numbers[end - math.prod(shape) : end] for shape, end in zip(shapes, ends.tolist(), strict=True))
    query, keys, values = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    return Inputs(query, keys, values, make_batch(case))


def make_batch(case: Case) -> AttentionBatch:
    """Return the batch of a case, the same at each call."""
    counts, usable = case.row_pages(), num_pages(case)
    order = np.random.default_rng(0).permutation(usable)
    table = np.full((case.num_rows, case.table_pages or max(counts) + 2), usable, np.int32)
    for row, last in enumerate(np.cumsum(counts)):
        table[row, : counts[row]] = order[last - counts[row] : last]
    contexts, queries = (np.array([row[i] for row in case.rows] + [0] * case.spare_rows) for i in (0, 1))
    starts = np.cumsum(queries) - queries
    pages, offsets = np.full(case.num_tokens, usable + 1), np.zeros(case.num_tokens)
    for row, (context, length) in enumerate(case.rows):
        position = np.arange(context - length, context)
        tokens = starts[row] + np.arange(length)
        pages[tokens], offsets[tokens] = table[row, position // case.page_size], position % case.page_size
    fields = (table, contexts, starts, queries, len(case.rows), pages, offsets, 0)
    return AttentionBatch(*(jnp.asarray(field, jnp.int32) for field in fields))


@functools.partial(jax.jit, static_argnums=(0, 1))
def prepare(implementation: PagedAttention, case: Case, inputs: Inputs) -> Prepared:
    """Lay out pools as the implementation does: NaN in unowned pages, stale numbers after a context's end."""
    specs = implementation.pool_specs(num_pages(case), case.page_size, case.num_kv_heads, case.head_dim)
    key_pool, value_pool = (unowned_pool(case, inputs.batch, spec.shape).astype(case.dtype) for spec in specs)
    places, num_tokens = context_places(case, inputs.batch, inputs.keys.shape[1])
    shape = (num_tokens, case.num_kv_heads, case.head_dim)
    keys, values = inputs.keys.reshape(shape), inputs.values.reshape(shape)
    pools = implementation.write_kv((key_pool, value_pool), keys, values, places, case.page_size)
    return Prepared(inputs.query, pools, inputs.batch)


def unowned_pool(case: Case, batch: AttentionBatch, shape: tuple[int, ...]) -> Float[Array, "P ..."]:
    """Return a pool without contexts: NaN in pages that no row owns, stale numbers in the others."""
    usable = num_pages(case)
    owned = jnp.where(batch.page_table < usable, batch.page_table, usable + 2).reshape(-1)
    content = jnp.where(jnp.arange(usable + 2) < usable, jnp.nan, 0.0).at[owned].set(_STALE, mode="drop")
    return jnp.broadcast_to(content.reshape(-1, *[1] * (len(shape) - 1)), shape)


def context_places(case: Case, batch: AttentionBatch, length: int) -> tuple[AttentionBatch, int]:
    """Return the batch that writes every token of contexts padded to ``length``, and the number of those tokens."""
    num_rows = len(case.rows)
    position = jnp.broadcast_to(jnp.arange(length), (num_rows, length))
    pages = jnp.take_along_axis(batch.page_table[:num_rows], position // case.page_size, axis=1)
    pages = jnp.where(position < batch.context_lens[:num_rows, None], pages, num_pages(case) + 1)
    offsets = (position % case.page_size).reshape(-1)
    return batch._replace(token_pages=pages.reshape(-1), token_offsets=offsets), num_rows * length


def run(implementation: PagedAttention, case: Case, prepared: Prepared) -> Float[Array, "T N H"]:
    """Compute the step's attention; keys and values are already written."""
    return implementation.attend(
        prepared.query,
        prepared.pools,
        prepared.batch,
        page_size=case.page_size,
        num_kv_heads=case.num_kv_heads,
        scale=case.head_dim**-0.5,
        window=case.window,
        soft_cap=case.soft_cap,
        decode_only=case.is_decode_only,
        row_tile=case.row_tile,
        sinks=case_sinks(case),
    )


@functools.partial(jax.jit, static_argnums=0)
def expected(case: Case, inputs: Inputs) -> Float[Array, "T N H"]:
    """Compute the reference in float32; zeros for tokens that no row owns."""
    query, keys, values, batch = inputs
    settings = {"scale": case.head_dim**-0.5, "window": case.window, "soft_cap": case.soft_cap}
    return reference(query.astype(jnp.float32), keys, values, batch, sinks=case_sinks(case), **settings)


def case_sinks(case: Case) -> Float[Array, " N"] | None:
    """Return the sinks of a case, the same at each call: above, about and below the scores."""
    return jnp.linspace(9.0, -5.0, case.num_heads, dtype=jnp.float32) if case.has_sinks else None


def compare(case: Case, inputs: Inputs, found: Float[Array, "T N H"], expected: Float[Array, "T N H"]) -> Comparison:
    """Compare each head of each token; tokens that no row owns are padding."""
    del inputs
    used = np.arange(case.num_tokens) < sum(length for _, length in case.rows)
    return compare_rows(("attention",), found, expected, used[:, None], tolerance(case))


def tolerance(case: Case) -> Tolerance:
    """Allow for rounding of the weights and of the result; the mean of 100,000 values is still longer than the
    floor."""
    share = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}[case.dtype]
    return Tolerance(share, floor=1e-3 * case.head_dim**0.5)


def cost(case: Case) -> Cost:
    """Count the keys and values that a row sees once, its queries and results, and two matmuls."""
    seen_tokens, pairs = 0, 0
    for context, length in case.rows:
        visible = np.arange(context - length, context) + 1
        window = case.window or context
        pairs += int(np.minimum(visible, window).sum())
        seen_tokens += min(context, window + length - 1)
    used = sum(length for _, length in case.rows)
    numbers = 2 * seen_tokens * case.num_kv_heads * case.head_dim + 2 * used * case.num_heads * case.head_dim
    return Cost(numbers * jnp.dtype(case.dtype).itemsize, 4 * case.num_heads * case.head_dim * pairs)


def sizes(case: Case) -> dict[str, int]:
    """Return the sizes that an implementation may not support."""
    names = ("num_heads", "num_kv_heads", "head_dim", "page_size")
    return {name: getattr(case, name) for name in names}


def dtype(case: Case) -> str:
    """Return the dtype of queries, keys and values."""
    return case.dtype


def num_pages(case: Case) -> int:
    """Return the number of usable pages of a case's pools: those in use and three unowned ones."""
    return sum(case.row_pages()) + 3
