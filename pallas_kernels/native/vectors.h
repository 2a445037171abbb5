// One name for the vectors of AVX-512 (16 floats) and of AVX2 (8): a file of kernels is compiled once for each.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
enum { LANES = 16 };
typedef __m512 Vec;
typedef __mmask16 Mask;
static inline Vec vec_zero(void) { return _mm512_setzero_ps(); }
static inline Vec vec_set(float x) { return _mm512_set1_ps(x); }
static inline Vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vec_store(float *p, Vec v) { _mm512_storeu_ps(p, v); }
static inline Vec vec_add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec vec_sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec vec_mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec vec_div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static inline Vec vec_fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// Of two numbers of which one is NaN, the second is returned.
static inline Vec vec_max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline Vec vec_min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline float vec_highest(Vec v) { return _mm512_reduce_max_ps(v); }
static inline float vec_total(Vec v) { return _mm512_reduce_add_ps(v); }
// Lanes first to last - 1; both may lie outside.
static inline Mask vec_lanes(int first, int last) {
  first = first < 0 ? 0 : first > LANES ? LANES : first;
  last = last < first ? first : last > LANES ? LANES : last;
  return (Mask)(((1u << last) - 1) & ~((1u << first) - 1));
}
static inline Mask vec_is_nan(Vec v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
static inline Mask mask_or(Mask a, Mask b) { return a | b; }
static inline Mask mask_but(Mask yes, Mask no) { return yes & (Mask)~no; }
static inline int mask_any(Mask m) { return m != 0; }
static inline Mask vec_below(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline Vec vec_pick(Mask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }
static inline Vec vec_load_some(Mask m, const float *p) { return _mm512_maskz_loadu_ps(m, p); }
static inline void vec_store_some(Mask m, float *p, Vec v) { _mm512_mask_storeu_ps(p, m, v); }
// A vector of pairs in bfloat16, loaded as floats, becomes that of the first of each and that of the second.
static inline void vec_split_bf16(Vec *first, Vec *second) {
  *second = (Vec)_mm512_and_si512((__m512i)*first, _mm512_set1_epi32((int)0xffff0000));
  *first = (Vec)_mm512_slli_epi32((__m512i)*first, 16);
}
static inline Mask vec_finite(Vec v) { return _mm512_cmp_ps_mask(_mm512_sub_ps(v, v), _mm512_setzero_ps(), _CMP_EQ_OQ); }
static inline Vec vec_from_bf16(__m256i x) { return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
static inline Vec vec_load_bf16(const uint16_t *p) { return vec_from_bf16(_mm256_loadu_si256((const __m256i *)p)); }
static inline Vec vec_load_some_bf16(Mask m, const uint16_t *p) { return vec_from_bf16(_mm256_maskz_loadu_epi16(m, p)); }
// Rounds to the nearest number of bfloat16, ties to even; every NaN becomes the same one.
static inline Vec vec_round_bf16(Vec v) {
  const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i rounded = _mm512_and_si512(up, _mm512_set1_epi32((int)0xffff0000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_nan, rounded, _mm512_set1_epi32(0x7fc00000)));
}
// Stores numbers that are rounded already.
static inline Vec vec_pair_bf16(Vec first, Vec second) {
  return (Vec)_mm512_or_si512((__m512i)second, _mm512_srli_epi32((__m512i)first, 16));
}
// Stores the first `count` of them with a gap of one number after each, and leaves the gaps as they are.
static inline void vec_store_apart_bf16(int count, uint16_t *p, Vec v) {
  const __mmask32 mask = 0x55555555u & (count < LANES ? (1u << 2 * count) - 1 : ~0u);
  _mm512_mask_storeu_epi16(p, mask, _mm512_srli_epi32((__m512i)v, 16));
}
// Exchanges the rows and columns of LANES vectors.
static inline void vec_transpose(Vec *v) {
  Vec pairs[16], fours[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      fours[i + 2 * j] = _mm512_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      fours[i + 2 * j + 1] = _mm512_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const Vec even = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0x88);
    const Vec odd = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0xdd);
    const Vec even_after = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0x88);
    const Vec odd_after = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0xdd);
    v[i] = _mm512_shuffle_f32x4(even, even_after, 0x88);
    v[i + 4] = _mm512_shuffle_f32x4(odd, odd_after, 0x88);
    v[i + 8] = _mm512_shuffle_f32x4(even, even_after, 0xdd);
    v[i + 12] = _mm512_shuffle_f32x4(odd, odd_after, 0xdd);
  }
}
static inline Vec vec_round(Vec v) { return _mm512_roundscale_ps(v, 8); }
// The members of a table of 16 numbers that LANES codes below 16 name.
static inline Vec vec_look_up(const float *table, const uint8_t *codes) {
  return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)), vec_load(table));
}
static inline Vec vec_scale(Vec v, Vec power) { return _mm512_scalef_ps(v, power); }
#else
enum { LANES = 8 };
typedef __m256 Vec;
typedef __m256i Mask;
static inline Vec vec_zero(void) { return _mm256_setzero_ps(); }
static inline Vec vec_set(float x) { return _mm256_set1_ps(x); }
static inline Vec vec_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vec_store(float *p, Vec v) { _mm256_storeu_ps(p, v); }
static inline Vec vec_add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec vec_sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static inline Vec vec_mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static inline Vec vec_div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
static inline Vec vec_fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vec vec_max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static inline Vec vec_min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
static inline float vec_highest(Vec v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
static inline float vec_total(Vec v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline Mask vec_lanes(int first, int last) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                             _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
}
static inline Mask vec_is_nan(Vec v) { return (Mask)_mm256_cmp_ps(v, v, _CMP_UNORD_Q); }
static inline Mask mask_or(Mask a, Mask b) { return _mm256_or_si256(a, b); }
static inline Mask mask_but(Mask yes, Mask no) { return _mm256_andnot_si256(no, yes); }
static inline int mask_any(Mask m) { return _mm256_movemask_ps((Vec)m) != 0; }
static inline Mask vec_below(Vec a, Vec b) { return (Mask)_mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline Vec vec_pick(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, (Vec)m); }
static inline Vec vec_load_some(Mask m, const float *p) { return _mm256_maskload_ps(p, m); }
static inline void vec_store_some(Mask m, float *p, Vec v) { _mm256_maskstore_ps(p, m, v); }
static inline void vec_split_bf16(Vec *first, Vec *second) {
  *second = (Vec)_mm256_and_si256((__m256i)*first, _mm256_set1_epi32((int)0xffff0000));
  *first = (Vec)_mm256_slli_epi32((__m256i)*first, 16);
}
static inline Mask vec_finite(Vec v) { return (Mask)_mm256_cmp_ps(_mm256_sub_ps(v, v), _mm256_setzero_ps(), _CMP_EQ_OQ); }
static inline Vec vec_from_bf16(__m128i x) { return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16); }
static inline Vec vec_load_bf16(const uint16_t *p) { return vec_from_bf16(_mm_loadu_si128((const __m128i *)p)); }
static inline Vec vec_load_some_bf16(Mask m, const uint16_t *p) {
  uint16_t some[8] = {0};
  int bits = _mm256_movemask_ps((Vec)m);
  for (int i = 0; i < 8; i++)
    if (bits >> i & 1) some[i] = p[i];
  return vec_load_bf16(some);
}
static inline Vec vec_round_bf16(Vec v) {
  const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i rounded = _mm256_and_si256(up, _mm256_set1_epi32((int)0xffff0000));
  const Vec is_nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), is_nan);
}
static inline Vec vec_pair_bf16(Vec first, Vec second) {
  return (Vec)_mm256_or_si256((__m256i)second, _mm256_srli_epi32((__m256i)first, 16));
}
static inline void vec_store_apart_bf16(int count, uint16_t *p, Vec v) {
  uint16_t halves[2 * LANES];
  _mm256_storeu_si256((__m256i *)halves, (__m256i)v);
  for (int i = 0; i < (count < LANES ? count : LANES); i++) p[2 * i] = halves[2 * i + 1];
}
static inline void vec_transpose(Vec *v) {
  Vec pairs[8], fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}
static inline Vec vec_round(Vec v) { return _mm256_round_ps(v, 8); }
static inline Vec vec_look_up(const float *table, const uint8_t *codes) {
  const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
  const Vec low = _mm256_permutevar8x32_ps(vec_load(table), index), high = _mm256_permutevar8x32_ps(vec_load(table + 8), index);
  return _mm256_blendv_ps(low, high, (Vec)_mm256_slli_epi32(index, 28));
}
static inline Vec vec_scale(Vec v, Vec power) {
  __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(v, (Vec)bits);
}
#endif

// The exponential, to about 1e-7 of itself; NaN stays NaN. Below -87 it is that of -87, which callers mask or ignore.
static inline Vec vec_exp(Vec x) {
  x = vec_max(vec_set(-87.0f), vec_min(vec_set(88.0f), x));
  Vec power = vec_round(vec_mul(x, vec_set(1.44269504f)));
  Vec rest = vec_fma(power, vec_set(-0.693359375f), x);
  rest = vec_fma(power, vec_set(2.12194440e-4f), rest);
  Vec sum = vec_set(1.0f / 5040);
  sum = vec_fma(sum, rest, vec_set(1.0f / 720));
  sum = vec_fma(sum, rest, vec_set(1.0f / 120));
  sum = vec_fma(sum, rest, vec_set(1.0f / 24));
  sum = vec_fma(sum, rest, vec_set(1.0f / 6));
  sum = vec_fma(sum, rest, vec_set(0.5f));
  sum = vec_fma(sum, rest, vec_set(1.0f));
  sum = vec_fma(sum, rest, vec_set(1.0f));
  return vec_scale(sum, power);
}

// The hyperbolic tangent, to about 3e-7 of itself: its series for small numbers, where 1 - 2 / (e^2x + 1) cancels.
static inline Vec vec_tanh(Vec x) {
  const Vec square = vec_mul(x, x);
  Vec series = vec_fma(vec_set(-1382.0f / 155925), square, vec_set(62.0f / 2835));
  series = vec_fma(series, square, vec_set(-17.0f / 315));
  series = vec_fma(series, square, vec_set(2.0f / 15));
  series = vec_fma(series, square, vec_set(-1.0f / 3));
  series = vec_fma(vec_mul(series, square), x, x);
  const Vec power = vec_exp(vec_add(x, x));
  const Vec other = vec_sub(vec_set(1), vec_div(vec_set(2), vec_add(power, vec_set(1))));
  return vec_pick(vec_below(square, vec_set(0.16f)), series, other);
}

static inline float exp_of(float x) {
  float lanes[LANES];
  vec_store(lanes, vec_exp(vec_set(x)));
  return lanes[0];
}

// Every instruction set adds up in an order of its own, which follows the count alone.
static inline float sum_of_squares(const float *x, int64_t count) {
  Vec sums[4] = {vec_zero(), vec_zero(), vec_zero(), vec_zero()};
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    for (int j = 0; j < 4; j++) {
      const Vec value = vec_load(x + i + j * LANES);
      sums[j] = vec_fma(value, value, sums[j]);
    }
  for (; i < count; i += LANES) {
    const Vec value = vec_load_some(vec_lanes(0, count - i < LANES ? (int)(count - i) : LANES), x + i);
    sums[0] = vec_fma(value, value, sums[0]);
  }
  return vec_total(vec_add(vec_add(sums[0], sums[1]), vec_add(sums[2], sums[3])));
}
