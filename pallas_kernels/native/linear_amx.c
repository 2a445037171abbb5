// Multiplies rows by panels of a packed weight in bfloat16, on the tiles of AMX: 16 rows by 32 features by 16 outputs.
//
// Rows are rounded to bfloat16. The processor adds up the two products of a pair of features and then the pairs in order,
// for every row by itself, so that a row's result does not depend on how many rows a tile has.
#include "amx.h"
#include "linear.h"
#include "linear_rows.h"

enum { ROWS = TILE_ROWS, DEPTH = TILE_DEPTH, PREFETCH = 2048 };

static int64_t block_rows(const Linear *l, int64_t block) {
  const int64_t left = l->num_rows - block * ROWS;
  return left < ROWS ? left : ROWS;
}

static int64_t block_bytes(const Linear *l) { return (int64_t)sizeof(uint16_t) * ROWS * l->padded_in; }

// Prepared blocks are tiles, [padded_in / 32][16 rows][32].
static void prepare(const Linear *l, int64_t block, float *scratch) {
  (void)scratch;
  char *to = l->rows + block * block_bytes(l);
  for (int64_t r = 0; r < block_rows(l, block); r++) {
    const float *x = l->x + (block * ROWS + r) * l->num_in;
    const Vec factor = norm_factor(l, x);
    for (int64_t k = 0; k < l->padded_in; k += DEPTH) {
      const __m512bh pairs = _mm512_cvtne2ps_pbh(load_prepared(l, x, k + LANES, factor), load_prepared(l, x, k, factor));
      _mm512_storeu_si512(to + k / DEPTH * TILE_BYTES + r * 64, (__m512i)pairs);
    }
  }
}

// Tile 6 holds rows, of which there may be fewer than 16, tile 7 a weight; 0 to 5 are sums, and for two blocks of rows
// tiles 4 and 5 belong to the second, as 2 and 3 do.
static void configure(int first_rows, int second_rows) {
  const uint8_t first = (uint8_t)first_rows, second = (uint8_t)second_rows;
  configure_tiles((uint8_t[8]){first, first, second, second, second, second, first, DEPTH / 2});
}

// Products of one or two blocks of rows with a panel: for each block a tile of the panel's first 16 outputs and one of the
// others.
typedef struct {
  const float (*tiles)[TILE_BYTES / 4];
  int64_t row, rows, out;
} Sums;

// Finishes some rows of them.
INLINE void finish_rows(const Linear *l, Sums sums, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; r++) {
    const float *left = sums.tiles[r / ROWS * 2] + r % ROWS * LANES, *right = left + TILE_BYTES / 4;
    if (l->activation) {
      finish_gated(l, sums.row + r, sums.out, vec_load(left), vec_load(right));
    } else {
      finish_sums(l, sums.row + r, sums.out, vec_load(left));
      finish_sums(l, sums.row + r, sums.out + LANES, vec_load(right));
    }
  }
}

INLINE void prefetch(const char *weight) {
  for (int line = 0; line < 2 * TILE_BYTES; line += 64) __builtin_prefetch(weight + PREFETCH + line, 0, 2);
}

// The indices of tiles are parts of instructions.
#define ADD_PANEL(panel, left, right)                     \
  if (panels > panel) {                                   \
    const char *at = weight + panel * panel_bytes;        \
    if (waits) prefetch(at);                              \
    _tile_loadd(7, at, STEP_BYTES);                       \
    _tile_dpbf16ps(left, 6, 7);                           \
    _tile_loadd(7, at + 64, STEP_BYTES);                  \
    _tile_dpbf16ps(right, 6, 7);                          \
  }
#define STORE_PANEL(panel, left, right)                   \
  if (panels > panel) {                                   \
    _tile_stored(left, sums[left], 64);                   \
    _tile_stored(right, sums[right], 64);                 \
  }

// One block of rows. Where it waits for the panels, they come faster if they are read side by side.
INLINE void multiply_one(const int panels, const Linear *l, const char *weight, int64_t block, int64_t panel, int waits) {
  const char *rows = l->rows + block * block_bytes(l);
  const int64_t steps = l->padded_in / DEPTH, panel_bytes = l->padded_in * (STEP_BYTES / 2);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t i = 0; i < steps; i++, weight += 2 * TILE_BYTES) {
    _tile_loadd(6, rows + i * TILE_BYTES, 64);
    ADD_PANEL(0, 0, 1)
    ADD_PANEL(1, 2, 3)
    ADD_PANEL(2, 4, 5)
  }
  float sums[2 * PANELS_AT_ONCE][TILE_BYTES / 4] __attribute__((aligned(64)));
  STORE_PANEL(0, 0, 1)
  STORE_PANEL(1, 2, 3)
  STORE_PANEL(2, 4, 5)
  for (int64_t j = 0, rows_used = block_rows(l, block); j < panels; j++)
    finish_rows(l, (Sums){sums + 2 * j, block * ROWS, rows_used, (panel + j) * l->panel_outs}, 0, rows_used);
}

// Two blocks of rows. While tiles are multiplied the rows of the sums before are finished.
INLINE void multiply_two(const Linear *l, const char *weight, int64_t block, int waits, Sums before,
                         float sums[4][TILE_BYTES / 4]) {
  const char *first = l->rows + block * block_bytes(l), *second = first + block_bytes(l);
  const int64_t steps = l->padded_in / DEPTH;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0, done = 0; i < steps; i++, weight += 2 * TILE_BYTES) {
    if (waits) prefetch(weight);
    _tile_loadd(6, first + i * TILE_BYTES, 64);
    _tile_loadd(4, second + i * TILE_BYTES, 64);
    _tile_loadd(7, weight, STEP_BYTES);
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(7, weight + 64, STEP_BYTES);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(3, 4, 7);
    const int64_t until = before.rows * (i + 1) / steps;
    finish_rows(l, before, done, until);
    done = until;
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

// Blocks two by two, of which all but the last one have 16 rows.
static void multiply_pairs(const Linear *l, int64_t panel, int64_t last_panel, int64_t first_block, int64_t last_block) {
  float sums[2][4][TILE_BYTES / 4] __attribute__((aligned(64)));
  Sums before = {0};
  int which = 0;
  configure(ROWS, ROWS);
  for (; panel < last_panel; panel++)
    for (int64_t block = first_block; block < last_block; block += 2, which ^= 1) {
      const int64_t last_rows = block_rows(l, block + 1);
      if (last_rows < ROWS) configure(ROWS, (int)last_rows);
      multiply_two(l, l->weight + panel * l->padded_in * (STEP_BYTES / 2), block, block == first_block, before, sums[which]);
      if (last_rows < ROWS) configure(ROWS, ROWS);
      before = (Sums){sums[which], block * ROWS, ROWS + last_rows, panel * l->panel_outs};
    }
  finish_rows(l, before, 0, before.rows);
}

// The first blocks that meet a panel wait for it.
static void multiply(const Linear *l, int64_t panel, int64_t last_panel, int64_t first_block, int64_t last_block,
                     float *scratch) {
  (void)scratch;
  const int64_t blocks = last_block - first_block, last_pair = first_block + blocks / 2 * 2;
  if (last_pair > first_block) multiply_pairs(l, panel, last_panel, first_block, last_pair);
  if (last_pair < last_block) {
    const int rows = (int)block_rows(l, last_pair);
    configure(rows, rows);
    for (int panels; panel < last_panel; panel += panels) {
      const char *weight = l->weight + panel * l->padded_in * (STEP_BYTES / 2);
      panels = panel + PANELS_AT_ONCE <= last_panel ? PANELS_AT_ONCE : 1;
      if (panels == PANELS_AT_ONCE) multiply_one(PANELS_AT_ONCE, l, weight, last_pair, panel, blocks == 1);
      else multiply_one(1, l, weight, last_pair, panel, blocks == 1);
    }
  }
  _tile_release();
}

const LinearKernels amx_linear = {ROWS, block_bytes, prepare, multiply};
