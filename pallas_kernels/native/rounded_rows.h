// Rows that are rounded to int8, for quantized weights; compiled for each instruction set.
#pragma once
#include "quantized_rows.h"

// Numbers of each group of a row.
enum {
  CENTER_SUM,    // int: the sum of the row times the center of codes
  ROW_SUM,       // the sum of the row
  ROW_SCALE,     // of the row's numbers, or 1 where a row has one scale: it comes last
  SCALED_SUM,    // both multiplied
  GROUP_NUMBERS
};

typedef struct {
  int8_t *bytes;   // [padded_in], in the order of quads: of codes of less than a byte, even features before odd ones
  float *numbers;  // [groups][GROUP_NUMBERS]
  float scale;     // of all groups
} RoundedRow;

// The scale of some numbers: NaN if there is one among them.
INLINE float scale_of(const float *x, int64_t count) {
  Vec most = vec_zero(), unlike = vec_zero();
  for (int64_t k = 0; k < count; k += LANES) {
    const Vec value = vec_load_some(vec_lanes(0, count - k < LANES ? (int)(count - k) : LANES), x + k);
    most = vec_max(most, vec_max(value, vec_sub(vec_zero(), value)));
    unlike = vec_add(unlike, vec_sub(value, value));  // NaN where a number is NaN or infinite
  }
  const float highest = vec_highest(most), bad = vec_total(unlike);
  return bad != 0 || bad != bad ? bad : highest == 0 ? 1 : highest * (float)(1.0 / 127);
}

// Rounds numbers to multiples of a scale; returns their sum.
INLINE int32_t round_numbers(const float *x, int64_t count, int64_t padded, float scale, int8_t *to) {
  Ints sum = ints_zero();
  const Vec inverse = vec_set(1 / scale);
  for (int64_t k = 0; k < padded; k += LANES) {
    const int64_t given = count - k, left = padded - k;
    const Vec value = vec_load_some(vec_lanes(0, given < 0 ? 0 : given < LANES ? (int)given : LANES), x + k);
    const Ints rounded = ints_clamp(ints_round(vec_mul(value, inverse)), 127);
    sum = ints_add(sum, rounded);
    int8_t bytes[LANES];
    if (left >= LANES) {
      ints_store_bytes(to + k, rounded);
    } else {
      ints_store_bytes(bytes, rounded);
      for (int64_t i = 0; i < left; i++) to[k + i] = bytes[i];
    }
  }
  return ints_total(sum);
}

// `scratch` has room for [2, padded_in] floats.
INLINE RoundedRow round_row(const Linear *l, int64_t row, float *scratch, float *numbers) {
  const Quantized *q = l->quantized;
  const Form *f = &q->form;
  const float *x = l->x + row * l->row_features;
  const Vec factor = norm_factor(l, x);
  for (int64_t k = 0; k < l->num_in; k += LANES) {
    const int64_t left = l->num_in - k;
    vec_store_some(vec_lanes(0, left < LANES ? (int)left : LANES), scratch + k, load_prepared(l, x, k, factor));
  }
  RoundedRow found = {(int8_t *)(scratch + l->padded_in), numbers, 1};
  if (f->activations == ROUNDED_ROWS) found.scale = scale_of(scratch, l->num_in);
  for (int64_t g = 0; g < q->num_groups; g++, numbers += GROUP_NUMBERS) {
    const float *from = scratch + g * f->group;
    const float own = f->activations == ROUNDED_GROUPS ? scale_of(from, f->group) : 1;
    const float scale = f->activations == ROUNDED_GROUPS ? own : found.scale;
    const int32_t sum = round_numbers(from, f->group, q->padded_group, scale, found.bytes + g * q->padded_group);
    const int32_t center_sum = q->center * sum;
    memcpy(numbers + CENTER_SUM, &center_sum, sizeof center_sum);
    numbers[ROW_SUM] = (float)sum;
    numbers[ROW_SCALE] = own;
    numbers[SCALED_SUM] = (float)sum * own;
  }
  if (f->values == CODES_UINT4 || f->values == CODES_INT6) {
    const __m128i order = _mm_set1_epi64x(0x0705030106040200);
    for (int64_t k = 0; k < l->padded_in; k += 8) {
      __m128i *eight = (__m128i *)(found.bytes + k);
      _mm_storel_epi64(eight, _mm_shuffle_epi8(_mm_loadl_epi64(eight), order));
    }
  }
  return found;
}

// The numbers of a group for sums of integers.
INLINE GroupNumbers whole_numbers_of(const Quantized *q, const char *block, const char *group, int lane) {
  GroupNumbers found = numbers_of(q, block, group, lane);
  found.scale = vec_mul(found.scale, vec_set(q->table_scale));
  return found;
}

// The members of the table that the lower halves of bytes name.
INLINE Ints whole_table_of(const Quantized *q) {
  const __m128i table = _mm_loadu_si128((const __m128i *)q->whole_table);
#ifdef __AVX512F__
  return _mm512_broadcast_i32x4(table);
#else
  return _mm256_broadcastsi128_si256(table);
#endif
}

// What a group of a row adds: of `total` for a vector of outputs, whose products with the codes are `sum`.
INLINE Vec add_rounded(const Parts parts, const GroupNumbers *of_group, Ints sum, const float *of_row, int64_t stride,
                       Vec total) {
  Vec value = vec_from_ints(sum);
  if (parts.has_offset) value = vec_sub(value, vec_mul(of_group->zero, vec_set(of_row[ROW_SUM * stride])));
  if (parts.has_scales) value = vec_mul(value, vec_set(of_row[ROW_SCALE * stride]));
  total = vec_fma(value, of_group->scale, total);
  return parts.has_biases ? vec_fma(of_group->bias, vec_set(of_row[SCALED_SUM * stride]), total) : total;
}
