"""Triton kernels of paged attention. Imports triton: import this module only through ``jax_triton.kernels``.

Constants come in two tuples. SHAPE: key/value heads, query heads of each, tokens of a page, width of a head. SCORING:
scale, window (0: none), soft cap (0: none), whether there are sinks.
"""

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels.attention_scores import LOG2_E, MASKED

_LOG2_E = tl.constexpr(LOG2_E)
_NO_SCORE = tl.constexpr(MASKED)
_COMBINED = tl.constexpr(16)  # splits that are added up at a time


@triton.jit
@no_type_check
def _walk(
    state,  # maximum [rows], total [rows], sum of values [rows, BLOCK_H]
    query,  # [rows, BLOCK_H]
    positions,  # [rows] last token that each row sees
    pools,  # pointers to keys and values of this head, [P, K, p, H]
    table,  # pointer to the pages of this context
    start,  # first tile and the one after the last
    stop,
    SHAPE: tl.constexpr,
    SCORING: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Update a running softmax with more tiles of context; without IS_MASKED all rows see all of these tokens."""
    maximum, total, summed = state
    WINDOW: tl.constexpr = SCORING[1]
    dims = tl.arange(0, query.shape[1])
    is_dim = (dims < SHAPE[3]) | (SHAPE[3] == query.shape[1])
    last = tl.max(positions, 0)
    for tile in range(start, stop):
        tokens = tile * TILE + tl.arange(0, TILE)
        is_there = (tokens <= last) | (not IS_MASKED)
        pages = tl.load(table + tokens // SHAPE[2], mask=is_there, other=0)
        at = (pages.to(tl.int64) * (SHAPE[0] * SHAPE[2]) + tokens % SHAPE[2]) * SHAPE[3]
        keys = tl.load(pools[0] + at[None, :] + dims[:, None], mask=is_there[None, :] & is_dim[:, None], other=0)
        scores = tl.dot(query, keys, input_precision="ieee")
        if SCORING[2] == 0:
            scores = scores * (SCORING[0] * _LOG2_E)
        else:
            tanh = 1 - 2 / (1 + tl.exp2(scores * (2 * SCORING[0] / SCORING[2] * _LOG2_E)))
            scores = tanh * (SCORING[2] * _LOG2_E)
        if IS_MASKED:
            is_seen = tokens[None, :] <= positions[:, None]
            if WINDOW > 0:
                is_seen = is_seen & (tokens[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, _NO_SCORE)
        highest = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        if IS_MASKED:
            weights = tl.where(is_seen, weights, 0.0)
        kept = tl.exp2(maximum - highest)
        total = total * kept + tl.sum(weights, 1)
        values = tl.load(pools[1] + at[:, None] + dims[None, :], mask=is_there[:, None] & is_dim[None, :], other=0)
        summed = tl.dot(weights.to(values.dtype), values, summed * kept[:, None], input_precision="ieee")
        maximum = highest
    return maximum, total, summed


@triton.jit
@no_type_check
def _with_sinks(total, maximum, sinks_ptr, heads, is_head):
    """Add to softmax denominators the sinks of some query heads."""
    return total + tl.exp2(tl.load(sinks_ptr + heads, mask=is_head, other=0).to(tl.float32) * _LOG2_E - maximum)


@triton.jit
@no_type_check
def decode_kernel(
    query_ptr,  # [R, N, H]
    keys_ptr,  # [P, K, p, H]
    values_ptr,  # [P, K, p, H]
    table_ptr,  # [Rt, M] int32
    rows_ptr,  # [R] int32
    lens_ptr,  # [R] int32
    sinks_ptr,  # [N] float32, read if there is one split
    table_width,  # M
    out_ptr,  # [R, N, splits, H]
    logs_ptr,  # [R, N, splits] logarithms to base 2 of the softmax's denominators
    SHAPE: tl.constexpr,
    SCORING: tl.constexpr,
    TILE: tl.constexpr,
):
    """One split of one row's context for the query heads of one key/value head; grid (R, K, splits)."""
    GROUP: tl.constexpr = SHAPE[1]
    HEAD_DIM: tl.constexpr = SHAPE[3]
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP) if GROUP > 16 else 16
    BLOCK_H: tl.constexpr = triton.next_power_of_2(HEAD_DIM) if HEAD_DIM > 16 else 16
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + row)
    table = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_width
    first = tl.maximum(length - SCORING[1], 0) // TILE if SCORING[1] > 0 else 0
    stop = tl.cdiv(length, TILE)
    tiles = tl.cdiv(stop - first, tl.num_programs(2))
    start = first + split * tiles
    heads = kv_head * GROUP + tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_H)
    is_head = tl.arange(0, BLOCK_G) < GROUP
    at = (row * (SHAPE[0] * GROUP) + heads).to(tl.int64)
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0)
    offset = kv_head * (SHAPE[2] * HEAD_DIM)
    pools = (keys_ptr + offset, values_ptr + offset)
    positions = tl.zeros([BLOCK_G], tl.int32) + (length - 1)
    state = (
        tl.full([BLOCK_G], _NO_SCORE, tl.float32),
        tl.zeros([BLOCK_G], tl.float32),
        tl.zeros([BLOCK_G, BLOCK_H], tl.float32),
    )
    stop = tl.minimum(start + tiles, stop)
    maximum, total, summed = _walk(state, query, positions, pools, table, start, stop, SHAPE, SCORING, TILE, True)
    is_empty = total == 0
    total = tl.where(is_empty, 1.0, total)
    if SCORING[3] and tl.num_programs(2) == 1:
        total = _with_sinks(total, maximum, sinks_ptr, heads, is_head)
    at = at * tl.num_programs(2) + split
    tl.store(out_ptr + at[:, None] * HEAD_DIM + dims[None, :], summed / total[:, None], mask=mask)
    tl.store(logs_ptr + at, tl.where(is_empty, _NO_SCORE, maximum + tl.log2(total)), mask=is_head)


@triton.jit
@no_type_check
def combine_kernel(
    parts_ptr,  # [R * N, SPLITS, HEAD_DIM] float32
    logs_ptr,  # [R * N, SPLITS] float32
    sinks_ptr,  # [N] float32
    out_ptr,  # [R * N, HEAD_DIM]
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SINKS: tl.constexpr,  # N, or 0 for none
):
    """The mean of the splits of one row and head, weighted by their denominators; grid (R * N,)."""
    BLOCK_H: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    ALL: tl.constexpr = triton.next_power_of_2(SPLITS)
    at = tl.program_id(0).to(tl.int64) * SPLITS
    dims = tl.arange(0, BLOCK_H)
    splits = tl.arange(0, ALL)
    highest = tl.max(tl.load(logs_ptr + at + splits, mask=splits < SPLITS, other=_NO_SCORE), 0)
    total = tl.zeros([_COMBINED], tl.float32)
    summed = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, SPLITS, _COMBINED):
        split = start + tl.arange(0, _COMBINED)
        logs = tl.load(logs_ptr + at + split, mask=split < SPLITS, other=_NO_SCORE)
        weights = tl.where(split < SPLITS, tl.exp2(logs - highest), 0.0)
        mask = (split < SPLITS)[:, None] & (dims < HEAD_DIM)[None, :]
        parts = tl.load(parts_ptr + (at + split)[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0)
        total += weights
        summed += tl.sum(parts * weights[:, None], 0)
    out = out_ptr + tl.program_id(0).to(tl.int64) * HEAD_DIM + dims
    denominator = tl.sum(total, 0)
    if SINKS > 0:
        denominator = _with_sinks(denominator, highest, sinks_ptr, tl.program_id(0) % SINKS, True)
    tl.store(out, summed / denominator, mask=dims < HEAD_DIM)


@triton.jit
@no_type_check
def _prefill_place(lens_ptr, bounds_ptr, tile, ROWS: tl.constexpr, QUERIES: tl.constexpr):
    """The row of a tile of queries, and its first query in that row; an excess tile gets a query after all rows."""
    row = tl.arange(0, ROWS)
    is_prefill = (row >= tl.load(bounds_ptr)) & (row < tl.load(bounds_ptr + 1))
    tiles = tl.cdiv(tl.load(lens_ptr + row, mask=is_prefill, other=0), QUERIES)
    mine = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    first = (tile - tl.sum(tl.where(row < mine, tiles, 0), 0)) * QUERIES
    return tl.where(mine < ROWS, mine, 0), tl.where(mine < ROWS, first, 1 << 30)


@triton.jit
@no_type_check
def prefill_kernel(
    query_ptr,  # [T, N, H]
    keys_ptr,  # [P, K, p, H]
    values_ptr,  # [P, K, p, H]
    table_ptr,  # [R, M] int32
    context_lens_ptr,  # [R] int32
    starts_ptr,  # [R] int32
    lens_ptr,  # [R] int32
    bounds_ptr,  # [2] int32: first prefill row and the one after the last
    sinks_ptr,  # [N] float32
    table_width,  # M
    out_ptr,  # [T, N, H]
    SHAPE: tl.constexpr,
    SCORING: tl.constexpr,
    TILES: tl.constexpr,  # a power of two not less than R, query rows of a program, tokens of context read at a time
):
    """A tile of a row's queries, each with the query heads of one key/value head; grid (query tiles at most, K)."""
    GROUP: tl.constexpr = SHAPE[1]
    HEAD_DIM: tl.constexpr = SHAPE[3]
    BLOCK_M: tl.constexpr = TILES[1]
    TILE: tl.constexpr = TILES[2]
    BLOCK_H: tl.constexpr = triton.next_power_of_2(HEAD_DIM) if HEAD_DIM > 16 else 16
    row, first = _prefill_place(lens_ptr, bounds_ptr, tl.program_id(0), TILES[0], BLOCK_M // GROUP)
    kv_head = tl.program_id(1)
    length = tl.load(lens_ptr + row)
    if first < length:
        prefix = tl.load(context_lens_ptr + row) - length
        place = tl.arange(0, BLOCK_M)
        token = first + place // GROUP
        dims = tl.arange(0, BLOCK_H)
        is_query = (token < length) & (place // GROUP < BLOCK_M // GROUP)
        mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
        head = kv_head * GROUP + place % GROUP
        at = (tl.load(starts_ptr + row) + token).to(tl.int64) * (SHAPE[0] * GROUP) + head
        query = tl.load(query_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0)
        positions = prefix + tl.where(is_query, token, first)
        offset = kv_head * (SHAPE[2] * HEAD_DIM)
        pools = (keys_ptr + offset, values_ptr + offset)
        table = table_ptr + row.to(tl.int64) * table_width
        state = (
            tl.full([BLOCK_M], _NO_SCORE, tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.zeros([BLOCK_M, BLOCK_H], tl.float32),
        )
        stop = tl.max(positions, 0) // TILE + 1
        if SCORING[1] > 0:
            start = tl.maximum(prefix + first - SCORING[1] + 1, 0) // TILE
        else:
            start = (prefix + first + 1) // TILE  # tiles before it are seen by all queries
            state = _walk(state, query, positions, pools, table, 0, start, SHAPE, SCORING, TILE, False)
        maximum, total, summed = _walk(state, query, positions, pools, table, start, stop, SHAPE, SCORING, TILE, True)
        if SCORING[3]:
            total = _with_sinks(total, maximum, sinks_ptr, head, is_query)
        tl.store(out_ptr + at[:, None] * HEAD_DIM + dims[None, :], summed / total[:, None], mask=mask)
