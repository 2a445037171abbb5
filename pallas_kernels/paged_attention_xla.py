"""Paged attention in plain XLA, which runs anywhere and is the reference of other implementations.

Keys are stored transposed inside a page, [P, K, H, p], values as [P, K, p, H], both as flat rows, so that gathering
pages copies rows and both matmuls read their operands in order. Attention walks the context in tiles of several pages
with a running softmax (online softmax, arXiv:1805.02867): its cost follows the longest context in use, not the page
table.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import page_writes
from pallas_kernels.attention_parts import Part
from pallas_kernels.attention_scores import MASKED
from pallas_kernels.paged_attention import AttentionBatch, PoolSpec, token_contexts
from pallas_kernels.xla_softmax import Scoring, Seen, Softmax

_SMALL_TILE = 128  # tokens of context that a decode iteration reads
_LARGE_TILE = 512  # for few rows, whose iterations would otherwise be too short
_SHARED_TILE = 256  # tokens that many rows read together in a round
_FEW_ROWS = 8
_QUERY_TILE = 64  # prefill tokens that share a pass over the context
_PREFILL_TILE = 256  # tokens of context a prefill round reads
_FEW_TOKENS = 1
_TOKEN_TILE = 8  # query tokens that walk together where results must not depend on how many there are


Pools = tuple[Float[Array, "P row"], ...]
"""Keys and values, or one pool of latents, whose first features are their values."""


name = "xla"
writer = None
stacks_pools = False
copy_pages = page_writes.copy_pages


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return None: it runs everywhere."""
    del platform, device_kind, dtype, sizes
    return None


def pool_specs(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[PoolSpec, PoolSpec]:
    """Allocate pools of flat pages, with two more: the null page, never written, and one never read, for padding."""
    spec = PoolSpec((num_pages + 2, num_kv_heads * head_dim * page_size), 1)
    return spec, spec


def write_kv(
    pools: tuple[Float[Array, "P row"], Float[Array, "P row"]],
    key: Float[Array, "T K H"],
    value: Float[Array, "T K H"],
    batch: AttentionBatch,
    page_size: int,
) -> tuple[Float[Array, "P row"], Float[Array, "P row"]]:
    """Return pools with this step's keys and values written. XLA writes a few tokens faster one by one."""
    key_pool, value_pool = pools
    num_tokens, num_kv_heads, head_dim = key.shape
    pages, offsets = batch.token_pages, batch.token_offsets
    key, value = page_writes.as_stored(pools, key, value)
    key_view = key_pool.reshape(-1, num_kv_heads, head_dim, page_size)
    value_view = value_pool.reshape(-1, num_kv_heads, page_size, head_dim)
    if num_tokens <= _FEW_TOKENS:
        for i in range(num_tokens):
            key_view = lax.dynamic_update_slice(key_view, key[i][None, :, :, None], (pages[i], 0, 0, offsets[i]))
            value_view = lax.dynamic_update_slice(value_view, value[i][None, :, None], (pages[i], 0, offsets[i], 0))
    else:
        key_view = key_view.at[pages, :, :, offsets].set(key, mode="promise_in_bounds")
        value_view = value_view.at[pages, :, offsets].set(value, mode="promise_in_bounds")
    return key_view.reshape(key_pool.shape), value_view.reshape(value_pool.shape)


def attend(
    query: Float[Array, "T N H"],
    pools: tuple[Float[Array, "P row"], Float[Array, "P row"]],
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
    grouped = _grouped(query, num_kv_heads)
    own_sinks = None if sinks is None else sinks.reshape(grouped.shape[1:3])
    scoring = Scoring(scale, window, soft_cap, query.shape[2], own_sinks)
    out = attend_grouped(grouped, pools, batch, page_size, scoring, decode_only, row_tile)
    return out.reshape(query.shape).astype(query.dtype)


def attend_part(
    query: Float[Array, "T N H"],
    pools: tuple[Float[Array, "P row"], Float[Array, "P row"]],
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
    scoring = Scoring(scale, window, soft_cap, query.shape[2], part=part)
    out = attend_grouped(_grouped(query, num_kv_heads), pools, batch, page_size, scoring, decode_only, row_tile)
    return out.reshape(*query.shape[:2], -1)


def _grouped(query: Float[Array, "T N H"], num_kv_heads: int) -> Float[Array, "T K G H"]:
    """Group query heads by their key/value head."""
    num_tokens, num_heads, head_dim = query.shape
    return query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)


def attend_grouped(
    grouped: Float[Array, "T K G H"],
    pools: Pools,
    batch: AttentionBatch,
    page_size: int,
    scoring: Scoring,
    decode_only: bool,
    row_tile: int | None,
) -> Float[Array, "T K G result"]:
    """Compute attention, or partial attention, of queries that are grouped by their key/value head, in float32; see
    :func:`attend`."""
    num_rows = batch.context_lens.shape[0]
    if row_tile is not None:
        return _token_by_token(grouped, pools, batch, page_size, scoring)
    if decode_only:
        shared = batch.num_shared_pages
        return _decode(grouped, pools, batch.page_table, batch.context_lens, page_size, scoring, shared)
    decode_lens = jnp.where(jnp.arange(num_rows) < batch.num_single, batch.context_lens, 0)
    out = _decode(grouped[:num_rows], pools, batch.page_table, decode_lens, page_size, scoring)
    return _prefill(grouped, out, pools, batch, page_size, scoring)


def _decode(
    query: Float[Array, "R K G H"],
    pools: Pools,
    page_table: Int[Array, "R M"],
    context_lens: Int[Array, " R"],
    page_size: int,
    scoring: Scoring,
    num_shared_pages: Int[Array, ""] | None = None,
) -> Float[Array, "R K G result"]:
    """Attend with one query per row. Few rows use large tiles; many rows read their common prefix once for all."""
    num_rows, num_kv_heads, group, head_dim = query.shape
    seen = scoring.seen(context_lens)
    small = _tile_pages(_SMALL_TILE, page_size, page_table.shape[1])
    if num_rows <= _FEW_ROWS or num_shared_pages is None or scoring.window is not None:
        large = _tile_pages(_LARGE_TILE, page_size, page_table.shape[1]) if num_rows <= _FEW_ROWS else small
        return scoring.finish(_walk(query, pools, page_table, seen, page_size, scoring, small, large), scoring.sinks)
    tile = _SHARED_TILE // _SMALL_TILE * small
    shared_tokens = num_shared_pages // tile * tile * page_size
    together = query.transpose(1, 0, 2, 3).reshape(1, num_kv_heads, num_rows * group, head_dim)
    shared = Seen(None, shared_tokens[None])
    state = _walk(together, pools, page_table[:1], shared, page_size, scoring, tile, tile)

    def apart(array: Float[Array, "..."]) -> Float[Array, "..."]:
        return array.reshape(num_kv_heads, num_rows, group, *array.shape[3:]).swapaxes(0, 1)

    begun = Softmax(*(apart(array) for array in state)), shared_tokens
    state = _walk(query, pools, page_table, seen, page_size, scoring, small, small, begun)
    return scoring.finish(state, scoring.sinks)


def _token_by_token(
    query: Float[Array, "T K G H"],
    pools: Pools,
    batch: AttentionBatch,
    page_size: int,
    scoring: Scoring,
) -> Float[Array, "T K G result"]:
    """Return every query token as a row of its own, with the same operations at any position.

    The tiles of its context start at its first token and have one size, so that they neither depend on where a chunk
    starts nor on how much the page table holds; masked ones add exact zeros. A few tokens walk together.
    """
    num_tokens, tile = query.shape[0], _TOKEN_TILE
    padding = (-num_tokens % tile) + tile  # never a single tile, which a compiler hoists out of the loop
    rows, context_lens = token_contexts(batch, num_tokens + padding)
    padded = jnp.pad(query, ((0, padding), (0, 0), (0, 0), (0, 0)))
    pages = max(1, _SMALL_TILE // page_size)

    def tile_round(i, out):
        queries, table_rows, lens = (lax.dynamic_slice_in_dim(a, i * tile, tile) for a in (padded, rows, context_lens))
        table = jnp.take(batch.page_table, table_rows, axis=0, mode="clip")
        state = _walk(queries, pools, table, scoring.seen(lens), page_size, scoring, pages, pages)
        return lax.dynamic_update_slice_in_dim(out, scoring.finish(state, scoring.sinks), i * tile, 0)

    used = batch.query_lens.sum()
    return lax.fori_loop(0, -(-used // tile), tile_round, _no_results(padded, scoring))[:num_tokens]


def _walk(
    query: Float[Array, "R K G H"],
    pools: Pools,
    page_table: Int[Array, "R M"],
    seen: Seen,
    page_size: int,
    scoring: Scoring,
    small: int,
    large: int,
    begun: tuple[Softmax, Int[Array, ""]] | None = None,
) -> Softmax:
    """Attend with one query per row. All rows advance together up to the longest context, in large tiles while they
    fit.

    ``begun`` is the softmax over the first tokens of every context, which are whole tiles.
    """
    num_rows, num_kv_heads, group, _ = query.shape
    longest = seen.stop.max()
    first = jnp.zeros((), jnp.int32)
    if seen.first is not None:
        first = jnp.where(seen.stop > 0, seen.first, longest).min()
    if begun is not None:
        state, first = begun
    else:
        shape = (num_rows, num_kv_heads, group)
        values = jnp.zeros((*shape, scoring.value_dim), jnp.float32)
        state = Softmax(jnp.full(shape, MASKED), jnp.zeros(shape), values)

    def walk(state: Softmax, tile: int, start: Int[Array, ""], stop: Int[Array, ""]) -> Softmax:
        def round_(i, state):
            return _decode_tile(state, i, tile, query, pools, page_table, seen, page_size, scoring)

        return lax.fori_loop(start, stop, round_, state)

    small_tokens, large_tokens = small * page_size, large * page_size
    if large % small == 0 and large > small:
        whole = longest // large_tokens
        state = walk(state, large, first // large_tokens, whole)
        walked = whole * (large // small)
        state = walk(state, small, jnp.maximum(walked, first // small_tokens), -(-longest // small_tokens))
    else:
        state = walk(state, small, first // small_tokens, -(-longest // small_tokens))
    return state


def _decode_tile(
    state: Softmax,
    i: Int[Array, ""],
    tile: int,
    query: Float[Array, "R K G H"],
    pools: Pools,
    page_table: Int[Array, "R M"],
    seen: Seen,
    page_size: int,
    scoring: Scoring,
) -> Softmax:
    """Return the softmax of every row with ``tile`` more pages of its context."""
    num_rows, num_kv_heads, group, head_dim = query.shape
    keys, values = _read(pools, _table_slice(page_table, i, tile), (num_kv_heads, head_dim, page_size), scoring)
    spread = jnp.broadcast_to(query[:, None], (num_rows, tile, num_kv_heads, group, head_dim))
    batched = (((4,), (3,)), ((0, 1, 2), (0, 1, 2)))
    scores = scoring(_dot(spread, keys, batched))
    token = (i * tile * page_size + jnp.arange(tile * page_size)).reshape(tile, 1, 1, page_size)
    is_seen = seen.mask(token)
    scores = jnp.where(is_seen, scores, MASKED)
    maximum = jnp.maximum(state.maximum, scores.max((1, 4)))
    weights = jnp.where(is_seen, jnp.exp(scores - maximum[:, None, :, :, None]), 0)
    kept = jnp.exp(state.maximum - maximum)
    added = _dot(weights, values, batched).sum(1)
    return Softmax(maximum, state.total * kept + weights.sum((1, 4)), state.values * kept[..., None] + added)


def _prefill(
    query: Float[Array, "T K G H"],
    decoded: Float[Array, "R K G result"],
    pools: Pools,
    batch: AttentionBatch,
    page_size: int,
    scoring: Scoring,
) -> Float[Array, "T K G result"]:
    """Attend for the rows after the decode rows, one tile of a row's queries at a time, over its visible context.

    Tiles are written in order and whole: what one writes after its row's end is overwritten by the next, or is
    padding.
    """
    num_tokens = query.shape[0]
    tile = min(_QUERY_TILE, num_tokens)
    padded = jnp.pad(query, ((0, tile), (0, 0), (0, 0), (0, 0)))
    out = lax.dynamic_update_slice_in_dim(_no_results(padded, scoring), decoded.astype(jnp.float32), 0, 0)

    def row_round(row, out):
        start, length = batch.query_starts[row], batch.query_lens[row]
        prefix = batch.context_lens[row] - length

        def tile_round(i, out):
            queries = lax.dynamic_slice_in_dim(padded, start + i * tile, tile)
            first = prefix + i * tile
            last = jnp.minimum(first + tile, prefix + length)
            attended = _prefill_tile(queries, first, last, pools, batch.page_table[row], page_size, scoring)
            return lax.dynamic_update_slice_in_dim(out, attended, start + i * tile, 0)

        return lax.fori_loop(0, -(-length // tile), tile_round, out)

    return lax.fori_loop(batch.num_single, batch.num_rows, row_round, out)[:num_tokens]


def _prefill_tile(
    query: Float[Array, "Q K G H"],
    first: Int[Array, ""],
    last: Int[Array, ""],
    pools: Pools,
    pages: Int[Array, " M"],
    page_size: int,
    scoring: Scoring,
) -> Float[Array, "Q K G result"]:
    """Attend with queries at positions ``first``.. over the context before ``last``."""
    num_queries, num_kv_heads, group, head_dim = query.shape
    width = scoring.value_dim
    tile = _tile_pages(_PREFILL_TILE, page_size, pages.shape[0])
    tokens = tile * page_size
    stacked = query.transpose(1, 2, 0, 3).reshape(num_kv_heads, group * num_queries, head_dim)
    shape = (num_kv_heads, group, num_queries)
    state = Softmax(jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, width)))
    seen = scoring.seen(first + jnp.arange(num_queries) + 1)
    batched = (((2,), (1,)), ((0,), (0,)))

    def round_(i, state):
        chosen = _table_slice(pages[None], i, tile)[0]
        keys, values = _read(pools, chosen, (num_kv_heads, head_dim, page_size), scoring)
        keys = keys.transpose(1, 2, 0, 3).reshape(num_kv_heads, head_dim, tokens)
        values = values.transpose(1, 0, 2, 3).reshape(num_kv_heads, tokens, width)
        scores = scoring(_dot(stacked, keys, batched)).reshape(*shape, tokens)
        is_seen = seen.mask(i * tokens + jnp.arange(tokens))
        scores = jnp.where(is_seen, scores, MASKED)
        maximum = jnp.maximum(state.maximum, scores.max(-1))
        weights = jnp.where(is_seen, jnp.exp(scores - maximum[..., None]), 0)
        kept = jnp.exp(state.maximum - maximum)
        added = _dot(weights.reshape(num_kv_heads, group * num_queries, tokens), values, batched)
        return Softmax(
            maximum,
            state.total * kept + weights.sum(-1),
            state.values * kept[..., None] + added.reshape(*shape, width),
        )

    start = jnp.zeros((), jnp.int32) if seen.first is None else seen.first[0] // tokens
    state = lax.fori_loop(start, -(-scoring.before(last) // tokens), round_, state)
    sinks = None if scoring.sinks is None else scoring.sinks[..., None]
    return scoring.finish(state, sinks).transpose(2, 0, 1, 3)


def _read(
    pools: Pools, pages: Int[Array, "..."], shape: tuple[int, int, int], scoring: Scoring
) -> tuple[Float[Array, "... K H p"], Float[Array, "... K p V"]]:
    """Return the keys and values of pages; ``shape`` is K, H and p."""
    num_kv_heads, head_dim, page_size = shape
    keys = jnp.take(pools[0], pages, axis=0, mode="clip").reshape(*pages.shape, num_kv_heads, head_dim, page_size)
    if len(pools) == 1:
        return keys, keys[..., : scoring.value_dim, :].swapaxes(-1, -2)
    values = jnp.take(pools[1], pages, axis=0, mode="clip")
    return keys, values.reshape(*pages.shape, num_kv_heads, page_size, head_dim)


def _no_results(query: Float[Array, "T K G H"], scoring: Scoring) -> Float[Array, "T K G result"]:
    """Return zeros, a result for each query."""
    return jnp.zeros((*query.shape[:-1], scoring.result_dim), jnp.float32)


def _tile_pages(tokens: int, page_size: int, table_pages: int) -> int:
    """Return the pages per tile: about ``tokens``, and fewer than the table, whose gather would be hoisted
    otherwise."""
    return max(1, min(tokens // page_size, table_pages - 1))


def _table_slice(page_table: Int[Array, "R M"], i: Int[Array, ""], tile: int) -> Int[Array, "R tile"]:
    """Return pages ``i * tile``.. of each row; a last tile beyond the table is filled with the table's last column."""
    columns = jnp.minimum(i * tile + jnp.arange(tile), page_table.shape[1] - 1)
    return jnp.take(page_table, columns, axis=1, mode="clip")


def _dot(left: Float[Array, "..."], right: Float[Array, "..."], dimensions: tuple) -> Float[Array, "..."]:
    """Multiply batches with float32 accumulation; operands have at least the precision of the pool's dtype."""
    return lax.dot_general(
        left.astype(right.dtype),
        right,
        dimensions,
        precision=lax.Precision.HIGHEST if right.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
