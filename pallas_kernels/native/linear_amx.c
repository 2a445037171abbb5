// Products of rows with panels of a packed weight in bfloat16, on the tiles of AMX: 16 rows by 32 features by 16 outputs.
//
// Rows are rounded to bfloat16. The processor adds up the two products of a pair of features and then the pairs in order,
// for every row by itself, so that a row's result does not depend on how many rows a tile has.
#include "amx.h"
#include "linear.h"
#include "linear_rows.h"

enum { ROWS = TILE_ROWS, DEPTH = TILE_DEPTH, PREFETCH = 4096, FEW_BLOCKS = 4 };

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

// Tile 6 holds rows, of which there may be fewer than 16, tile 7 a weight; 0 to 5 are sums, and for two blocks of rows
// tiles 4 and 5 belong to the second, as 2 and 3 do.
static void configure(int first_rows, int second_rows) {
  const uint8_t first = (uint8_t)first_rows, second = (uint8_t)second_rows;
  configure_tiles((uint8_t[8]){first, first, second, second, second, second, first, DEPTH / 2});
}

// The sums of a panel: a tile of its first 16 outputs and one of the others.
static void finish_panel(const Linear *l, const float *left, const float *right, int64_t block, int64_t panel) {
  const int64_t rows = block_rows(l, block), out = panel * l->panel_outs;
  for (int64_t r = 0; r < rows; r++) {
    const Vec first = vec_load(left + r * LANES), second = vec_load(right + r * LANES);
    if (l->activation) {
      finish_gated(l, block * ROWS + r, out, first, second);
    } else {
      finish_sums(l, block * ROWS + r, out, first);
      finish_sums(l, block * ROWS + r, out + LANES, second);
    }
  }
}

INLINE void prefetch(const char *weight) {
  for (int line = 0; line < 2 * TILE_BYTES; line += 64) __builtin_prefetch(weight + PREFETCH + line);
}

// The indices of tiles are parts of instructions.
#define ADD_PANEL(panel, left, right)                     \
  if (panels > panel) {                                   \
    const char *at = weight + panel * panel_bytes;        \
    if (is_first) prefetch(at);                           \
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

// One block of rows. The first that panels meet waits for them: read side by side they come faster than one after the
// other.
INLINE void multiply_one(const int panels, const Linear *l, const char *weight, int64_t block, int64_t panel, int is_first) {
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
  for (int j = 0; j < panels; j++) finish_panel(l, sums[2 * j], sums[2 * j + 1], block, panel + j);
}

// Two blocks of rows; the first two that a panel meets wait for it.
INLINE void multiply_two(const Linear *l, const char *weight, int64_t block, int64_t panel, int is_first) {
  const char *first = l->rows + block * block_bytes(l), *second = first + block_bytes(l);
  const int64_t steps = l->padded_in / DEPTH;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < steps; i++, weight += 2 * TILE_BYTES) {
    if (is_first) prefetch(weight);
    _tile_loadd(6, first + i * TILE_BYTES, 64);
    _tile_loadd(4, second + i * TILE_BYTES, 64);
    _tile_loadd(7, weight, STEP_BYTES);
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(7, weight + 64, STEP_BYTES);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(3, 4, 7);
  }
  float sums[4][TILE_BYTES / 4] __attribute__((aligned(64)));
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  for (int j = 0; j < 2; j++) finish_panel(l, sums[2 * j], sums[2 * j + 1], block + j, panel);
}

static void multiply_few(const Linear *l, int64_t panel, int64_t last_panel, int64_t first_block, int64_t last_block) {
  const int64_t panel_bytes = l->padded_in * (STEP_BYTES / 2);
  const int last_rows = (int)block_rows(l, last_block - 1), is_even = last_rows == ROWS || last_block - first_block == 1;
  configure(is_even ? last_rows : ROWS, is_even ? last_rows : ROWS);
  while (panel < last_panel) {
    const int panels = panel + PANELS_AT_ONCE <= last_panel ? PANELS_AT_ONCE : 1;
    const char *weight = l->weight + panel * panel_bytes;
    for (int64_t block = first_block; block < last_block; block++) {
      const int is_short = !is_even && block == last_block - 1;
      if (is_short) configure(last_rows, last_rows);
      if (panels == PANELS_AT_ONCE) multiply_one(PANELS_AT_ONCE, l, weight, block, panel, block == first_block);
      else multiply_one(1, l, weight, block, panel, block == first_block);
      if (is_short) configure(ROWS, ROWS);
    }
    panel += panels;
  }
}

static void multiply(const Linear *l, int64_t panel, int64_t last_panel, int64_t first_block, int64_t last_block,
                     float *scratch) {
  (void)scratch;
  const int64_t blocks = last_block - first_block, last_pair = blocks <= FEW_BLOCKS ? first_block : first_block + blocks / 2 * 2;
  if (last_pair > first_block) configure(ROWS, ROWS);
  for (int64_t i = panel; i < last_panel && last_pair > first_block; i++)
    for (int64_t block = first_block; block < last_pair; block += 2) {
      const int last_rows = (int)block_rows(l, block + 1);
      if (last_rows < ROWS) configure(ROWS, last_rows);
      multiply_two(l, l->weight + i * l->padded_in * (STEP_BYTES / 2), block, i, block == first_block);
      if (last_rows < ROWS) configure(ROWS, ROWS);
    }
  if (last_pair < last_block) multiply_few(l, panel, last_panel, last_pair, last_block);
  _tile_release();
}

const LinearKernels amx_linear = {ROWS, block_bytes, prepare, multiply};
