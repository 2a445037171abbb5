// Multiplies rows, which are not rounded, by panels of a packed quantized weight; compiled for AVX-512 and for AVX2.
//
// Outputs are the lanes. In each group a sum is one chain over its features in order, and groups are added in order, so
// that a row's result depends on nothing but the row and the weight.
#include "linear.h"

#include "quantized_rows.h"

#ifdef __AVX512F__
enum { ROWS = 12 };
#else
enum { ROWS = 6 };
#endif
enum {
  VECTORS = 2,  // of a panel's outputs in registers; of a gated one gates, and what they multiply
  FEW_ROWS = ROWS / PANELS_AT_ONCE,  // that leave room for several panels
};

// Features, then the sum of each group.
static int64_t block_bytes(const Linear *l) {
  return ((int64_t)sizeof(float) * ROWS * (l->padded_in + l->quantized->num_groups) + 63) & ~(int64_t)63;
}

// A row with its groups filled up, and the sum of each.
static void prepare_row(const Linear *l, int64_t row, float *to, float *sums) {
  const Quantized *q = l->quantized;
  const float *x = l->x + row * l->row_features;
  const Vec factor = norm_factor(l, x);
  for (int64_t g = 0; g < q->num_groups; g++) {
    Vec sum = vec_zero();
    for (int64_t k = 0; k < q->padded_group; k += LANES) {
      const int64_t padded = q->padded_group - k, given = q->form.group - k;
      const Vec value = load_some_prepared(l, x, g * q->form.group + k, given, factor);
      vec_store_some(vec_lanes(0, padded < LANES ? (int)padded : LANES), to + g * q->padded_group + k, value);
      sum = vec_add(sum, value);
    }
    sums[g] = vec_total(sum);
  }
}

// Prepared blocks are [padded_in][rows of the block], then [groups][rows].
static void prepare(const Linear *l, int64_t block, float *scratch) {
  const int64_t start = block_start(l, block), rows = block_start(l, block + 1) - start;
  const int64_t groups = l->quantized->num_groups;
  float *to = (float *)(l->rows + block * block_bytes(l)), *sums = to + l->padded_in * rows;
  for (int64_t r = 0; r < rows; r++) {
    prepare_row(l, start + r, scratch, scratch + l->padded_in);
    for (int64_t k = 0; k < l->padded_in; k++) to[k * rows + r] = scratch[k];
    for (int64_t g = 0; g < groups; g++) sums[g * rows + r] = scratch[l->padded_in + g];
  }
}

INLINE void add_rows(const int rows, const int vectors, const float *x, const Vec *value,
                     Vec sum[ROWS][PANELS_AT_ONCE * VECTORS]) {
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) {
    const Vec factor = vec_set(x[r]);
#pragma GCC unroll 6
    for (int j = 0; j < vectors; j++) sum[r][j] = vec_fma(factor, value[j], sum[r][j]);
  }
}

// Adds products with some features of a group, of which `codes` are the first panel's.
INLINE void add_codes(const int rows, const int panels, const int values, const Quantized *q, const Span *span,
                      const char *codes, const float *x, int64_t count, Vec sum[ROWS][PANELS_AT_ONCE * VECTORS]) {
  enum { MOST = PANELS_AT_ONCE * VECTORS };
  const int vectors = panels * VECTORS, step = VECTORS * LANES == PANEL ? LANES : span->step;
  const int64_t stride = panel_bytes(q);
  const int is_float = values >= CODES_E4M3, size = is_float ? 1 : 4;
  const int unit = is_float ? 1 : values == CODES_UINT4 ? 8 : 4;
  const Table table = table_load(q->table);
  const Ints flip = ints_set((int)0x80808080);
  codes += span->lane * size;
  for (int64_t k = 0; k < count; k += unit, codes += PANEL * size) {
    Ints words[MOST];
    Vec value[MOST];
#pragma GCC unroll 6
    for (int j = 0; j < vectors; j++) {
      const char *at = codes + j / VECTORS * stride + j % VECTORS * step * size;
      if (!is_float || k % 2 == 0) __builtin_prefetch(at + SPAN_PREFETCH);
      if (values == CODES_E4M3) value[j] = vec_load_e4m3(at);
      else if (values == CODES_E5M2) value[j] = vec_load_e5m2(at);
      else words[j] = ints_load(at);
      if (values == CODES_INT8) words[j] = ints_xor(words[j], flip);  // of a byte, whatever it holds
    }
    if (is_float) {
      add_rows(rows, vectors, x, value, sum);
      x += rows;
      continue;
    }
#pragma GCC unroll 8
    for (int i = 0; i < unit; i++, x += rows) {
#pragma GCC unroll 6
      for (int j = 0; j < vectors; j++)
        value[j] = values == CODES_UINT4 ? table_look_up(table, ints_down(words[j], 4 * i))
                                         : vec_from_ints(top_byte(words[j], i));
      add_rows(rows, vectors, x, value, sum);
    }
  }
}

// The same with codes of six bits.
INLINE void add_six(const int rows, const int panels, const Quantized *q, const Span *span, const char *codes,
                    const float *x, int64_t count, Vec sum[ROWS][PANELS_AT_ONCE * VECTORS]) {
  enum { MOST = PANELS_AT_ONCE * VECTORS };
  const int vectors = panels * VECTORS, step = VECTORS * LANES == PANEL ? LANES : span->step;
  const int64_t stride = panel_bytes(q);
  const Ints center = ints_set(0x20202020);
  codes += span->lane * 4;
  for (; count > 0; count -= 16, codes += 3 * STEP_BYTES)
#pragma GCC unroll 2
    for (int second = 0; second < 2; second++) {
      Ints quads[2][MOST];
#pragma GCC unroll 6
      for (int j = 0; j < vectors; j++) {
        const char *at = codes + j / VECTORS * stride + j % VECTORS * step * 4;
        __builtin_prefetch(at + second * STEP_BYTES + SPAN_PREFETCH);
        if (second) __builtin_prefetch(at + 2 * STEP_BYTES + SPAN_PREFETCH);
        const Ints low = ints_load(at + second * STEP_BYTES), high = ints_load(at + 2 * STEP_BYTES);
        quads[0][j] = ints_sub_bytes(six_quads(low, high, second, 0), center);
        quads[1][j] = ints_sub_bytes(six_quads(low, high, second, 1), center);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++, x += rows) {
        Vec value[MOST];
#pragma GCC unroll 6
        for (int j = 0; j < vectors; j++) value[j] = vec_from_ints(top_byte(quads[i % 2][j], i / 2));
        add_rows(rows, vectors, x, value, sum);
      }
    }
}

// Adds a group's sums, which lie where those of a part do, to those of the groups before.
static void add_group(int rows, int panels, const Linear *l, const Span *span, int64_t group) {
  const Quantized *q = l->quantized;
  const int step = VECTORS * LANES == PANEL ? LANES : span->step;
  const float *sums = (const float *)span->rows + l->padded_in * rows + group * rows;
  for (int p = 0; p < panels; p++) {
    const char *panel = span->panel + p * panel_bytes(q), *at = group_of(q, panel, group), *block = block_of(q, panel, group);
    for (int j = 0; j < VECTORS; j++) {
      const GroupNumbers numbers = numbers_of(q, block, at, span->lane + j * step);
      const Vec scale = vec_mul(numbers.scale, vec_set(code_power(q)));
      const Vec added = row_factor(q, &numbers);
      for (int r = 0; r < rows; r++) {
        const int64_t place = p * span->partial_panel + r * PANEL + j * step;
        float *at_total = span->totals + place;
        Vec total = group ? vec_load(at_total) : vec_zero();
        total = vec_fma(vec_load(span->partial + place), scale, total);
        if (q->has_offset || q->form.biases) total = vec_fma(added, vec_set(sums[r]), total);
        vec_store(at_total, total);
      }
    }
  }
}

INLINE void multiply_tile(const int rows, const int panels, const int values, const Linear *l, const Span *span) {
  const Quantized *q = l->quantized;
  const int vectors = panels * VECTORS, step = VECTORS * LANES == PANEL ? LANES : span->step;
  const float *x = (const float *)span->rows;
  int64_t group = span->begin / q->padded_group;
  for (int64_t k = span->begin; k < span->end; group++) {
    Vec sum[ROWS][PANELS_AT_ONCE * VECTORS];
    const int64_t first = group * q->padded_group, last = first + q->padded_group, stop = last < span->end ? last : span->end;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
      for (int j = 0; j < vectors; j++)
        sum[r][j] = k == first ? vec_zero()
                               : vec_load(span->partial + j / VECTORS * span->partial_panel + r * PANEL + j % VECTORS * step);
    const char *codes = group_of(q, span->panel, group) + codes_bytes(&q->form, k - first);
    if (values == CODES_INT6) add_six(rows, panels, q, span, codes, x + k * rows, stop - k, sum);
    else add_codes(rows, panels, values, q, span, codes, x + k * rows, stop - k, sum);
    k = stop;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
      for (int j = 0; j < vectors; j++)
        vec_store(span->partial + j / VECTORS * span->partial_panel + r * PANEL + j % VECTORS * step, sum[r][j]);
    if (stop == last) add_group(rows, panels, l, span, group);
  }
}

#define FEW_CASE(n)                                                                    \
  case n:                                                                              \
    if (panels == PANELS_AT_ONCE) multiply_tile(n, PANELS_AT_ONCE, values, l, span);   \
    else multiply_tile(n, 1, values, l, span);                                         \
    break;
#define ROW_CASE(n) \
  case n: multiply_tile(n, 1, values, l, span); break;
INLINE void multiply_rows(int rows, int panels, const int values, const Linear *l, const Span *span) {
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
#define MULTIPLY(name, values)                                                                       \
  static void multiply_##name(int rows, int panels, const Linear *l, const Span *span) {             \
    multiply_rows(rows, panels, values, l, span);                                                    \
  }
MULTIPLY(bytes, CODES_INT8)
MULTIPLY(uint4, CODES_UINT4)
MULTIPLY(int6, CODES_INT6)
MULTIPLY(e4m3, CODES_E4M3)
MULTIPLY(e5m2, CODES_E5M2)

static void multiply_span(int rows, int panels, const Linear *l, const Span *span) {
  switch (l->quantized->form.values) {
    case CODES_INT8:
    case CODES_UINT8: multiply_bytes(rows, panels, l, span); break;
    case CODES_UINT4: multiply_uint4(rows, panels, l, span); break;
    case CODES_INT6: multiply_int6(rows, panels, l, span); break;
    case CODES_E4M3: multiply_e4m3(rows, panels, l, span); break;
    default: multiply_e5m2(rows, panels, l, span);
  }
  if (span->end < l->padded_in) return;
  for (int r = 0; r < rows; r++)
    for (int p = 0; p < panels; p++) {
      const float *totals = span->totals + p * span->partial_panel + r * PANEL;
      finish_pair(l, span->row + r, span->out + p * l->panel_outs, vec_load(totals), vec_load(totals + span->step));
    }
}

static void multiply(const Linear *l, int64_t panel, int64_t last_panel, int64_t first_block, int64_t last_block,
                     float *scratch) {
  multiply_blocks(l, panel, last_panel, first_block, last_block, FEW_ROWS, block_bytes(l), multiply_span, scratch);
}

#ifdef __AVX512F__
const LinearKernels avx512_quantized = {ROWS, block_bytes, prepare, multiply};
#else
const LinearKernels avx2_quantized = {ROWS, block_bytes, prepare, multiply};
#endif
