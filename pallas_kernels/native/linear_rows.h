// What a row of activations goes through before it is multiplied, and what its products go through after; compiled for
// each instruction set.
#pragma once
#include <math.h>
#include <string.h>

#include "linear.h"
#include "vectors.h"

INLINE Vec load_param(Mask mask, const void *from, int64_t i, int is_bf16) {
  return is_bf16 ? vec_load_some_bf16(mask, (const uint16_t *)from + i) : vec_load_some(mask, (const float *)from + i);
}

// Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7.
INLINE Vec vec_erf(Vec x) {
  const Vec size = vec_max(x, vec_sub(vec_zero(), x));
  const Vec t = vec_div(vec_set(1.0f), vec_fma(vec_set(0.3275911f), size, vec_set(1.0f)));
  Vec sum = vec_fma(vec_set(1.061405429f), t, vec_set(-1.453152027f));
  sum = vec_fma(sum, t, vec_set(1.421413741f));
  sum = vec_fma(sum, t, vec_set(-0.284496736f));
  sum = vec_mul(vec_fma(sum, t, vec_set(0.254829592f)), t);
  const Vec found = vec_sub(vec_set(1.0f), vec_mul(sum, vec_exp(vec_sub(vec_zero(), vec_mul(size, size)))));
  return vec_pick(vec_below(x, vec_zero()), vec_sub(vec_zero(), found), found);
}

INLINE Vec activate(Vec x, int activation) {
  const Vec one = vec_set(1.0f), half = vec_mul(x, vec_set(0.5f));
  switch (activation) {
    case SILU: return vec_div(x, vec_add(one, vec_exp(vec_sub(vec_zero(), x))));
    case GELU: return vec_mul(half, vec_add(one, vec_erf(vec_mul(x, vec_set(0.70710678f)))));
    case GELU_TANH: {
      const Vec cube = vec_mul(vec_mul(x, x), vec_mul(x, vec_set(0.044715f)));
      return vec_mul(half, vec_add(one, vec_tanh(vec_mul(vec_set(0.79788456f), vec_add(x, cube)))));
    }
    default: return vec_max(vec_zero(), x);  // a NaN stays one
  }
}

// The factor of the norm of a row, if there is one.
INLINE Vec norm_factor(const Linear *l, const float *x) {
  if (!l->gain) return vec_set(1.0f);
  return vec_set(1.0f / sqrtf(sum_of_squares(x, l->row_features) / (float)l->row_features + l->eps));
}

// The features of a row that the weight has from feature k on.
INLINE Vec load_ordered(const Linear *l, const float *x, int64_t k, int64_t count, Vec factor) {
  float values[LANES] = {0}, gains[LANES] = {0};
  for (int64_t i = 0; i < count && i < LANES; i++) {
    const int64_t at = l->order[k + i];
    if (at < 0 || at >= l->row_features) continue;
    values[i] = x[at];
    if (!l->gain) continue;
    const uint32_t wide = l->is_gain_bf16 ? (uint32_t)((const uint16_t *)l->gain)[at] << 16 : ((const uint32_t *)l->gain)[at];
    memcpy(gains + i, &wide, sizeof wide);
  }
  return l->gain ? vec_mul(vec_mul(vec_load(values), factor), vec_load(gains)) : vec_load(values);
}

// A vector of a row as it is multiplied, from feature k on: `count` numbers, and zeros after them.
INLINE Vec load_some_prepared(const Linear *l, const float *x, int64_t k, int64_t count, Vec factor) {
  if (l->order) return load_ordered(l, x, k, count, factor);
  if (count >= LANES) {
    const Vec value = vec_load(x + k);
    if (!l->gain) return value;
    const Vec gain = l->is_gain_bf16 ? vec_load_bf16((const uint16_t *)l->gain + k) : vec_load((const float *)l->gain + k);
    return vec_mul(vec_mul(value, factor), gain);
  }
  const Mask mask = vec_lanes(0, count < 0 ? 0 : (int)count);
  const Vec value = vec_load_some(mask, x + k);
  return l->gain ? vec_mul(vec_mul(value, factor), load_param(mask, l->gain, k, l->is_gain_bf16)) : value;
}
// The same with zeros after the row's end.
INLINE Vec load_prepared(const Linear *l, const float *x, int64_t k, Vec factor) {
  return load_some_prepared(l, x, k, l->num_in - k, factor);
}

// Writes a vector of products of a row, for the outputs from `out` on.
INLINE void finish_sums(const Linear *l, int64_t row, int64_t out, Vec sum) {
  const int64_t left = l->num_out - out;
  if (left <= 0) return;
  const Mask mask = vec_lanes(0, left < LANES ? (int)left : LANES);
  if (l->bias) sum = vec_add(sum, load_param(mask, l->bias, out, l->is_bias_bf16));
  if (l->scale != 1) sum = vec_mul(sum, vec_set(l->scale));
  const int64_t at = row * l->num_out + out;
  if (l->residual) sum = vec_add(sum, vec_load_some(mask, l->residual + at));
  vec_store_some(mask, l->y + at, sum);
}

// The same for a gated weight: gates, and what they multiply.
INLINE void finish_gated(const Linear *l, int64_t row, int64_t out, Vec gate, Vec other) {
  const int64_t left = l->num_out - out;
  if (left <= 0) return;
  const Mask mask = vec_lanes(0, left < LANES ? (int)left : LANES);
  if (l->bias) {
    gate = vec_add(gate, load_param(mask, l->bias, out, l->is_bias_bf16));
    other = vec_add(other, load_param(mask, l->bias, l->num_out + out, l->is_bias_bf16));
  }
  vec_store_some(mask, l->y + row * l->num_out + out, vec_mul(activate(gate, l->activation), other));
}

// Writes two vectors of products of a row: of a gated weight gates, and what they multiply.
INLINE void finish_pair(const Linear *l, int64_t row, int64_t out, Vec first, Vec second) {
  if (l->activation) {
    finish_gated(l, row, out, first, second);
  } else {
    finish_sums(l, row, out, first);
    finish_sums(l, row, out + LANES, second);
  }
}
