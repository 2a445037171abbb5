// Paged attention of a tile of query tokens over keys and values in bfloat16, on the tiles of AMX; see attention.c.
//
// Query rows and the weights of a softmax are rounded to bfloat16; sums, maxima and the softmax are in float32. A block's
// keys and values are laid out in pairs for the tiles, of features and of tokens. The processor computes every row by
// itself, so that a query's result depends on its own context only.
#include "attention_rows.h"

enum { ROWS = 16, ROW_BLOCKS = 4, DEPTH = 32, TILE_BYTES = 1024, STEPS = BLOCK / DEPTH };

static int tile_tokens(int group) { return group >= ROW_BLOCKS * ROWS ? 1 : ROW_BLOCKS * ROWS / group; }

// Tiles 0 to 3 are sums and tile 4 holds query rows, of which there may be fewer than 16; 5 holds keys or values.
static void configure(int rows) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } tiles = {.palette = 1};
  for (int i = 0; i < 6; i++) {
    tiles.bytes[i] = 64;
    tiles.rows[i] = (uint8_t)(i < 5 ? rows : DEPTH / 2);
  }
  _tile_loadconfig(&tiles);
}

INLINE __m512i pair(__m256i first, __m256i second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}
INLINE __m256i load_16(const char *from, int64_t i) { return _mm256_loadu_si256((const __m256i *)(from + 2 * i)); }

// Keys as [width / 2][BLOCK] pairs of features.
static void pair_keys(const char *const *keys, int groups, int width, int page_size, uint32_t *to) {
  for (int h = 0; h < width; h += 2)
    for (int g = 0; g < groups; g++) {
      const __m256i first = load_16(keys[g], (int64_t)h * page_size);
      _mm512_storeu_si512(to + h / 2 * BLOCK + g * LANES, pair(first, load_16(keys[g], (int64_t)(h + 1) * page_size)));
    }
}

// Values as [DEPTH / 2 * steps][width] pairs of tokens; tokens from `count` on are zeros.
static void pair_values(const char *const *values, int count, int steps, int width, uint32_t *to) {
  const __m256i zero = _mm256_setzero_si256();
  for (int t = 0; t < steps * DEPTH; t += 2)
    for (int h = 0; h < width; h += LANES) {
      const char *from = values[t < count ? t / LANES : 0];
      const int64_t at = (int64_t)(t % LANES) * width + h;
      const __m256i first = t < count ? load_16(from, at) : zero, second = t + 1 < count ? load_16(from, at + width) : zero;
      _mm512_storeu_si512(to + t / 2 * width + h, pair(first, second));
    }
}

static void round_row(const float *from, int count, float scale, char *tiles, int row) {
  for (int k = 0; k < count; k += DEPTH) {
    const Vec low = vec_mul(vec_load(from + k), vec_set(scale)), high = vec_mul(vec_load(from + k + LANES), vec_set(scale));
    _mm512_storeu_si512(tiles + k / DEPTH * TILE_BYTES + row * 64, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

// The index of a tile is a part of an instruction.
#define EACH_TILE(do_one) do_one(0) do_one(1) do_one(2) do_one(3)
#define ZERO_TILE(i) if (i < some) _tile_zero(i);
#define LOAD_TILE(i) if (i < some) _tile_loadd(i, sums + i * LANES, stride * 4);
#define ADD_TILE(i)                               \
  if (i < some) {                                 \
    _tile_loadd(5, from + i * 64, from_stride);   \
    _tile_dpbf16ps(i, 4, 5);                      \
  }
#define STORE_TILE(i) if (i < some) _tile_stored(i, sums + i * LANES, stride * 4);

// Adds products of rows, in `steps` tiles, with columns that lie in pairs, [16 * steps][num_columns], to sums, or puts them
// there.
INLINE void multiply(const char *rows, int steps, const uint32_t *pairs, int num_columns, int used, float *sums,
                     int64_t stride, int is_new) {
  for (int column = 0; column < used; column += 4 * LANES, sums += 4 * LANES) {
    const int some = (used - column + LANES - 1) / LANES;
    const int64_t from_stride = (int64_t)num_columns * 4;
    if (is_new) {
      EACH_TILE(ZERO_TILE)
    } else {
      EACH_TILE(LOAD_TILE)
    }
    for (int k = 0; k < steps; k++) {
      const char *from = (const char *)(pairs + (int64_t)k * (DEPTH / 2) * num_columns + column);
      _tile_loadd(4, rows + k * TILE_BYTES, 64);
      EACH_TILE(ADD_TILE)
    }
    EACH_TILE(STORE_TILE)
  }
}

static void attend(const Attention *a, Tile tile, int chunk, int done, Partial out) {
  const int group = a->num_heads / a->num_kv_heads, width = a->width, rows = tile.count * group;
  const int prefix = context_before(a, tile), end = context_end(a, tile, chunk);
  if (!done) clear_partial(out, rows, width);
  char query[ROW_BLOCKS][MOST_WIDTH / DEPTH * TILE_BYTES], weights[STEPS * TILE_BYTES];
  uint32_t keys_in_pairs[MOST_WIDTH / 2 * BLOCK], values_in_pairs[BLOCK / 2 * MOST_WIDTH];
  float scores[ROWS * BLOCK];
  for (int r = 0; r < rows; r++) round_row(query_row(a, tile, r), width, a->scale, query[r / ROWS], r % ROWS);
  int configured = 0;
  for (int at = context_begin(a, tile, chunk, done); at < end; at += BLOCK) {
    const char *keys[GROUPS], *values[GROUPS];
    const int count = end - at < BLOCK ? end - at : BLOCK, groups = locate(a, tile, at, count, keys, values);
    const int steps = (count + DEPTH - 1) / DEPTH;
    pair_keys(keys, groups, width, a->page_size, keys_in_pairs);
    pair_values(values, count, steps, width, values_in_pairs);
    for (int r0 = 0; r0 < rows; r0 += ROWS) {
      const int some = rows - r0 < ROWS ? rows - r0 : ROWS;
      if (sees_nothing(a, tile, prefix, r0, some, at, count)) continue;
      if (some != configured) configure(some);
      configured = some;
      multiply(query[r0 / ROWS], width / DEPTH, keys_in_pairs, BLOCK, groups * LANES, scores, BLOCK, 1);
      if (groups % 2)
        for (int r = 0; r < some; r++) vec_store(scores + r * BLOCK + groups * LANES, vec_zero());
      weigh_rows(a, tile, prefix, r0, some, at, count, groups * LANES, scores, out);
      for (int r = 0; r < some; r++) round_row(scores + r * BLOCK, steps * DEPTH, 1, weights, r);
      multiply(weights, steps, values_in_pairs, width, width, out.values + (int64_t)r0 * width, width, 0);
    }
  }
  if (configured) _tile_release();
}

const Kernels amx_kernels = {"amx", LANES, tile_tokens, padded_width, attend, merge, finish};
