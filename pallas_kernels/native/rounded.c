// Multiplies rows that are rounded to int8 by panels of a packed quantized weight; compiled for AVX-512 with VNNI and
// without, and for AVX2.
//
// Sums of integers are exact, and groups are added in order: every instruction set gives the same bits.
#include "linear.h"

#include <string.h>

#include "rounded_rows.h"

#ifdef __AVX512F__
enum { ROWS = 12 };
#else
enum { ROWS = 6 };
#endif
#ifdef __AVX512VNNI__
enum { QUAD_WORDS = 1 };  // of four numbers of a row
#else
enum { QUAD_WORDS = 2 };  // of 16 bits each: the first and the third, the second and the fourth
#endif
enum { TABLE = 0 };  // in place of the bits of codes: four, which a table has numbers for
enum {
  VECTORS = 2,  // of a panel's outputs in registers; of a gated one gates, and what they multiply
  FEW_ROWS = ROWS / PANELS_AT_ONCE,  // that leave room for several panels
};

// Quads, then the numbers of each group, then the scale of all.
static int64_t block_bytes(const Linear *l) {
  const int64_t words = l->padded_in / 4 * QUAD_WORDS + l->quantized->num_groups * GROUP_NUMBERS + 1;
  return (words * ROWS * (int64_t)sizeof(float) + 63) & ~(int64_t)63;
}
INLINE const float *numbers_in(const Linear *l, const char *block, int64_t rows) {
  return (const float *)block + l->padded_in / 4 * QUAD_WORDS * rows;
}

static void store_quad(const int8_t *quad, int32_t *to) {
#ifdef __AVX512VNNI__
  memcpy(to, quad, sizeof *to);
#else
  const int16_t wide[4] = {quad[0], quad[2], quad[1], quad[3]};
  memcpy(to, wide, sizeof wide);
#endif
}

// Prepared blocks are [padded_in / 4][rows of the block][QUAD_WORDS], [groups][GROUP_NUMBERS][rows], [rows].
static void prepare(const Linear *l, int64_t block, float *scratch) {
  const int64_t start = block_start(l, block), rows = block_start(l, block + 1) - start;
  const int64_t count = l->quantized->num_groups * GROUP_NUMBERS;
  char *to = l->rows + block * block_bytes(l);
  float *numbers = (float *)numbers_in(l, to, rows);
  for (int64_t r = 0; r < rows; r++) {
    // Numbers of groups lie where there is room for bytes, after these.
    float *own = scratch + l->padded_in + (l->padded_in + 3) / 4;
    const RoundedRow row = round_row(l, start + r, scratch, own);
    for (int64_t i = 0; i < l->padded_in / 4; i++)
      store_quad(row.bytes + 4 * i, (int32_t *)to + (i * rows + r) * QUAD_WORDS);
    for (int64_t i = 0; i < count; i++) numbers[i * rows + r] = own[i];
    numbers[count * rows + r] = row.scale;
  }
}

// Adds products of quads of codes with those of a row.
INLINE Ints add_quads(Ints sum, Ints codes, const int32_t *quad) {
#ifdef __AVX512VNNI__
  // Of the intrinsic gcc 12 makes copies of the sum.
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(ints_set(*quad)));
  return sum;
#else
  const Ints low = ints_set(0x00ff00ff);
  sum = ints_add_pairs(ints_and(codes, low), ints_set(quad[0]), sum);
  return ints_add_pairs(ints_and(ints_down(codes, 8), low), ints_set(quad[1]), sum);
#endif
}

// Adds products with codes of six bits of some features of a group.
INLINE void add_six(const int rows, const int panels, const Quantized *q, const Span *span, const char *codes,
                    const int32_t *x, int64_t count, Ints sum[ROWS][PANELS_AT_ONCE * VECTORS]) {
  enum { MOST = PANELS_AT_ONCE * VECTORS };
  const int vectors = panels * VECTORS, step = VECTORS * LANES == PANEL ? LANES : span->step;
  const int64_t stride = panel_bytes(q);
  codes += span->lane * 4;
  for (; count > 0; count -= 16, codes += 3 * STEP_BYTES)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++, x += rows * QUAD_WORDS) {
      Ints quads[MOST];
#pragma GCC unroll 6
      for (int j = 0; j < vectors; j++) {
        const char *at = codes + j / VECTORS * stride + j % VECTORS * step * 4;
        if (i < 3) __builtin_prefetch(at + i * STEP_BYTES + SPAN_PREFETCH);
        quads[j] = six_quads(ints_load(at + i / 2 * STEP_BYTES), ints_load(at + 2 * STEP_BYTES), i / 2, i % 2);
      }
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
        for (int j = 0; j < vectors; j++) sum[r][j] = add_quads(sum[r][j], quads[j], x + r * QUAD_WORDS);
    }
}

// Adds products with some features of a group, of which `codes` are the first panel's.
INLINE void add_codes(const int rows, const int panels, const int is_half, const int has_table, const Quantized *q,
                      const Span *span, const char *codes, const int32_t *x, int64_t num_words, Ints sum[ROWS][PANELS_AT_ONCE * VECTORS]) {
  enum { MOST = PANELS_AT_ONCE * VECTORS };
  const int vectors = panels * VECTORS, step = VECTORS * LANES == PANEL ? LANES : span->step;
  const int64_t stride = panel_bytes(q);
  const Ints table = has_table ? whole_table_of(q) : ints_zero();
  codes += span->lane * 4;
  for (; num_words; num_words--, codes += STEP_BYTES) {
    Ints words[MOST];
#pragma GCC unroll 6
    for (int j = 0; j < vectors; j++) {
      const char *at = codes + j / VECTORS * stride + j % VECTORS * step * 4;
      if (LANES == 16 || j % VECTORS == 0) __builtin_prefetch(at + SPAN_PREFETCH);
      words[j] = ints_load(at);
    }
#pragma GCC unroll 2
    for (int half = 0; half <= is_half; half++, x += rows * QUAD_WORDS) {
      Ints quads[MOST];
#pragma GCC unroll 6
      for (int j = 0; j < vectors; j++)
      {
        quads[j] = is_half ? ints_and(half ? ints_down(words[j], 4) : words[j], ints_set(0x0f0f0f0f)) : words[j];
        if (has_table) quads[j] = ints_shuffle(table, quads[j]);
      }
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
        for (int j = 0; j < vectors; j++) sum[r][j] = add_quads(sum[r][j], quads[j], x + r * QUAD_WORDS);
    }
  }
}

// Adds a group's products with a row to those of the groups before; sums are of a vector of outputs, whose numbers follow.
INLINE void add_products(const Parts parts, const GroupNumbers *of_group, Ints sum, const float *of_row, int rows,
                         int is_first, float *total) {
  int32_t center_sum;
  memcpy(&center_sum, of_row + CENTER_SUM * rows, sizeof center_sum);
  const Vec before = is_first ? vec_zero() : vec_load(total);
  vec_store(total, add_rounded(parts, of_group, ints_sub(sum, ints_set(center_sum)), of_row, rows, before));
}

// Adds those of all rows and outputs; the group's sums lie where those of a part do, or, of few rows, in registers.
INLINE void add_group(const int rows, const int panels, const Linear *l, const Span *span, int64_t group,
                      Ints sum[ROWS][PANELS_AT_ONCE * VECTORS]) {
  const Quantized *q = l->quantized;
  const int step = VECTORS * LANES == PANEL ? LANES : span->step;
  const float *numbers = numbers_in(l, span->rows, rows) + group * GROUP_NUMBERS * rows;
  const Parts parts = parts_of(number_of_parts(q));
#pragma GCC unroll 3
  for (int p = 0; p < panels; p++) {
    const char *panel = span->panel + p * panel_bytes(q), *at = group_of(q, panel, group), *block = block_of(q, panel, group);
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) {
      const GroupNumbers of_group = whole_numbers_of(q, block, at, span->lane + j * step);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        const int64_t place = p * span->partial_panel + r * PANEL + j * step;
        const Ints products = sum ? sum[r][p * VECTORS + j] : ints_load((const char *)(span->partial + place));
        add_products(parts, &of_group, products, numbers + r, rows, group == 0, span->totals + place);
      }
    }
  }
}
static void add_group_of_rows(int rows, const Linear *l, const Span *span, int64_t group) {
  add_group(rows, 1, l, span, group, 0);
}

INLINE void multiply_tile(const int rows, const int panels, const int bits, const Linear *l, const Span *span) {
  const Quantized *q = l->quantized;
  const int vectors = panels * VECTORS, step = VECTORS * LANES == PANEL ? LANES : span->step;
  const int32_t *x = (const int32_t *)span->rows;
  int64_t group = span->begin / q->padded_group;
  for (int64_t k = span->begin; k < span->end; group++) {
    Ints sum[ROWS][PANELS_AT_ONCE * VECTORS];
    const int64_t first = group * q->padded_group, last = first + q->padded_group, stop = last < span->end ? last : span->end;
    int32_t *partial = (int32_t *)span->partial;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
      for (int j = 0; j < vectors; j++)
        sum[r][j] = k == first ? ints_zero()
                               : ints_load((const char *)(partial + j / VECTORS * span->partial_panel + r * PANEL +
                                                          j % VECTORS * step));
    const char *codes = group_of(q, span->panel, group) + codes_bytes(&q->form, k - first);
    const int32_t *from = x + k / 4 * rows * QUAD_WORDS;
    if (bits == 6) add_six(rows, panels, q, span, codes, from, stop - k, sum);
    else if (bits == TABLE) add_codes(rows, panels, 1, 1, q, span, codes, from, (stop - k) / 8, sum);
    else add_codes(rows, panels, bits == 4, 0, q, span, codes, from, (stop - k) * bits / 32, sum);
    k = stop;
    if (stop == last && panels == PANELS_AT_ONCE) {  // of short groups the way through memory takes long
      add_group(rows, panels, l, span, group, sum);
      continue;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
      for (int j = 0; j < vectors; j++)
        ints_store(partial + j / VECTORS * span->partial_panel + r * PANEL + j % VECTORS * step, sum[r][j]);
    if (stop == last) add_group_of_rows(rows, l, span, group);
  }
}

// Writes the results of a block.
static void finish(int rows, int panels, const Linear *l, const Span *span) {
  const float *scales = numbers_in(l, span->rows, rows) + l->quantized->num_groups * GROUP_NUMBERS * rows;
  for (int r = 0; r < rows; r++)
    for (int p = 0; p < panels; p++) {
      const float *totals = span->totals + p * span->partial_panel + r * PANEL;
      const Vec scale = vec_set(scales[r]);
      finish_pair(l, span->row + r, span->out + p * l->panel_outs, vec_mul(vec_load(totals), scale),
                  vec_mul(vec_load(totals + span->step), scale));
    }
}

#define FEW_CASE(n)                                                                    \
  case n:                                                                              \
    if (panels == PANELS_AT_ONCE) multiply_tile(n, PANELS_AT_ONCE, bits, l, span);     \
    else multiply_tile(n, 1, bits, l, span);                                           \
    break;
#define ROW_CASE(n) \
  case n: multiply_tile(n, 1, bits, l, span); break;
INLINE void multiply_rows(int rows, int panels, const int bits, const Linear *l, const Span *span) {
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
static void multiply_bytes(int rows, int panels, const Linear *l, const Span *span) {
  multiply_rows(rows, panels, 8, l, span);
}
static void multiply_halves(int rows, int panels, const Linear *l, const Span *span) {
  multiply_rows(rows, panels, 4, l, span);
}
static void multiply_table(int rows, int panels, const Linear *l, const Span *span) {
  multiply_rows(rows, panels, TABLE, l, span);
}
static void multiply_six(int rows, int panels, const Linear *l, const Span *span) {
  multiply_rows(rows, panels, 6, l, span);
}
static void multiply_span(int rows, int panels, const Linear *l, const Span *span) {
  switch (l->quantized->form.values) {
    case CODES_UINT4: (l->quantized->has_whole_table ? multiply_table : multiply_halves)(rows, panels, l, span); break;
    case CODES_INT6: multiply_six(rows, panels, l, span); break;
    default: multiply_bytes(rows, panels, l, span);
  }
  if (span->end == l->padded_in) finish(rows, panels, l, span);
}

static void multiply(const Linear *l, int64_t panel, int64_t last_panel, int64_t first_block, int64_t last_block,
                     float *scratch) {
  multiply_blocks(l, panel, last_panel, first_block, last_block, FEW_ROWS, block_bytes(l), multiply_span, scratch);
}

#ifdef __AVX512VNNI__
const LinearKernels avx512vnni_rounded = {ROWS, block_bytes, prepare, multiply};
#elif defined(__AVX512F__)
const LinearKernels avx512_rounded = {ROWS, block_bytes, prepare, multiply};
#else
const LinearKernels avx2_rounded = {ROWS, block_bytes, prepare, multiply};
#endif
