// Paged attention of a tile of query tokens; compiled once for AVX-512 and once for AVX2.
//
// Scores have context tokens as lanes (keys are stored transposed inside a page), values have the head's width. A softmax
// is an online one (arXiv:1805.02867) over blocks of 128 tokens that begin at multiples of 128, and over chunks of 1024
// that are merged in order: a query's result depends on its own context only, neither on what else is in its tile nor on
// which thread computed which chunk.
#include "attention.h"

#include "attention_rows.h"
#ifdef __AVX512F__
enum { ROWS = 12, VALUE_ROWS = 6, VALUE_VECTORS = 4, TILE_BLOCKS = 4 };
#else
enum { ROWS = 4, VALUE_ROWS = 4, VALUE_VECTORS = 2, TILE_BLOCKS = 4 };
#endif
INLINE Vec load_pool(const char *pool, int64_t i, int is_bf16) {
  return is_bf16 ? vec_load_bf16((const uint16_t *)pool + i) : vec_load((const float *)pool + i);
}
INLINE Vec load_pool_some(Mask mask, const char *pool, int64_t i, int is_bf16) {
  return is_bf16 ? vec_load_some_bf16(mask, (const uint16_t *)pool + i) : vec_load_some(mask, (const float *)pool + i);
}

// Products of query rows, [width][rows], with some groups of LANES context tokens: scores [row][BLOCK].
INLINE void multiply_keys(const int rows, const int groups, int is_bf16, const float *query, const char *const *keys,
                          int width, int page_size, float *scores) {
  Vec sums[ROWS][4];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) sums[r][g] = vec_zero();
  for (int h = 0; h < width; h++) {
    Vec key[4];
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) key[g] = load_pool(keys[g], (int64_t)h * page_size, is_bf16);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
      Vec factor = vec_set(query[h * rows + r]);
#pragma GCC unroll 4
      for (int g = 0; g < groups; g++) sums[r][g] = vec_fma(factor, key[g], sums[r][g]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) vec_store(scores + r * BLOCK + g * LANES, sums[r][g]);
}

// Adds the weighted values of count tokens to rows of sums, for the vectors of the head's width from `start` on.
INLINE void add_values(const int rows, const int vectors, Mask last, int is_partial, int is_bf16, const float *weights,
                       const char *const *values, int count, int width, int start, float *sums, int padded) {
  Vec sum[VALUE_ROWS][VALUE_VECTORS];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) sum[r][j] = vec_load(sums + (int64_t)r * padded + start + j * LANES);
  for (int t = 0; t < count; t++) {
    const char *from = values[t / LANES];
    int64_t at = (int64_t)(t % LANES) * width + start;
    Vec value[VALUE_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++)
      value[j] = is_partial && j == vectors - 1 ? load_pool_some(last, from, at + j * LANES, is_bf16)
                                                : load_pool(from, at + j * LANES, is_bf16);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      Vec weight = vec_set(weights[r * BLOCK + t]);
#pragma GCC unroll 4
      for (int j = 0; j < vectors; j++) sum[r][j] = vec_fma(weight, value[j], sum[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) vec_store(sums + (int64_t)r * padded + start + j * LANES, sum[r][j]);
}

// Register tiles are compiled for each number of rows, by dtype.
#define KEY_ROWS(n, at_once)                                                                       \
  case n:                                                                                          \
    for (; g + at_once <= groups; g += at_once)                                                    \
      multiply_keys(n, at_once, is_bf16, query, keys + g, width, page_size, scores + g * LANES);   \
    for (; g < groups; g++) multiply_keys(n, 1, is_bf16, query, keys + g, width, page_size, scores + g * LANES); \
    break;
INLINE void multiply_all_keys(int rows, int is_bf16, const float *query, const char *const *keys, int groups, int width,
                              int page_size, float *scores) {
  int g = 0;
  switch (rows) {
#ifdef __AVX512F__
    KEY_ROWS(1, 4) KEY_ROWS(2, 4) KEY_ROWS(3, 4) KEY_ROWS(4, 4) KEY_ROWS(5, 2) KEY_ROWS(6, 2)
    KEY_ROWS(7, 2) KEY_ROWS(8, 2) KEY_ROWS(9, 2) KEY_ROWS(10, 2) KEY_ROWS(11, 2) KEY_ROWS(12, 2)
#else
    KEY_ROWS(1, 4) KEY_ROWS(2, 4) KEY_ROWS(3, 2) KEY_ROWS(4, 2)
#endif
  }
}
static void multiply_keys_f32(int rows, const float *query, const char *const *keys, int groups, int width,
                              int page_size, float *scores) {
  multiply_all_keys(rows, 0, query, keys, groups, width, page_size, scores);
}
static void multiply_keys_bf16(int rows, const float *query, const char *const *keys, int groups, int width,
                               int page_size, float *scores) {
  multiply_all_keys(rows, 1, query, keys, groups, width, page_size, scores);
}

INLINE void add_values_of_rows(const int rows, int is_bf16, const float *weights, const char *const *values, int count,
                               int width, float *sums, int padded) {
  const Mask none = vec_lanes(0, LANES);
  int start = 0;
  for (; start + VALUE_VECTORS * LANES <= width; start += VALUE_VECTORS * LANES)
    add_values(rows, VALUE_VECTORS, none, 0, is_bf16, weights, values, count, width, start, sums, padded);
  for (; start + LANES <= width; start += LANES)
    add_values(rows, 1, none, 0, is_bf16, weights, values, count, width, start, sums, padded);
  if (start < width)
    add_values(rows, 1, vec_lanes(0, width - start), 1, is_bf16, weights, values, count, width, start, sums, padded);
}
#define VALUE_CASE(n) \
  case n: add_values_of_rows(n, is_bf16, weights, values, count, width, sums, padded); break;
INLINE void add_all_values(int rows, int is_bf16, const float *weights, const char *const *values, int count, int width,
                           float *sums, int padded) {
  for (; rows > 0; rows -= VALUE_ROWS, weights += VALUE_ROWS * BLOCK, sums += VALUE_ROWS * padded)
    switch (rows < VALUE_ROWS ? rows : VALUE_ROWS) {
      VALUE_CASE(1) VALUE_CASE(2) VALUE_CASE(3) VALUE_CASE(4)
#ifdef __AVX512F__
      VALUE_CASE(5) VALUE_CASE(6)
#endif
    }
}
static void add_values_f32(int rows, const float *weights, const char *const *values, int count, int width, float *sums,
                           int padded) {
  add_all_values(rows, 0, weights, values, count, width, sums, padded);
}
static void add_values_bf16(int rows, const float *weights, const char *const *values, int count, int width, float *sums,
                            int padded) {
  add_all_values(rows, 1, weights, values, count, width, sums, padded);
}

static int tile_tokens(int group) { return group >= ROWS ? 1 : TILE_BLOCKS * (ROWS / group); }
static void attend(const Attention *a, Tile tile, int chunk, int done, Partial out) {
  const int group = a->num_heads / a->num_kv_heads, width = a->width, page_size = a->page_size;
  const int padded = padded_width(width), rows = tile.count * group;
  const int prefix = context_before(a, tile), end = context_end(a, tile, chunk);
  if (!done) clear_partial(out, rows, padded);
  float query[TILE_BLOCKS * ROWS * MOST_WIDTH > MOST_WIDTH * 64 ? TILE_BLOCKS * ROWS * MOST_WIDTH : MOST_WIDTH * 64];
  float scores[ROWS * BLOCK];
  // Query rows are packed [width][rows of a register tile], scaled.
  for (int r0 = 0; r0 < rows; r0 += ROWS) {
    const int some = rows - r0 < ROWS ? rows - r0 : ROWS;
    for (int r = 0; r < some; r++) {
      const float *from = query_row(a, tile, r0 + r);
      for (int h = 0; h < width; h++) query[r0 * width + h * some + r] = from[h] * a->scale;
    }
  }
  for (int at = context_begin(a, tile, chunk, done); at < end; at += BLOCK) {
    const char *keys[GROUPS], *values[GROUPS];
    const int count = end - at < BLOCK ? end - at : BLOCK, groups = locate(a, tile, at, count, keys, values);
    for (int r0 = 0; r0 < rows; r0 += ROWS) {
      const int some = rows - r0 < ROWS ? rows - r0 : ROWS;
      if (sees_nothing(a, tile, prefix, r0, some, at, count)) continue;
      (a->is_bf16 ? multiply_keys_bf16 : multiply_keys_f32)(some, query + r0 * width, keys, groups, width, page_size, scores);
      weigh_rows(a, tile, prefix, r0, some, at, count, groups * LANES, scores, out);
      (a->is_bf16 ? add_values_bf16 : add_values_f32)(some, scores, values, count, width, out.values + (int64_t)r0 * padded,
                                                      padded);
    }
  }
}

#ifdef __AVX512F__
const Kernels avx512_kernels = {"avx512", LANES, tile_tokens, padded_width, attend, merge, finish};
#else
const Kernels avx2_kernels = {"avx2", LANES, tile_tokens, padded_width, attend, merge, finish};
#endif
