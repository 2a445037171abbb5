// Products of rows with panels of a packed weight in bfloat16, on the tiles of AMX: 16 rows by 32 features by 16 outputs.
//
// Rows are rounded to bfloat16. The processor adds up the two products of a pair of features and then the pairs in order,
// for every row by itself, so that a row's result does not depend on how many rows a tile has.
#include "linear.h"

#include "linear_rows.h"

enum { ROWS = 16, DEPTH = 32, TILE_BYTES = 1024, PREFETCH = 8192 };

static int64_t block_rows(const Linear *l, int64_t block) {
  const int64_t left = l->num_rows - block * ROWS;
  return left < ROWS ? left : ROWS;
}

static int64_t block_bytes(const Linear *l) { return (int64_t)sizeof(uint16_t) * ROWS * l->padded_in; }

// Prepared blocks are tiles, [padded_in / 32][16 rows][32].
static void prepare(const Linear *l, int64_t block, float *scratch) {
  char *to = l->rows + block * block_bytes(l);
  for (int64_t r = 0; r < block_rows(l, block); r++) {
    prepare_row(l, block * ROWS + r, scratch);
    for (int64_t k = 0; k < l->padded_in; k += DEPTH) {
      const __m512bh pairs = _mm512_cvtne2ps_pbh(vec_load(scratch + k + LANES), vec_load(scratch + k));
      _mm512_storeu_si512(to + k / DEPTH * TILE_BYTES + r * 64, (__m512i)pairs);
    }
  }
}

// Tiles 0 and 1: sums of the first rows, 2 and 3: of the second; 4 and 5: rows; 6 and 7: outputs of the panel.
static void configure(int first_rows, int second_rows) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } tiles = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    tiles.bytes[i] = 64;
    tiles.rows[i] = 16;
  }
  tiles.rows[0] = tiles.rows[1] = tiles.rows[4] = (uint8_t)first_rows;
  tiles.rows[2] = tiles.rows[3] = tiles.rows[5] = (uint8_t)second_rows;
  _tile_loadconfig(&tiles);
}

static void finish_tile(const Linear *l, const float *sums, int64_t row, int64_t rows, int64_t out) {
  for (int64_t r = 0; r < rows; r++) finish_sums(l, row + r, out, vec_load(sums + r * LANES));
}

INLINE void multiply_one(const Linear *l, const char *weight, int64_t block, int64_t out) {
  const char *rows = l->rows + block * block_bytes(l);
  const int64_t steps = l->padded_in / DEPTH;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t i = 0; i < steps; i++, weight += 2 * TILE_BYTES) {
    for (int line = 0; line < 2 * TILE_BYTES; line += 64) __builtin_prefetch(weight + PREFETCH + line);
    _tile_loadd(4, rows + i * TILE_BYTES, 64);
    _tile_loadd(6, weight, STEP_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weight + 64, STEP_BYTES);
    _tile_dpbf16ps(1, 4, 7);
  }
  float sums[2][TILE_BYTES / 4] __attribute__((aligned(64)));
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  for (int j = 0; j < 2; j++) finish_tile(l, sums[j], block * ROWS, block_rows(l, block), out + j * LANES);
}

INLINE void multiply_two(const Linear *l, const char *weight, int64_t block, int64_t out) {
  const char *first = l->rows + block * block_bytes(l), *second = first + block_bytes(l);
  const int64_t steps = l->padded_in / DEPTH;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < steps; i++, weight += 2 * TILE_BYTES) {
    _tile_loadd(6, weight, STEP_BYTES);
    _tile_loadd(4, first + i * TILE_BYTES, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weight + 64, STEP_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, second + i * TILE_BYTES, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  float sums[4][TILE_BYTES / 4] __attribute__((aligned(64)));
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  for (int j = 0; j < 4; j++)
    finish_tile(l, sums[j], (block + j / 2) * ROWS, block_rows(l, block + j / 2), out + j % 2 * LANES);
}

static void multiply(const Linear *l, int64_t panel, int64_t first_block, int64_t last_block, float *scratch) {
  (void)scratch;
  const char *weight = l->weight + panel * l->padded_in * (STEP_BYTES / 2);
  for (int64_t block = first_block; block < last_block; block += 2) {
    const int is_pair = block + 1 < last_block;
    if (block == first_block || block + 2 >= last_block)
      configure((int)block_rows(l, block), is_pair ? (int)block_rows(l, block + 1) : ROWS);
    if (is_pair) multiply_two(l, weight, block, panel * PANEL);
    else multiply_one(l, weight, block, panel * PANEL);
  }
  _tile_release();
}

const LinearKernels amx_linear = {ROWS, block_bytes, prepare, multiply};
