// Multiplies rows by panels of a packed weight; compiled once for AVX-512, once for AVX2, and once for AVX-512 with
// products of bfloat16, for weights in it alone.
//
// Outputs are the lanes and each sum is one chain over its features in order, also where these come in parts, so that a
// row's result depends on nothing but the row and the weight. Weights in bfloat16 are widened in registers, and nothing
// is rounded; with products of bfloat16, rows are rounded to it, and the two products of a pair of features are added.
#include "linear.h"

#include "linear_rows.h"

#ifdef __AVX512F__
enum { ROWS = 12 };
#else
enum { ROWS = 6 };
#endif
#ifdef __AVX512BF16__
enum { UNIT = 2 };  // features in 4 bytes of a prepared block
#else
enum { UNIT = 1 };
#endif
enum {
  VECTORS = 2,      // of a panel's outputs in registers; of a gated one gates, and what they multiply
  FEW_ROWS = ROWS / PANELS_AT_ONCE,  // that leave room for several panels
  PART = 768 * UNIT,  // features whose part of a panel stays in the cache while all rows pass it
  PREFETCH = 4096,  // bytes ahead
};

static int64_t block_start(const Linear *l, int64_t block) { return l->num_rows * block / l->num_blocks; }

static int64_t block_bytes(const Linear *l) { return (int64_t)sizeof(float) * ROWS * l->padded_in / UNIT; }

static void prepare_row(const Linear *l, int64_t row, float *to) {
  const float *x = l->x + row * l->num_in;
  const Vec factor = norm_factor(l, x);
#ifdef __AVX512BF16__
  for (int64_t k = 0; k < l->padded_in; k += 2 * LANES) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(load_prepared(l, x, k + LANES, factor), load_prepared(l, x, k, factor));
    _mm512_storeu_si512(to + k / UNIT, (__m512i)pairs);
  }
#else
  for (int64_t k = 0; k < l->padded_in; k += LANES) {
    const int64_t left = l->padded_in - k;
    vec_store_some(vec_lanes(0, left < LANES ? (int)left : LANES), to + k, load_prepared(l, x, k, factor));
  }
#endif
}

// Prepared blocks are [padded_in / UNIT][rows of the block]: features, or pairs of them in bfloat16.
static void prepare(const Linear *l, int64_t block, float *scratch) {
  const int64_t start = block_start(l, block), rows = block_start(l, block + 1) - start;
  float *to = (float *)(l->rows + block * block_bytes(l));
  if (rows == 1) {
    prepare_row(l, start, to);
    return;
  }
  for (int64_t r = 0; r < rows; r++) {
    prepare_row(l, start + r, scratch);
    for (int64_t k = 0; k < l->padded_in / UNIT; k++) to[k * rows + r] = scratch[k];
  }
}

typedef struct {
  const char *weight;  // of the first panel, from the first of its outputs
  int step;            // outputs of a panel from one vector to the next: gates and others do not lie side by side
  int64_t panel_bytes;
  const float *rows;   // a prepared block
  int64_t row, out;    // of the first product
  int64_t begin, end;  // features
  float *partial;      // [panels][rows, PANEL]
  int64_t partial_panel;  // floats from a panel's to the next one's
} Span;

// Adds a product to each lane, or the two of a pair in bfloat16.
INLINE Vec add_products(Vec x, Vec weight, Vec sum) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weight);
#else
  return vec_fma(x, weight, sum);
#endif
}

// Products of a block's rows with VECTORS vectors of outputs of each panel, over some features.
INLINE void multiply_tile(const int rows, const int panels, int is_bf16, const Linear *l, Span span) {
  const int vectors = panels * VECTORS, step = VECTORS * LANES == PANEL ? LANES : span.step;
  Vec sum[ROWS][PANELS_AT_ONCE * VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int j = 0; j < vectors; j++)
      sum[r][j] = span.begin == 0 ? vec_zero()
                                  : vec_load(span.partial + j / VECTORS * span.partial_panel + r * PANEL + j % VECTORS * step);
  const float *x = span.rows + span.begin / UNIT * rows;
  const char *weight = span.weight + span.begin * (is_bf16 ? STEP_BYTES / 2 : STEP_BYTES);
  for (int64_t k = span.begin; k < span.end; k += is_bf16 ? 2 : 1, weight += STEP_BYTES) {
    Vec first[PANELS_AT_ONCE * VECTORS], second[PANELS_AT_ONCE * VECTORS];
#pragma GCC unroll 6
    for (int j = 0; j < vectors; j++) {
      const char *at = weight + j / VECTORS * span.panel_bytes + j % VECTORS * step * 4;
      if (LANES == 16 || j % VECTORS == 0) __builtin_prefetch(at + PREFETCH);
      first[j] = vec_load((const float *)at);
      if (is_bf16 && UNIT == 1) vec_split_bf16(&first[j], &second[j]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
      const Vec factor = vec_set(x[r]);
#pragma GCC unroll 6
      for (int j = 0; j < vectors; j++) sum[r][j] = add_products(factor, first[j], sum[r][j]);
    }
    x += rows;
    if (is_bf16 && UNIT == 1) {
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++) {
        const Vec factor = vec_set(x[r]);
#pragma GCC unroll 6
        for (int j = 0; j < vectors; j++) sum[r][j] = vec_fma(factor, second[j], sum[r][j]);
      }
      x += rows;
    }
  }
  if (span.end < l->padded_in) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
      for (int j = 0; j < vectors; j++)
        vec_store(span.partial + j / VECTORS * span.partial_panel + r * PANEL + j % VECTORS * step, sum[r][j]);
    return;
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
    for (int p = 0; p < panels; p++) {
      const int64_t out = span.out + p * l->panel_outs;
      if (l->activation) {
        finish_gated(l, span.row + r, out, sum[r][p * VECTORS], sum[r][p * VECTORS + 1]);
      } else {
        finish_sums(l, span.row + r, out, sum[r][p * VECTORS]);
        finish_sums(l, span.row + r, out + LANES, sum[r][p * VECTORS + 1]);
      }
    }
}

#define FEW_CASE(n)                                                                                     \
  case n:                                                                                               \
    if (panels == PANELS_AT_ONCE) multiply_tile(n, PANELS_AT_ONCE, is_bf16, l, span);                   \
    else multiply_tile(n, 1, is_bf16, l, span);                                                         \
    break;
#define ROW_CASE(n) \
  case n: multiply_tile(n, 1, is_bf16, l, span); break;
INLINE void multiply_rows(int rows, int panels, int is_bf16, const Linear *l, Span span) {
  switch (rows) {
    FEW_CASE(1) FEW_CASE(2)
#ifdef __AVX512F__
    FEW_CASE(3) FEW_CASE(4) ROW_CASE(5) ROW_CASE(6) ROW_CASE(7) ROW_CASE(8) ROW_CASE(9) ROW_CASE(10) ROW_CASE(11)
    ROW_CASE(12)
#else
    ROW_CASE(3) ROW_CASE(4) ROW_CASE(5) ROW_CASE(6)
#endif
  }
}
#ifndef __AVX512BF16__
static void multiply_f32(int rows, int panels, const Linear *l, Span span) { multiply_rows(rows, panels, 0, l, span); }
#endif
static void multiply_bf16(int rows, int panels, const Linear *l, Span span) { multiply_rows(rows, panels, 1, l, span); }

// Few rows wait for the weight, of which panels that are read side by side come faster than one after the other.
static void multiply_panels(const Linear *l, int64_t panel, int panels, int64_t first_block, int64_t last_block,
                            float *scratch) {
  const int64_t panel_bytes = l->padded_in * (l->is_bf16 ? STEP_BYTES / 2 : STEP_BYTES);
  const int64_t first_row = block_start(l, first_block), num_rows = block_start(l, last_block) - first_row;
  for (int64_t begin = 0; begin < l->padded_in; begin += PART) {
    const int64_t end = begin + PART < l->padded_in ? begin + PART : l->padded_in;
    for (int64_t block = first_block; block < last_block; block++) {
      const int64_t row = block_start(l, block);
      const int rows = (int)(block_start(l, block + 1) - row);
      for (int o = 0; o < l->panel_outs; o += l->activation ? LANES : VECTORS * LANES) {
        const Span span = {
            .weight = l->weight + panel * panel_bytes + o * 4,
            .step = l->activation ? GATES : LANES,
            .panel_bytes = panel_bytes,
            .rows = (const float *)(l->rows + block * block_bytes(l)),
            .row = row,
            .out = panel * l->panel_outs + o,
            .begin = begin,
            .end = end,
            .partial = scratch + (row - first_row) * PANEL + o,
            .partial_panel = num_rows * PANEL,
        };
#ifdef __AVX512BF16__
        multiply_bf16(rows, panels, l, span);
#else
        (l->is_bf16 ? multiply_bf16 : multiply_f32)(rows, panels, l, span);
#endif
      }
    }
  }
}

static void multiply(const Linear *l, int64_t panel, int64_t last_panel, int64_t first_block, int64_t last_block,
                     float *scratch) {
  const int64_t rows = block_start(l, last_block) - block_start(l, first_block);
  if (last_block - first_block == 1 && rows <= FEW_ROWS)
    for (; panel + PANELS_AT_ONCE <= last_panel; panel += PANELS_AT_ONCE)
      multiply_panels(l, panel, PANELS_AT_ONCE, first_block, last_block, scratch);
  for (; panel < last_panel; panel++) multiply_panels(l, panel, 1, first_block, last_block, scratch);
}

#ifdef __AVX512BF16__
const LinearKernels avx512bf16_linear = {ROWS, block_bytes, prepare, multiply};
#elif defined(__AVX512F__)
const LinearKernels avx512_linear = {ROWS, block_bytes, prepare, multiply};
#else
const LinearKernels avx2_linear = {ROWS, block_bytes, prepare, multiply};
#endif
