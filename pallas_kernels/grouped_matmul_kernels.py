"""The Triton kernel of ``grouped_matmul_triton``. Imports triton: import it only through ``jax_triton.kernels``."""

from typing import no_type_check

import triton
import triton.language as tl

_NEIGHBOURS = tl.constexpr(8)  # row tiles whose programs run together, so that they share columns in the cache


@triton.jit
@no_type_check
def _place(sizes_ptr, tile, num_rows, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert, first row and end of the expert's rows of a row tile.

    Tiles after those of all experts own the remaining rows, like one more expert; excess tiles own no row.
    """
    SLOTS: tl.constexpr = triton.next_power_of_2(EXPERTS + 1)
    expert = tl.arange(0, SLOTS)
    sizes = tl.load(sizes_ptr + expert, mask=expert < EXPERTS, other=0)
    sizes = tl.where(expert == EXPERTS, num_rows - tl.sum(sizes, 0), sizes)
    tiles = (sizes + BLOCK_M - 1) // BLOCK_M
    mine = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    first_tile = tl.sum(tl.where(expert < mine, tiles, 0), 0)
    first_row = tl.sum(tl.where(expert < mine, sizes, 0), 0)
    end = tl.sum(tl.where(expert <= mine, sizes, 0), 0)
    return mine, first_row + (tile - first_tile) * BLOCK_M, end


@triton.jit
@no_type_check
def grouped_matmul_kernel(
    lhs_ptr,  # [T, DEPTH]
    rhs_ptr,  # [EXPERTS, WIDTH, DEPTH]; gated, twice as many rows
    sizes_ptr,  # [EXPERTS] int32
    num_rows,  # T
    out_ptr,  # [T, WIDTH]
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of the result: rows of one expert by some columns; grid (row tiles at most * column tiles,)."""
    COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    row_tiles = tl.num_programs(0) // COLUMN_TILES
    band, place = tl.program_id(0) // (_NEIGHBOURS * COLUMN_TILES), tl.program_id(0) % (_NEIGHBOURS * COLUMN_TILES)
    in_band = tl.minimum(row_tiles - band * _NEIGHBOURS, _NEIGHBOURS)
    expert, first, end = _place(sizes_ptr, band * _NEIGHBOURS + place % in_band, num_rows, EXPERTS, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_M)
    columns = (place // in_band) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    is_row = (rows < end)[:, None]
    is_column = ((columns < WIDTH) | (WIDTH % BLOCK_N == 0))[:, None]
    lhs_rows = lhs_ptr + rows.to(tl.int64)[:, None] * DEPTH
    rhs_row = expert.to(tl.int64) * (WIDTH * (2 if GATED else 1)) + columns
    rhs_rows = rhs_ptr + rhs_row[:, None] * DEPTH
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, tl.where((expert < EXPERTS) & (first < end), DEPTH, 0), BLOCK_K):
        features = (start + depth)[None, :]
        is_feature = (features < DEPTH) | (DEPTH % BLOCK_K == 0)
        lhs = tl.load(lhs_rows + features, mask=is_row & is_feature, other=0)
        rhs = tl.load(rhs_rows + features, mask=is_column & is_feature, other=0)
        product = tl.dot(lhs, tl.trans(rhs), product, input_precision="ieee")
        if GATED:
            rhs = tl.load(rhs_rows + WIDTH * DEPTH + features, mask=is_column & is_feature, other=0)
            up = tl.dot(lhs, tl.trans(rhs), up, input_precision="ieee")
    if GATED:
        product = product / (1 + tl.exp(-product)) * up
    out = out_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(out, product, mask=is_row & ((columns < WIDTH) | (WIDTH % BLOCK_N == 0))[None, :])
