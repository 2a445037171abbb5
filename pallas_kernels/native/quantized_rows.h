// The numbers of groups of a quantized weight in vectors of outputs; compiled for each instruction set.
#pragma once
#include "linear_rows.h"

#ifdef __AVX512F__
typedef __m512i Ints;
static inline Ints ints_load(const char *p) { return _mm512_loadu_si512(p); }
static inline Ints ints_set(int32_t x) { return _mm512_set1_epi32(x); }
static inline Ints ints_zero(void) { return _mm512_setzero_si512(); }
static inline void ints_store(void *p, Ints v) { _mm512_storeu_si512(p, v); }
static inline Ints ints_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
static inline Ints ints_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
static inline Ints ints_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
static inline Ints ints_sub_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
static inline Ints ints_add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
static inline Ints ints_sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
static inline Ints ints_down(Ints v, int bits) { return _mm512_srli_epi32(v, bits); }
static inline Ints ints_shuffle(Ints v, Ints order) { return _mm512_shuffle_epi8(v, order); }
static inline Ints ints_add_pairs(Ints a, Ints b, Ints sum) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
static inline Vec vec_from_ints(Ints v) { return _mm512_cvtepi32_ps(v); }
static inline Ints ints_round(Vec v) { return _mm512_cvtps_epi32(v); }
static inline Ints ints_clamp(Ints v, int most) {
  return _mm512_max_epi32(_mm512_min_epi32(v, ints_set(most)), ints_set(-most));
}
static inline int32_t ints_total(Ints v) { return _mm512_reduce_add_epi32(v); }
static inline void ints_store_bytes(int8_t *p, Ints v) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(v)); }
static inline Ints ints_from_u8(const char *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline Ints ints_from_s8(const char *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline Vec vec_load_f16(const char *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
// Floats of 8 bits, as those of 16 that have the same bits above, below the sign.
static inline Vec vec_load_e4m3(const char *p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff)));
}
static inline Vec vec_load_e5m2(const char *p) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8));
}
// The members of a table of 16 numbers that the lowest four bits of words name.
typedef Vec Table;
static inline Table table_load(const float *numbers) { return vec_load(numbers); }
static inline Vec table_look_up(Table table, Ints words) { return _mm512_permutexvar_ps(words, table); }
static inline Mask ints_is_zero(Ints v) { return _mm512_cmpeq_epi32_mask(v, _mm512_setzero_si512()); }
static inline Ints ints_up(Ints v, int bits) { return _mm512_slli_epi32(v, bits); }
#else
typedef __m256i Ints;
static inline Ints ints_load(const char *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline Ints ints_set(int32_t x) { return _mm256_set1_epi32(x); }
static inline Ints ints_zero(void) { return _mm256_setzero_si256(); }
static inline void ints_store(void *p, Ints v) { _mm256_storeu_si256((__m256i *)p, v); }
static inline Ints ints_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
static inline Ints ints_xor(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
static inline Ints ints_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
static inline Ints ints_sub_bytes(Ints a, Ints b) { return _mm256_sub_epi8(a, b); }
static inline Ints ints_add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
static inline Ints ints_sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
static inline Ints ints_down(Ints v, int bits) { return _mm256_srli_epi32(v, bits); }
static inline Ints ints_shuffle(Ints v, Ints order) { return _mm256_shuffle_epi8(v, order); }
static inline Ints ints_add_pairs(Ints a, Ints b, Ints sum) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
static inline Vec vec_from_ints(Ints v) { return _mm256_cvtepi32_ps(v); }
static inline Ints ints_round(Vec v) { return _mm256_cvtps_epi32(v); }
static inline Ints ints_clamp(Ints v, int most) {
  return _mm256_max_epi32(_mm256_min_epi32(v, ints_set(most)), ints_set(-most));
}
static inline int32_t ints_total(Ints v) {
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
static inline void ints_store_bytes(int8_t *p, Ints v) {
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(halves, halves));
}
static inline Ints ints_from_u8(const char *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline Ints ints_from_s8(const char *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static inline Vec vec_load_f16(const char *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline Vec vec_load_e4m3(const char *p) {
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff)));
}
static inline Vec vec_load_e5m2(const char *p) {
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p)), 8));
}
typedef struct {
  Vec low, high;
} Table;
static inline Table table_load(const float *numbers) { return (Table){vec_load(numbers), vec_load(numbers + LANES)}; }
static inline Vec table_look_up(Table table, Ints words) {
  const Vec low = _mm256_permutevar8x32_ps(table.low, words), high = _mm256_permutevar8x32_ps(table.high, words);
  return _mm256_blendv_ps(low, high, (Vec)_mm256_slli_epi32(words, 28));
}
static inline Mask ints_is_zero(Ints v) { return _mm256_cmpeq_epi32(v, _mm256_setzero_si256()); }
static inline Ints ints_up(Ints v, int bits) { return _mm256_slli_epi32(v, bits); }
#endif

// The highest bytes of words, each the byte i of a word.
INLINE Ints top_byte(Ints words, int i) {
  if (i == 3) return ints_and(words, ints_set((int)0xff000000));
  const int first = i << 24 | 0x808080, next = 4 << 24;
#ifdef __AVX512F__
  return ints_shuffle(words, _mm512_set4_epi32(first + 3 * next, first + 2 * next, first + next, first));
#else
  const Ints order = _mm256_setr_epi32(first, first + next, first + 2 * next, first + 3 * next, first, first + next,
                                       first + 2 * next, first + 3 * next);
  return ints_shuffle(words, order);
#endif
}

// Four codes of six bits, plus 32, in the bytes of words: the even ones of eight, or the odd ones, of which `low` has the
// lower halves, and `high` the upper bits of these eight, if they are the first of 16, and of the next eight.
INLINE Ints six_quads(Ints low, Ints high, const int is_second, const int is_odd) {
  const int down = 4 * is_second + 2 * is_odd;
  const Ints upper = down < 4 ? ints_up(high, 4 - down) : ints_down(high, down - 4);
  return ints_or(ints_and(is_odd ? ints_down(low, 4) : low, ints_set(0x0f0f0f0f)), ints_and(upper, ints_set(0x30303030)));
}

enum { E4M3_POWER = 256 };  // what vec_load_e4m3 leaves out

// Numbers of a vector of outputs, the first of which is `lane`, of the 32 that lie there.
INLINE Vec load_numbers(int kind, const char *numbers, int lane) {
  switch (kind) {
    case NUMBERS_F32: return vec_load((const float *)numbers + lane);
    case NUMBERS_F16: return vec_load_f16(numbers + 2 * lane);
    case NUMBERS_BF16: return vec_load_bf16((const uint16_t *)numbers + lane);
    case NUMBERS_E8M0: {
      const Ints power = ints_from_u8(numbers + lane);
      return vec_pick(ints_is_zero(power), (Vec)ints_set(1 << 22), (Vec)ints_up(power, 23));
    }
    case NUMBERS_E4M3: return vec_mul(vec_load_e4m3(numbers + lane), vec_set(E4M3_POWER));
    case NUMBERS_E5M2: return vec_load_e5m2(numbers + lane);
    case NUMBERS_S8: return vec_from_ints(ints_from_s8(numbers + lane));
    default: return vec_from_ints(ints_from_u8(numbers + lane));
  }
}

// Those of a group, for a vector of outputs: the factor of its codes, what is subtracted from them, and what is added.
typedef struct {
  Vec scale, zero, bias;
} GroupNumbers;

INLINE GroupNumbers numbers_of(const Quantized *q, const char *block, const char *group, int lane) {
  const Form *f = &q->form;
  GroupNumbers found = {load_numbers(f->scales, group + q->scale_at, lane), vec_set(q->offset), vec_zero()};
  if (f->zeros) found.zero = vec_add(load_numbers(f->zeros, group + q->zero_at, lane), found.zero);
  if (f->biases) found.bias = load_numbers(f->biases, group + q->bias_at, lane);
  if (f->factors) {
    const Vec factor = load_numbers(f->factors, block, lane);
    found.scale = f->divides ? vec_div(found.scale, factor) : vec_mul(found.scale, factor);
    if (f->biases)
      found.bias = vec_mul(found.bias, load_numbers(f->factors, block + PANEL * number_bytes(f->factors), lane));
  }
  return found;
}

// What the numbers of a group consist of, so that loops are compiled for each: bits of a number below 8.
typedef struct {
  int has_offset, has_biases, has_scales;  // of groups of rounded rows
} Parts;
INLINE int number_of_parts(const Quantized *q) {
  return q->has_offset | (q->form.biases != NO_NUMBERS) << 1 | (q->form.activations == ROUNDED_GROUPS) << 2;
}
INLINE Parts parts_of(int number) { return (Parts){number & 1, number >> 1 & 1, number >> 2 & 1}; }

// What kernels' numbers are multiplied by to get those of rows that are not rounded: codes of a byte are the highest one of
// an integer.
INLINE float code_power(const Quantized *q) {
  return q->form.values == CODES_E4M3 ? E4M3_POWER : q->form.values <= CODES_UINT8 || q->form.values == CODES_INT6 ? 0x1p-24f : 1;
}

// What is added for a group of such rows, for each 1 of their sum.
INLINE Vec row_factor(const Quantized *q, const GroupNumbers *numbers) {
  return q->has_offset ? vec_sub(numbers->bias, vec_mul(numbers->scale, numbers->zero)) : numbers->bias;
}

// Products of one or several panels with a block's rows, over some features.
typedef struct {
  const char *panel;    // the first
  int lane, step;       // of a panel, the first output, and the outputs from one vector to the next
  const char *rows;     // a prepared block
  int64_t row, out;     // of the first product
  int64_t begin, end;   // features as they are packed; what lies in parts is cut at groups, or within one
  float *totals;        // of the groups before, [panels][rows, PANEL]
  float *partial;       // of a group of which there is more
  int64_t partial_panel;  // floats from a panel's to the next one's
} Span;

typedef void (*MultiplySpan)(int rows, int panels, const Linear *, const Span *);

enum {
  SPAN_FEATURES = 768,  // whose part of a panel stays in the cache while all rows pass it
  SPAN_PREFETCH = 4096,  // bytes ahead
};

// The end of the part of the features that begins at one of them.
INLINE int64_t span_end(const Quantized *q, int64_t padded_in, int64_t begin) {
  const int64_t group_end = (begin / q->padded_group + 1) * q->padded_group;
  int64_t end = begin + SPAN_FEATURES;
  if (q->padded_group <= SPAN_FEATURES) end = end / q->padded_group * q->padded_group;
  else if (end > group_end) end = group_end;
  return end < padded_in ? end : padded_in;
}

INLINE int64_t block_start(const Linear *l, int64_t block) { return l->num_rows * block / l->num_blocks; }

// Multiplies some panels that are read side by side by blocks of rows.
INLINE void multiply_panels(const Linear *l, int64_t panel, int panels, int64_t first_block, int64_t last_block,
                            int64_t block_bytes, MultiplySpan multiply_span, float *scratch) {
  const int64_t first_row = block_start(l, first_block), num_rows = block_start(l, last_block) - first_row;
  for (int64_t begin = 0, end; begin < l->padded_in; begin = end) {
    end = span_end(l->quantized, l->padded_in, begin);
    for (int64_t block = first_block; block < last_block; block++) {
      const int64_t row = block_start(l, block);
      for (int o = 0; o < l->panel_outs; o += l->activation ? LANES : 2 * LANES) {
        float *totals = scratch + (row - first_row) * PANEL + o;
        const Span span = {
            .panel = l->weight + panel * panel_bytes(l->quantized),
            .lane = o,
            .step = l->activation ? GATES : LANES,
            .rows = l->rows + block * block_bytes,
            .row = row,
            .out = panel * l->panel_outs + o,
            .begin = begin,
            .end = end,
            .totals = totals,
            .partial = totals + num_rows * PANEL * PANELS_AT_ONCE,
            .partial_panel = num_rows * PANEL,
        };
        multiply_span((int)(block_start(l, block + 1) - row), panels, l, &span);
      }
    }
  }
}

// Few rows wait for the weight, of which panels that are read side by side come faster than one after the other.
INLINE void multiply_blocks(const Linear *l, int64_t panel, int64_t last_panel, int64_t first_block, int64_t last_block,
                            int few_rows, int64_t block_bytes, MultiplySpan multiply_span, float *scratch) {
  const int64_t rows = block_start(l, last_block) - block_start(l, first_block);
  if (last_block - first_block == 1 && rows <= few_rows)
    for (; panel + PANELS_AT_ONCE <= last_panel; panel += PANELS_AT_ONCE)
      multiply_panels(l, panel, PANELS_AT_ONCE, first_block, last_block, block_bytes, multiply_span, scratch);
  for (; panel < last_panel; panel++)
    multiply_panels(l, panel, 1, first_block, last_block, block_bytes, multiply_span, scratch);
}
