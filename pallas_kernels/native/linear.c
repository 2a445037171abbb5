// Products of rows with panels of a packed weight; compiled once for AVX-512 and once for AVX2.
//
// Outputs are the lanes and each sum is one chain over its features in order, also where these come in parts, so that a
// row's result depends on nothing but the row and the weight. Weights in bfloat16 are widened in registers; nothing is
// rounded.
#include "linear.h"

#include "linear_rows.h"

#ifdef __AVX512F__
enum { ROWS = 12 };
#else
enum { ROWS = 6 };
#endif
enum {
  VECTORS = 2,      // of outputs in registers
  PART = 768,       // features whose part of a panel stays in the cache while all rows pass it
  PREFETCH = 2048,  // bytes ahead
};

static int64_t block_start(const Linear *l, int64_t block) { return l->num_rows * block / l->num_blocks; }

static int64_t block_bytes(const Linear *l) { return (int64_t)sizeof(float) * ROWS * l->padded_in; }

// Prepared blocks are [padded_in][rows of the block].
static void prepare(const Linear *l, int64_t block, float *scratch) {
  const int64_t start = block_start(l, block), rows = block_start(l, block + 1) - start;
  float *to = (float *)(l->rows + block * block_bytes(l));
  if (rows == 1) {
    prepare_row(l, start, to);
    return;
  }
  for (int64_t r = 0; r < rows; r++) {
    prepare_row(l, start + r, scratch);
    for (int64_t k = 0; k < l->padded_in; k++) to[k * rows + r] = scratch[k];
  }
}

typedef struct {
  int64_t row, out;  // of the first product
  int64_t begin, end;  // features
  float *partial;      // [rows, PANEL]
} Span;

// Products of a block's rows with VECTORS vectors of outputs, over some features.
INLINE void multiply_tile(const int rows, int is_bf16, const Linear *l, const float *x, const char *weight, Span span) {
  Vec sum[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++)
      sum[r][j] = span.begin == 0 ? vec_zero() : vec_load(span.partial + r * PANEL + j * LANES);
  x += span.begin * rows;
  weight += span.begin * (is_bf16 ? STEP_BYTES / 2 : STEP_BYTES);
  for (int64_t k = span.begin; k < span.end; k += is_bf16 ? 2 : 1, weight += STEP_BYTES) {
    __builtin_prefetch(weight + PREFETCH);
    if (VECTORS * LANES == PANEL) __builtin_prefetch(weight + PREFETCH + 64);
    Vec first[VECTORS], second[VECTORS];
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) {
      first[j] = vec_load((const float *)weight + j * LANES);
      if (is_bf16) vec_split_bf16(&first[j], &second[j]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
      const Vec factor = vec_set(x[r]);
#pragma GCC unroll 2
      for (int j = 0; j < VECTORS; j++) sum[r][j] = vec_fma(factor, first[j], sum[r][j]);
    }
    x += rows;
    if (is_bf16) {
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++) {
        const Vec factor = vec_set(x[r]);
#pragma GCC unroll 2
        for (int j = 0; j < VECTORS; j++) sum[r][j] = vec_fma(factor, second[j], sum[r][j]);
      }
      x += rows;
    }
  }
  if (span.end < l->padded_in) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
      for (int j = 0; j < VECTORS; j++) vec_store(span.partial + r * PANEL + j * LANES, sum[r][j]);
    return;
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) finish_sums(l, span.row + r, span.out + j * LANES, sum[r][j]);
}

#define ROW_CASE(n) \
  case n: multiply_tile(n, is_bf16, l, x, weight, span); break;
INLINE void multiply_rows(int rows, int is_bf16, const Linear *l, const float *x, const char *weight, Span span) {
  switch (rows) {
    ROW_CASE(1) ROW_CASE(2) ROW_CASE(3) ROW_CASE(4) ROW_CASE(5) ROW_CASE(6)
#ifdef __AVX512F__
    ROW_CASE(7) ROW_CASE(8) ROW_CASE(9) ROW_CASE(10) ROW_CASE(11) ROW_CASE(12)
#endif
  }
}
static void multiply_f32(int rows, const Linear *l, const float *x, const char *weight, Span span) {
  multiply_rows(rows, 0, l, x, weight, span);
}
static void multiply_bf16(int rows, const Linear *l, const float *x, const char *weight, Span span) {
  multiply_rows(rows, 1, l, x, weight, span);
}

static void multiply(const Linear *l, int64_t panel, int64_t first_block, int64_t last_block, float *scratch) {
  const char *weight = l->weight + panel * l->padded_in * (l->is_bf16 ? STEP_BYTES / 2 : STEP_BYTES);
  const int64_t first_row = block_start(l, first_block), out = panel * PANEL;
  for (int64_t begin = 0; begin < l->padded_in; begin += PART) {
    const int64_t end = begin + PART < l->padded_in ? begin + PART : l->padded_in;
    for (int64_t block = first_block; block < last_block; block++) {
      const int64_t row = block_start(l, block);
      const int rows = (int)(block_start(l, block + 1) - row);
      const float *x = (const float *)(l->rows + block * block_bytes(l));
      for (int o = 0; o < PANEL && out + o < l->num_out; o += VECTORS * LANES) {
        const Span span = {row, out + o, begin, end, scratch + (row - first_row) * PANEL + o};
        (l->is_bf16 ? multiply_bf16 : multiply_f32)(rows, l, x, weight + o * 4, span);
      }
    }
  }
}

#ifdef __AVX512F__
const LinearKernels avx512_linear = {ROWS, block_bytes, prepare, multiply};
#else
const LinearKernels avx2_linear = {ROWS, block_bytes, prepare, multiply};
#endif
