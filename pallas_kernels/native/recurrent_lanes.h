// 16 floats in one register of AVX-512 or two of AVX2: lanes are independent, multiply-adds are written out, and sums over
// lanes have one order, so that both give the same bits.
#pragma once
#include <math.h>

#include "recurrent.h"
#include "vectors.h"

enum { PARTS = GROUP / LANES };
typedef struct {
  Vec part[PARTS];
} Wide;

#define EACH_PART for (int i = 0; i < PARTS; i++)

INLINE Wide wide_set(float x) {
  Wide y;
  EACH_PART y.part[i] = vec_set(x);
  return y;
}
INLINE Wide wide_load(const float *p) {
  Wide y;
  EACH_PART y.part[i] = vec_load(p + i * LANES);
  return y;
}
INLINE void wide_store(float *p, Wide x) { EACH_PART vec_store(p + i * LANES, x.part[i]); }
// The first `count` of them; the others are zeros.
INLINE Wide wide_load_some(int64_t count, const float *p) {
  if (count >= GROUP) return wide_load(p);
  Wide y;
  EACH_PART y.part[i] = vec_load_some(vec_lanes(0, (int)count - i * LANES), p + i * LANES);
  return y;
}
INLINE void wide_store_some(int64_t count, float *p, Wide x) {
  if (count >= GROUP) wide_store(p, x);
  else EACH_PART vec_store_some(vec_lanes(0, (int)count - i * LANES), p + i * LANES, x.part[i]);
}
INLINE Wide wide_mul(Wide a, Wide b) {
  EACH_PART a.part[i] = vec_mul(a.part[i], b.part[i]);
  return a;
}
INLINE Wide wide_fma(Wide a, Wide b, Wide c) {
  EACH_PART c.part[i] = vec_fma(a.part[i], b.part[i], c.part[i]);
  return c;
}
// x / (1 + exp(-x))
INLINE Wide wide_silu(Wide x) {
  EACH_PART x.part[i] =
      vec_div(x.part[i], vec_add(vec_set(1), vec_exp(vec_sub(vec_zero(), x.part[i]))));
  return x;
}
INLINE float wide_total(Wide x) {
#ifdef __AVX512F__
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(x.part[0]), _mm512_extractf32x8_ps(x.part[0], 1));
#else
  const __m256 halves = _mm256_add_ps(x.part[0], x.part[1]);
#endif
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// Of columns of LANES values: where each begins in the tiles of a head.
INLINE int64_t column_offset(int column, int64_t keys) {
  return (int64_t)(column * LANES / GROUP) * keys * GROUP + column * LANES % GROUP;
}

INLINE void read_ahead(const float *p, int64_t count) {
  for (int64_t i = 0; i < count; i += GROUP) _mm_prefetch((const char *)(p + i), _MM_HINT_T0);
}

// Copies whole groups of a head's state past the caches, as the copy is not read soon.
INLINE void copy_past_caches(float *to, const float *from, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES)
#ifdef __AVX512F__
    _mm512_stream_ps(to + i, vec_load(from + i));
#else
    _mm256_stream_ps(to + i, vec_load(from + i));
#endif
  _mm_sfence();
}

// log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), and the logarithm of 1 + u as the series of 2 artanh(u / (2 + u)).
INLINE Wide wide_softplus(Wide x) {
  EACH_PART {
    const Vec v = x.part[i], u = vec_exp(vec_min(vec_sub(vec_zero(), v), v));
    const Vec s = vec_div(u, vec_add(vec_set(2), u)), square = vec_mul(s, s);
    Vec sum = vec_set(2.0f / 15);
    sum = vec_fma(sum, square, vec_set(2.0f / 13));
    sum = vec_fma(sum, square, vec_set(2.0f / 11));
    sum = vec_fma(sum, square, vec_set(2.0f / 9));
    sum = vec_fma(sum, square, vec_set(2.0f / 7));
    sum = vec_fma(sum, square, vec_set(2.0f / 5));
    sum = vec_fma(sum, square, vec_set(2.0f / 3));
    sum = vec_fma(sum, square, vec_set(2));
    x.part[i] = vec_fma(s, sum, vec_max(vec_zero(), v));
  }
  return x;
}
INLINE Wide wide_exp(Wide x) {
  EACH_PART x.part[i] = vec_exp(x.part[i]);
  return x;
}
INLINE Wide wide_sigmoid(Wide x) {
  EACH_PART x.part[i] = vec_div(vec_set(1), vec_add(vec_set(1), vec_exp(vec_sub(vec_zero(), x.part[i]))));
  return x;
}
INLINE Wide wide_clip(Wide x, float least, float most) {
  EACH_PART x.part[i] = vec_min(vec_set(most), vec_max(vec_set(least), x.part[i]));
  return x;
}
// Numbers of up to 16 tokens, `step` apart; the others are zeros.
INLINE Wide wide_gather(int64_t count, const float *p, int64_t step) {
  float lanes[GROUP] = {0};
  for (int64_t i = 0; i < count && i < GROUP; i++) lanes[i] = p[i * step];
  return wide_load(lanes);
}
INLINE Wide wide_add(Wide a, Wide b) {
  EACH_PART a.part[i] = vec_add(a.part[i], b.part[i]);
  return a;
}

// What a group of channels reads and writes: x, times `factor` if there is one, is convolved, and the result is activated
// by SiLU, or multiplied by `gate` if there is one.
typedef struct {
  const float *x, *factor, *gate;
  int64_t step;  // from a token to the next
  float *y;
  int64_t y_step;
  int64_t channel;  // of the convolution
} Channels;

INLINE void convolve_by(const int taps, const int64_t lanes, const int is_gated, const Convolution *c, Block block,
                        Channels from) {
  enum { AHEAD = 6 };
  Wide weight[MOST_TAPS], past[MOST_TAPS];
  float *tail = c->tail + block.page * (taps - 1) * c->channels + from.channel;
  const Wide bias = c->bias ? wide_load_some(lanes, c->bias + from.channel) : wide_set(0);
  for (int i = 0; i < taps; i++) weight[i] = wide_load_some(lanes, c->weight + i * c->channels + from.channel);
  for (int i = 0; i < taps - 1; i++)
    past[i] = block.is_new ? wide_set(0) : wide_load_some(lanes, tail + i * c->channels);
  for (int64_t t = 0; t < block.count; t++) {
    _mm_prefetch((const char *)(from.x + (t + AHEAD) * from.step), _MM_HINT_T0);
    past[taps - 1] = wide_load_some(lanes, from.x + t * from.step);
    if (is_gated) past[taps - 1] = wide_mul(wide_load_some(lanes, from.factor + t * from.step), past[taps - 1]);
    Wide sum = bias;
    for (int i = 0; i < taps; i++) sum = wide_fma(weight[i], past[i], sum);
    if (is_gated)
      wide_store_some(lanes, from.y + t * from.y_step, wide_mul(wide_load_some(lanes, from.gate + t * from.step), sum));
    else wide_store(from.y + t * from.y_step, wide_silu(sum));
    for (int i = 0; i < taps - 1; i++) past[i] = past[i + 1];
  }
  for (int i = 0; i < taps - 1; i++) wide_store_some(lanes, tail + i * c->channels, past[i]);
  if (block.snapshot >= 0)
    for (int i = 0; i < taps - 1; i++)
      wide_store_some(lanes, tail + ((block.snapshot - block.page) * (taps - 1) + i) * c->channels, past[i]);
}

// Convolves the tokens of a block in one group of up to 16 channels, and moves its tail.
INLINE void convolve(const int is_gated, const Convolution *c, Block block, int64_t lanes, Channels from) {
  if (c->taps == 4 && lanes >= GROUP) convolve_by(4, GROUP, is_gated, c, block, from);
  else if (c->taps == 4) convolve_by(4, lanes, is_gated, c, block, from);
  else if (c->taps == 3 && lanes >= GROUP) convolve_by(3, GROUP, is_gated, c, block, from);
  else if (c->taps == 3) convolve_by(3, lanes, is_gated, c, block, from);
  else convolve_by(2, lanes, is_gated, c, block, from);
}
