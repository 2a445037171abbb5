// Products of a few rows of activations with rows of a weight; compiled once for AVX-512 and once for AVX2.
//
// Input features are the lanes: each product is one vector of partial sums over all of its features in order, which is
// added up in a fixed way at the end. So a row's result depends on nothing but the row and the weight, and weights stay as
// checkpoints store them. Weights in bfloat16 are widened in registers; nothing is rounded.
#include "linear.h"

#include "vectors.h"

#define INLINE static inline __attribute__((always_inline))
#ifdef __AVX512F__
enum { ROWS = 6 };
#else
enum { ROWS = 3 };
#endif

// The totals of four vectors, always added up in the same order.
INLINE __m128 totals(Vec a, Vec b, Vec c, Vec d) {
#ifdef __AVX512F__
  const Vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const Vec all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
  const Vec ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Vec cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const Vec all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
#endif
}

INLINE Vec load_weight(const void *weight, int64_t i, int is_bf16) {
  return is_bf16 ? vec_load_bf16((const uint16_t *)weight + i) : vec_load((const float *)weight + i);
}
INLINE Vec load_weight_some(Mask mask, const void *weight, int64_t i, int is_bf16) {
  return is_bf16 ? vec_load_some_bf16(mask, (const uint16_t *)weight + i)
                 : vec_load_some(mask, (const float *)weight + i);
}

// Rows by `used` outputs of `columns`, a multiple of 4; those that are not used repeat the last one.
INLINE void multiply_tile(const int rows, const int columns, int used, int is_bf16, const Linear *l, int64_t first,
                          int64_t begin) {
  const int64_t num_in = l->num_in;
  const float *x = l->x + first * num_in;
  int64_t at[8];
#pragma GCC unroll 8
  for (int c = 0; c < columns; c++) at[c] = (begin + (c < used ? c : used - 1)) * num_in;
  Vec sum[ROWS][8];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) sum[r][c] = vec_zero();
  int64_t k = 0;
  for (; k + LANES <= num_in; k += LANES) {
    Vec row[ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) row[r] = vec_load(x + r * num_in + k);
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) {
      const Vec weight = load_weight(l->weight, at[c] + k, is_bf16);
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) sum[r][c] = vec_fma(row[r], weight, sum[r][c]);
    }
  }
  if (k < num_in) {
    const Mask rest = vec_lanes(0, (int)(num_in - k));
    Vec row[ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) row[r] = vec_load_some(rest, x + r * num_in + k);
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) {
      const Vec weight = load_weight_some(rest, l->weight, at[c] + k, is_bf16);
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) sum[r][c] = vec_fma(row[r], weight, sum[r][c]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int c = 0; c < columns; c += 4) {
      const __m128 found = totals(sum[r][c], sum[r][c + 1], sum[r][c + 2], sum[r][c + 3]);
      float *y = l->y + (first + r) * l->num_out + begin + c;
      if (c + 4 <= used) {
        _mm_storeu_ps(y, found);
      } else {
        float some[4];
        _mm_storeu_ps(some, found);
        for (int i = 0; c + i < used; i++) y[i] = some[i];
      }
    }
}

// Few rows take more outputs at a time, to have as many sums under way.
INLINE void multiply_rows(const int rows, const int columns, int is_bf16, const Linear *l, int64_t first, int64_t begin,
                          int64_t end) {
  for (; begin + columns <= end; begin += columns) multiply_tile(rows, columns, columns, is_bf16, l, first, begin);
  for (; begin < end; begin += 4)
    multiply_tile(rows, 4, end - begin < 4 ? (int)(end - begin) : 4, is_bf16, l, first, begin);
}

#define ROW_CASE(n, columns) \
  case n: multiply_rows(n, columns, is_bf16, l, first, begin, end); break;
INLINE void multiply_any(int is_bf16, const Linear *l, int64_t first, int rows, int64_t begin, int64_t end) {
  switch (rows) {
#ifdef __AVX512F__
    ROW_CASE(1, 8) ROW_CASE(2, 8) ROW_CASE(3, 8) ROW_CASE(4, 4) ROW_CASE(5, 4) ROW_CASE(6, 4)
#else
    ROW_CASE(1, 8) ROW_CASE(2, 4) ROW_CASE(3, 4)
#endif
  }
}
static void multiply_f32(const Linear *l, int64_t first, int rows, int64_t begin, int64_t end) {
  multiply_any(0, l, first, rows, begin, end);
}
static void multiply_bf16(const Linear *l, int64_t first, int rows, int64_t begin, int64_t end) {
  multiply_any(1, l, first, rows, begin, end);
}
static void multiply(const Linear *l, int64_t first, int rows, int64_t begin, int64_t end) {
  (l->is_bf16 ? multiply_bf16 : multiply_f32)(l, first, rows, begin, end);
}

#ifdef __AVX512F__
const LinearKernels avx512_linear = {ROWS, multiply};
#else
const LinearKernels avx2_linear = {ROWS, multiply};
#endif
