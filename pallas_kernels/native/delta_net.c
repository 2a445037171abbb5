// The gated delta net of a key head and the value heads that it serves; compiled once for AVX-512 and once for AVX2.
#include "recurrent_lanes.h"

enum { COLUMNS = 2 };  // vectors of values that pass over a state together
static const float UNIT_EPS = 1e-6f;

// Queries, keys and values of a block's tokens, which lie `step` numbers apart. Decays are one number per token, or one
// per key of each token; `decayed` then has the keys times their decays. Both lie `decay_step` numbers apart.
typedef struct {
  const float *query, *key, *value, *decay, *decayed, *beta;
  float *o;
  int64_t step, decay_step, o_step, count, keys;
  // What is needed soon of the projection, a head of each token, `soon_step` numbers apart; read ahead, since neighbouring
  // tokens lie on different pages of memory.
  const float *soon[4];
  int64_t soon_step;
} Tokens;

// The tokens of a block pass over some columns of a head's state. The pass that updates it by a token also multiplies it
// by the next one's key, times its decays if each key has one.
INLINE void apply_rule(const int columns, const int per_key, const Tokens *x, float *state) {
  Vec even[COLUMNS], odd[COLUMNS];
  const int64_t keys = x->keys, last = keys - keys % 2, read_step = per_key ? x->decay_step : x->step;
  const float *read = per_key ? x->decayed : x->key;
  for (int c = 0; c < columns; c++) even[c] = odd[c] = vec_zero();
  for (int64_t i = 0; i < last; i += 2)
    for (int c = 0; c < columns; c++) {
      const float *p = state + i * GROUP + column_offset(c, keys);
      even[c] = vec_fma(vec_load(p), vec_set(read[i]), even[c]);
      odd[c] = vec_fma(vec_load(p + GROUP), vec_set(read[i + 1]), odd[c]);
    }
  if (last < keys)
    for (int c = 0; c < columns; c++)
      even[c] = vec_fma(vec_load(state + last * GROUP + column_offset(c, keys)), vec_set(read[last]), even[c]);
  for (int64_t t = 0; t < x->count; t++) {
    const float *query = x->query + t * x->step, *key = x->key + t * x->step, *decays = x->decay + t * x->decay_step;
    const float *next = read + (t + 1 < x->count ? t + 1 : t) * read_step;
    const Vec decay = vec_set(decays[0]), beta = vec_set(x->beta[t]);
    Vec delta[COLUMNS], o_even[COLUMNS], o_odd[COLUMNS];
    for (int c = 0; c < columns; c++) {
      const Vec sum = vec_add(even[c], odd[c]), found = per_key ? sum : vec_mul(decay, sum);
      delta[c] = vec_mul(beta, vec_sub(vec_load(x->value + t * x->step + c * LANES), found));
      even[c] = odd[c] = o_even[c] = o_odd[c] = vec_zero();
    }
    for (int i = 0; i < 4; i++)
      for (int c = 0; c < columns * LANES; c += GROUP)
        _mm_prefetch((const char *)(x->soon[i] + t * x->soon_step + c), _MM_HINT_T1);
    for (int64_t i = 0; i < last; i += 2) {
      const Vec k0 = vec_set(key[i]), k1 = vec_set(key[i + 1]), q0 = vec_set(query[i]), q1 = vec_set(query[i + 1]);
      const Vec n0 = vec_set(next[i]), n1 = vec_set(next[i + 1]);
      const Vec d0 = per_key ? vec_set(decays[i]) : decay, d1 = per_key ? vec_set(decays[i + 1]) : decay;
      for (int c = 0; c < columns; c++) {
        float *p = state + i * GROUP + column_offset(c, keys);
        if (x->count == 1) read_ahead(p + columns * LANES * keys, 2 * GROUP);  // from memory, while this is in the cache
        const Vec a = vec_fma(vec_load(p), d0, vec_mul(k0, delta[c]));
        const Vec b = vec_fma(vec_load(p + GROUP), d1, vec_mul(k1, delta[c]));
        vec_store(p, a);
        vec_store(p + GROUP, b);
        o_even[c] = vec_fma(a, q0, o_even[c]);
        o_odd[c] = vec_fma(b, q1, o_odd[c]);
        even[c] = vec_fma(a, n0, even[c]);
        odd[c] = vec_fma(b, n1, odd[c]);
      }
    }
    if (last < keys)
      for (int c = 0; c < columns; c++) {
        float *p = state + last * GROUP + column_offset(c, keys);
        const Vec own = per_key ? vec_set(decays[last]) : decay;
        const Vec a = vec_fma(vec_load(p), own, vec_mul(vec_set(key[last]), delta[c]));
        vec_store(p, a);
        o_even[c] = vec_fma(a, vec_set(query[last]), o_even[c]);
        even[c] = vec_fma(a, vec_set(next[last]), even[c]);
      }
    for (int c = 0; c < columns; c++) vec_store(x->o + t * x->o_step + c * LANES, vec_add(o_even[c], o_odd[c]));
  }
}
static __attribute__((noinline)) void apply_rule_2(const Tokens *x, float *state) { apply_rule(COLUMNS, 0, x, state); }
static __attribute__((noinline)) void apply_rule_1(const Tokens *x, float *state) { apply_rule(1, 0, x, state); }
static __attribute__((noinline)) void apply_key_rule_2(const Tokens *x, float *state) { apply_rule(COLUMNS, 1, x, state); }
static __attribute__((noinline)) void apply_key_rule_1(const Tokens *x, float *state) { apply_rule(1, 1, x, state); }

// All tiles of a head.
static void apply_rule_to_head(Tokens x, int per_key, float *state, int64_t values) {
  void (*const apply_2)(const Tokens *, float *) = per_key ? apply_key_rule_2 : apply_rule_2;
  int64_t v = 0;
  for (; v + COLUMNS * LANES <= values; v += COLUMNS * LANES, x.value += COLUMNS * LANES, x.o += COLUMNS * LANES) {
    apply_2(&x, state + v * x.keys);
    for (int i = 0; i < 4; i++) x.soon[i] += COLUMNS * LANES;
  }
  if (v < values) (per_key ? apply_key_rule_1 : apply_rule_1)(&x, state + v * x.keys);
}

// x / sqrt(sum x^2 + eps) * scale
INLINE void make_unit(float *x, int64_t count, float scale) {
  Wide sum = wide_set(0);
  for (int64_t i = 0; i < count; i += GROUP) {
    const Wide some = wide_load(x + i);
    sum = wide_fma(some, some, sum);
  }
  const Wide factor = wide_set(scale / sqrtf(wide_total(sum) + UNIT_EPS));
  for (int64_t i = 0; i < count; i += GROUP) wide_store(x + i, wide_mul(wide_load(x + i), factor));
}

// Convolves `count` channels from `channel` on.
static void convolve_head(const DeltaNet *d, Block block, int64_t channel, int64_t count, float *y, int64_t y_step) {
  const float *x = d->projected + block.first * d->width + channel;
  for (int64_t c = 0; c < count; c += GROUP)
    convolve(0, &d->convolution, block, count - c,
             (Channels){.x = x + c, .step = d->width, .y = y + c, .y_step = y_step, .channel = channel + c});
}

// The norm of a value head's results, then the gate.
static void finish_head(const DeltaNet *d, Block block, int64_t head, const float *o, int64_t o_step) {
  enum { AHEAD = 2 };
  const int64_t values = d->value_dim, inner = d->value_heads * values, channels = d->convolution.channels;
  for (int64_t t = 0; t < block.count; t++, o += o_step) {
    const float *gate = d->projected + (block.first + t) * d->width + channels + head * values;
    float *out = d->out + (block.first + t) * inner + head * values;
    Wide sum = wide_set(0);
    for (int64_t v = 0; v < values; v += GROUP) {
      _mm_prefetch((const char *)(gate + AHEAD * d->width + v), _MM_HINT_T0);
      const Wide some = wide_load(o + v);
      sum = wide_fma(some, some, sum);
    }
    const Wide factor = wide_set(1 / sqrtf(wide_total(sum) / (float)values + d->eps));
    for (int64_t v = 0; v < values; v += GROUP) {
      const Wide normed = wide_mul(wide_load_some(values - v, d->norm + v), wide_mul(wide_load(o + v), factor));
      const Wide z = wide_load_some(values - v, gate + v);
      wide_store_some(values - v, out + v, wide_mul(normed, d->has_key_decays ? wide_sigmoid(z) : wide_silu(z)));
    }
  }
}

INLINE Wide decay_of(Wide a, Wide bias, float rate) {
  return wide_exp(wide_mul(wide_set(rate), wide_softplus(wide_add(a, bias))));
}

// How much of the state each token of a block keeps, and how much of its delta it adds.
static void compute_gates(const DeltaNet *d, Block block, int64_t head, float *decay, float *beta) {
  const float rate = -exp_of(d->a_log[head]);
  const float *b = d->projected + block.first * d->width + d->width - d->value_heads - num_decays(d) + head;
  const float *a = b + d->value_heads;
  for (int64_t t = 0; t < block.count; t += GROUP) {
    if (!d->has_key_decays) {
      const Wide some = wide_gather(block.count - t, a + t * d->width, d->width);
      wide_store(decay + t, decay_of(some, wide_set(d->dt_bias[head]), rate));
    }
    wide_store(beta + t, wide_sigmoid(wide_gather(block.count - t, b + t * d->width, d->width)));
  }
}

// The decays of a head's keys for each token of a block, and the keys, `step` numbers apart, times these.
static void compute_key_decays(const DeltaNet *d, Block block, int64_t head, const float *key, int64_t step, float *decay,
                               float *decayed) {
  const int64_t keys = d->key_dim, padded = whole_groups(keys);
  const float rate = -exp_of(d->a_log[head]), *bias = d->dt_bias + head * keys;
  const float *a = d->projected + (block.first + 1) * d->width - num_decays(d) + head * keys;
  for (int64_t t = 0; t < block.count; t++, a += d->width, key += step, decay += padded, decayed += padded)
    for (int64_t i = 0; i < keys; i += GROUP) {
      const Wide some = decay_of(wide_load_some(keys - i, a + i), wide_load_some(keys - i, bias + i), rate);
      wide_store(decay + i, some);
      wide_store(decayed + i, wide_mul(wide_load(key + i), some));
    }
}

static void compute_heads(const DeltaNet *d, int64_t row, int64_t key_head, float *scratch) {
  const int64_t keys = whole_groups(d->key_dim), values = whole_groups(d->value_dim), share = d->value_heads / d->key_heads;
  const int64_t step = 2 * keys + share * values, size = d->key_dim * values;
  const int64_t first_value = 2 * d->key_heads * d->key_dim;
  float *x = scratch, *o = x + BLOCK_TOKENS * step, *beta = o + BLOCK_TOKENS * values, *decay = beta + BLOCK_TOKENS;
  float *decayed = d->has_key_decays ? decay + BLOCK_TOKENS * keys : decay;
  Block block;
  for (int64_t done = 0; done < d->rows.lens[row]; done += block.count) {
    block = block_after(&d->rows, row, done);
    convolve_head(d, block, key_head * d->key_dim, d->key_dim, x, step);
    convolve_head(d, block, (d->key_heads + key_head) * d->key_dim, d->key_dim, x + keys, step);
    for (int64_t t = 0; t < block.count; t++) {
      make_unit(x + t * step, keys, 1 / sqrtf((float)d->key_dim));
      make_unit(x + t * step + keys, keys, 1);
    }
    for (int64_t j = 0; j < share; j++) {
      const int64_t head = key_head * share + j;
      float *state = d->state + (block.page * d->value_heads + head) * size, *value = x + 2 * keys + j * values;
      convolve_head(d, block, first_value + head * d->value_dim, d->value_dim, value, step);
      compute_gates(d, block, head, decay, beta);
      if (d->has_key_decays) compute_key_decays(d, block, head, x + keys, step, decay, decayed);
      if (block.is_new) __builtin_memset(state, 0, sizeof(float) * size);
      const float *now = d->projected + block.first * d->width, *after = now + block.count * d->width;
      const float *after_value = j + 1 < share ? now + d->value_dim : after - (share - 1) * d->value_dim;
      Tokens tokens = {
          .query = x,
          .key = x + keys,
          .value = value,
          .decay = decay,
          .decayed = decayed,
          .beta = beta,
          .o = o,
          .step = step,
          .decay_step = d->has_key_decays ? keys : 1,
          .o_step = values,
          .count = block.count,
          .keys = d->key_dim,
          .soon = {now + d->convolution.channels + head * d->value_dim, after_value + first_value + head * d->value_dim,
                   after + key_head * d->key_dim, after + (d->key_heads + key_head) * d->key_dim},
          .soon_step = d->width,
      };
      apply_rule_to_head(tokens, d->has_key_decays, state, values);
      if (block.snapshot >= 0)
        copy_past_caches(d->state + (block.snapshot * d->value_heads + head) * size, state, size);
      finish_head(d, block, head, o, values);
    }
  }
}

#ifdef __AVX512F__
void avx512_delta_net(const DeltaNet *d, int64_t row, int64_t key_head, float *scratch) {
  compute_heads(d, row, key_head, scratch);
}
#else
void avx2_delta_net(const DeltaNet *d, int64_t row, int64_t key_head, float *scratch) {
  compute_heads(d, row, key_head, scratch);
}
#endif
