// Paged attention of a tile of query tokens; compiled once for AVX-512 and once for AVX2.
//
// Scores have context tokens as lanes (keys are stored transposed, see pages.h), values have the head's width. A softmax
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

// Products of query rows, [width][rows], with some groups of LANES context tokens: scores [row][BLOCK]. The keys of a
// feature, or of a pair of features in bfloat16, are `stride` bytes after those of the one before.
INLINE void multiply_keys(const int rows, const int groups, int is_bf16, const float *query, const char *const *keys,
                          int width, int stride, float *scores, Ahead *ahead) {
  const int features = is_bf16 ? 2 : 1;
  Vec sums[ROWS][4];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) sums[r][g] = vec_zero();
  for (int64_t h = 0; h < width; h += features) {
    Vec key[2][4];
    ask(ahead, ASKED_BYTES);
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
      key[0][g] = vec_load((const float *)(keys[g] + h / features * stride));
      if (is_bf16) vec_split_bf16(&key[0][g], &key[1][g]);
    }
#pragma GCC unroll 2
    for (int j = 0; j < features; j++)
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++) {
        Vec factor = vec_set(query[(h + j) * rows + r]);
#pragma GCC unroll 4
        for (int g = 0; g < groups; g++) sums[r][g] = vec_fma(factor, key[j][g], sums[r][g]);
      }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) vec_store(scores + r * BLOCK + g * LANES, sums[r][g]);
}

// Adds the weighted values of count tokens to rows of sums, for the vectors of the head's width from `start` on. With an
// odd count in bfloat16 the last token's partner has weight 0.
INLINE void add_values(const int rows, const int vectors, Mask last, int is_partial, int is_bf16, const float *weights,
                       const char *const *values, int count, int width, int start, float *sums, int padded,
                       Ahead *ahead) {
  const int tokens = is_bf16 ? 2 : 1;
  Vec sum[VALUE_ROWS][VALUE_VECTORS];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) sum[r][j] = vec_load(sums + (int64_t)r * padded + start + j * LANES);
  for (int t = 0; t < count; t += tokens) {
    const float *from = (const float *)values[t / LANES] + (int64_t)(t % LANES / tokens) * width + start;
    Vec value[2][VALUE_VECTORS];
    ask(ahead, ASKED_BYTES);
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) {
      value[0][j] = is_partial && j == vectors - 1 ? vec_load_some(last, from + j * LANES) : vec_load(from + j * LANES);
      if (is_bf16) vec_split_bf16(&value[0][j], &value[1][j]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < tokens; i++)
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) {
        Vec weight = vec_set(weights[r * BLOCK + t + i]);
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) sum[r][j] = vec_fma(weight, value[i][j], sum[r][j]);
      }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j++) vec_store(sums + (int64_t)r * padded + start + j * LANES, sum[r][j]);
}

// Register tiles are compiled for each number of rows, by dtype.
#define SOME_KEYS(n, at_once) \
  multiply_keys(n, at_once, is_bf16, query, block->keys + g, width, stride, scores + g * LANES, ahead)
#define KEY_ROWS(n, at_once)                                                  \
  case n:                                                                     \
    for (; g + at_once <= block->groups; g += at_once) SOME_KEYS(n, at_once); \
    for (; g < block->groups; g++) SOME_KEYS(n, 1);                           \
    break;
INLINE void multiply_all_keys(int rows, int is_bf16, const float *query, const Block *block, int width, int stride,
                              float *scores, Ahead *ahead) {
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
static void multiply_keys_f32(int rows, const float *query, const Block *block, int width, int stride, float *scores,
                              Ahead *ahead) {
  multiply_all_keys(rows, 0, query, block, width, stride, scores, ahead);
}
static void multiply_keys_bf16(int rows, const float *query, const Block *block, int width, int stride, float *scores,
                               Ahead *ahead) {
  multiply_all_keys(rows, 1, query, block, width, stride, scores, ahead);
}

INLINE void add_values_of_rows(const int rows, int is_bf16, const float *weights, const Block *block, int width,
                               float *sums, int padded, Ahead *ahead) {
  const Mask all = vec_lanes(0, LANES), last = vec_lanes(0, width % LANES);
  const int count = block->count;
  int start = 0;
  for (; start + VALUE_VECTORS * LANES <= width; start += VALUE_VECTORS * LANES)
    add_values(rows, VALUE_VECTORS, all, 0, is_bf16, weights, block->values, count, width, start, sums, padded, ahead);
  for (; start + LANES <= width; start += LANES)
    add_values(rows, 1, all, 0, is_bf16, weights, block->values, count, width, start, sums, padded, ahead);
  if (start < width)
    add_values(rows, 1, last, 1, is_bf16, weights, block->values, count, width, start, sums, padded, ahead);
}
#define VALUE_ROWS_CASE(n) \
  case n: add_values_of_rows(n, is_bf16, weights, block, width, sums, padded, ahead); break;
INLINE void add_all_values(int rows, int is_bf16, const float *weights, const Block *block, int width, float *sums,
                           int padded, Ahead *ahead) {
  for (; rows > 0; rows -= VALUE_ROWS, weights += VALUE_ROWS * BLOCK, sums += VALUE_ROWS * padded)
    switch (rows < VALUE_ROWS ? rows : VALUE_ROWS) {
      VALUE_ROWS_CASE(1) VALUE_ROWS_CASE(2) VALUE_ROWS_CASE(3) VALUE_ROWS_CASE(4)
#ifdef __AVX512F__
      VALUE_ROWS_CASE(5) VALUE_ROWS_CASE(6)
#endif
    }
}
static void add_values_f32(int rows, const float *weights, const Block *block, int width, float *sums, int padded,
                           Ahead *ahead) {
  add_all_values(rows, 0, weights, block, width, sums, padded, ahead);
}
static void add_values_bf16(int rows, const float *weights, const Block *block, int width, float *sums, int padded,
                            Ahead *ahead) {
  add_all_values(rows, 1, weights, block, width, sums, padded, ahead);
}

// Turns a block's latents, which lie as keys do, into values: their leading features in float32, [token][width].
static void spread_latents(const Attention *a, Block *block, float *to) {
  const int width = a->value_width, stride = key_stride(a->page_size);
  for (int g = 0; g < block->groups; g++, to += (int64_t)LANES * width) {
    block->values[g] = (const char *)to;
    for (int h = 0; h < width; h += LANES) {
      const int count = width - h;
      Vec rows[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i += a->is_bf16 ? 2 : 1) {
        const char *from = block->keys[g] + (int64_t)(h + i) / (a->is_bf16 ? 2 : 1) * stride;
        rows[i] = i < count ? vec_load((const float *)from) : vec_zero();
        if (a->is_bf16) vec_split_bf16(&rows[i], &rows[i + 1]);
      }
      vec_transpose(rows);
      for (int i = 0; i < LANES; i++) {
        if (count >= LANES) vec_store(to + (int64_t)i * width + h, rows[i]);
        else vec_store_some(vec_lanes(0, count), to + (int64_t)i * width + h, rows[i]);
      }
    }
  }
}

static int tile_tokens(int group) { return group >= ROWS ? 1 : TILE_BLOCKS * (ROWS / group); }
static void attend(const Attention *a, Piece piece, Piece after, Partial out, float *values) {
  const Tile tile = piece.tile;
  const int group = a->num_heads / a->num_kv_heads, width = a->width, stride = key_stride(a->page_size);
  const int padded = padded_width(a->value_width), rows = tile.count * group;
  const int prefix = context_before(a, tile), end = context_end(a, piece);
  if (!piece.done) clear_partial(out, rows, padded);
  _Static_assert(TILE_BLOCKS * ROWS * MOST_WIDTH <= MOST_QUERY, "the query rows of a tile do not fit");
  float query[MOST_QUERY];
  float scores[ROWS * BLOCK];
  // Query rows are packed [width][rows of a register tile], scaled.
  for (int r0 = 0; r0 < rows; r0 += ROWS) {
    const int some = rows - r0 < ROWS ? rows - r0 : ROWS;
    for (int r = 0; r < some; r++) {
      const float *from = query_row(a, tile, r0 + r);
      for (int h = 0; h < width; h++) query[r0 * width + h * some + r] = from[h] * a->scale;
    }
  }
  int at = context_begin(a, piece);
  for (Block block = locate(a, tile, at, end), next; at < end; at += BLOCK, block = next) {
    const int count = block.count;
    Ahead ahead;
    next = locate_next(a, piece, after, at, block.groups, &ahead);
    if (a->is_latent) spread_latents(a, &block, values);
    for (int r0 = 0; r0 < rows; r0 += ROWS) {
      const int some = rows - r0 < ROWS ? rows - r0 : ROWS;
      if (sees_nothing(a, tile, prefix, r0, some, at, count)) continue;
      (a->is_bf16 ? multiply_keys_bf16 : multiply_keys_f32)(some, query + r0 * width, &block, width, stride, scores,
                                                                &ahead);
      weigh_rows(a, tile, prefix, r0, some, at, count, block.groups * LANES, scores, out);
      (a->is_bf16 && !a->is_latent ? add_values_bf16 : add_values_f32)(
          some, scores, &block, a->value_width, out.values + (int64_t)r0 * padded, padded, &ahead);
    }
  }
}

#ifdef __AVX512F__
const Kernels avx512_kernels = {"avx512", LANES, tile_tokens, padded_width, attend, merge, finish};
#else
const Kernels avx2_kernels = {"avx2", LANES, tile_tokens, padded_width, attend, merge, finish};
#endif
