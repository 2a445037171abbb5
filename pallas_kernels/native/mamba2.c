// The heads of a Mamba-2 layer, and its gated norm; compiled once for AVX-512 and once for AVX2.
#include "recurrent_lanes.h"

enum { COLUMNS = 2 };  // vectors of values that pass over a state together

// Inputs of a block's tokens: x [count][x_step], B and C [count][2][padded], and results.
typedef struct {
  const float *x, *b, *dt, *decay;
  float *y;
  int64_t x_step, padded, keys, count;
  float d;
  // What is needed soon of the projection, a head of each token, `soon_step` numbers apart; read ahead, since neighbouring
  // tokens lie on different pages of memory.
  const float *soon[2];
  int64_t soon_step;
} Tokens;

// `count` tokens (1 or 2) from t on in one pass over some columns of a head's state: two save half of its loads and
// stores, with the same operations on each number.
INLINE void update_by(const int columns, const int count, const Tokens *x, int64_t t, float *state) {
  const int64_t keys = x->keys, last = keys - keys % 2;
  Vec step[2][COLUMNS], even[2][COLUMNS], odd[2][COLUMNS], decay[2];
  const float *b[2], *c[2];
  for (int n = 0; n < count; n++) {
    b[n] = x->b + (t + n) * 2 * x->padded;
    c[n] = b[n] + x->padded;
    decay[n] = vec_set(x->decay[t + n]);
    for (int i = 0; i < columns; i++) {
      step[n][i] = vec_mul(vec_set(x->dt[t + n]), vec_load(x->x + (t + n) * x->x_step + i * LANES));
      even[n][i] = odd[n][i] = vec_zero();
    }
    for (int i = 0; i < 2; i++) read_ahead(x->soon[i] + (t + n) * x->soon_step, columns * LANES);
  }
  for (int64_t k = 0; k < last; k += 2)
    for (int i = 0; i < columns; i++) {
      float *p = state + k * GROUP + column_offset(i, keys);
      Vec first = vec_load(p), second = vec_load(p + GROUP);
      if (x->count == 1) read_ahead(p + columns * LANES * keys, 2 * GROUP);  // from memory, while this is in the cache
      for (int n = 0; n < count; n++) {
        first = vec_fma(first, decay[n], vec_mul(vec_set(b[n][k]), step[n][i]));
        second = vec_fma(second, decay[n], vec_mul(vec_set(b[n][k + 1]), step[n][i]));
        even[n][i] = vec_fma(first, vec_set(c[n][k]), even[n][i]);
        odd[n][i] = vec_fma(second, vec_set(c[n][k + 1]), odd[n][i]);
      }
      vec_store(p, first);
      vec_store(p + GROUP, second);
    }
  if (last < keys)
    for (int i = 0; i < columns; i++) {
      float *p = state + last * GROUP + column_offset(i, keys);
      Vec first = vec_load(p);
      for (int n = 0; n < count; n++) {
        first = vec_fma(first, decay[n], vec_mul(vec_set(b[n][last]), step[n][i]));
        even[n][i] = vec_fma(first, vec_set(c[n][last]), even[n][i]);
      }
      vec_store(p, first);
    }
  for (int n = 0; n < count; n++)
    for (int i = 0; i < columns; i++) {
      const int64_t place = (t + n) * x->x_step + i * LANES;
      vec_store(x->y + place, vec_fma(vec_set(x->d), vec_load(x->x + place), vec_add(even[n][i], odd[n][i])));
    }
}
INLINE void update_columns(const int columns, const Tokens *x, float *state) {
  int64_t t = 0;
  for (; t + 1 < x->count; t += 2) update_by(columns, 2, x, t, state);
  if (t < x->count) update_by(columns, 1, x, t, state);
}
static __attribute__((noinline)) void update_2(const Tokens *x, float *state) { update_columns(COLUMNS, x, state); }
static __attribute__((noinline)) void update_1(const Tokens *x, float *state) { update_columns(1, x, state); }

// All tiles of a head.
static void update_head(Tokens x, float *state, int64_t values) {
  int64_t v = 0;
  for (; v + COLUMNS * LANES <= values; v += COLUMNS * LANES, x.x += COLUMNS * LANES, x.y += COLUMNS * LANES) {
    update_2(&x, state + v * x.keys);
    for (int i = 0; i < 2; i++) x.soon[i] += COLUMNS * LANES;
  }
  if (v < values) update_1(&x, state + v * x.keys);
}

static void convolve_shared(const Mamba2 *m, int64_t row, int64_t group) {
  const int64_t padded = whole_groups(m->state_dim), each = padded / GROUP;
  const int64_t key = group % each * GROUP, is_c = group / each % 2, g = group / each / 2, inner = m->heads * m->head_dim;
  const int64_t channel = inner + (is_c * m->groups + g) * m->state_dim + key;
  Block block;
  for (int64_t done = 0; done < m->rows.lens[row]; done += block.count) {
    block = block_after(&m->rows, row, done);
    float *y = m->shared + ((g * m->num_tokens + block.first) * 2 + is_c) * padded + key;
    const float *x = m->projected + block.first * m->width + inner + channel;
    convolve(0, &m->convolution, block, m->state_dim - key,
             (Channels){.x = x, .step = m->width, .y = y, .y_step = 2 * padded, .channel = channel});
  }
}

// The results of a block's tokens times their gates, where these come first.
static void finish_head(const Mamba2 *m, Block block, int64_t head, const float *y, int64_t y_step) {
  const int64_t values = m->head_dim, inner = m->heads * values;
  for (int64_t t = 0; t < block.count; t++) {
    const float *gate = m->projected + (block.first + t) * m->width + head * values;
    float *out = m->out + (block.first + t) * inner + head * values;
    for (int64_t v = 0; v < values; v += GROUP) {
      Wide some = wide_load(y + t * y_step + v);
      if (m->is_gated && !m->is_before_gate) some = wide_mul(some, wide_silu(wide_load_some(values - v, gate + v)));
      wide_store_some(values - v, out + v, some);
    }
  }
}

static void compute_head(const Mamba2 *m, int64_t row, int64_t head, float *scratch) {
  const int64_t values = whole_groups(m->head_dim), padded = whole_groups(m->state_dim), size = m->state_dim * values;
  const int64_t inner = m->heads * m->head_dim, group = head / (m->heads / m->groups);
  float *x = scratch, *y = x + BLOCK_TOKENS * values, *decay = y + BLOCK_TOKENS * values, *dt = decay + BLOCK_TOKENS;
  const float rate = -exp_of(m->a_log[head]);
  Block block;
  for (int64_t done = 0; done < m->rows.lens[row]; done += block.count) {
    block = block_after(&m->rows, row, done);
    const float *projected = m->projected + block.first * m->width;
    for (int64_t v = 0; v < m->head_dim; v += GROUP)
      convolve(0, &m->convolution, block, m->head_dim - v,
               (Channels){.x = projected + inner + head * m->head_dim + v, .step = m->width, .y = x + v, .y_step = values,
                          .channel = head * m->head_dim + v});
    for (int64_t t = 0; t < block.count; t += GROUP) {
      const Wide raw = wide_gather(block.count - t, projected + (t + 1) * m->width - m->heads + head, m->width);
      const Wide step = wide_clip(wide_softplus(wide_add(raw, wide_set(m->dt_bias[head]))), m->least, m->most);
      wide_store(dt + t, step);
      wide_store(decay + t, wide_exp(wide_mul(wide_set(rate), step)));
    }
    float *state = m->state + (block.page * m->heads + head) * size;
    if (block.is_new) __builtin_memset(state, 0, sizeof(float) * size);
    const float *b = m->shared + (group * m->num_tokens + block.first) * 2 * padded;
    Tokens tokens = {
        .x = x,
        .b = b,
        .dt = dt,
        .decay = decay,
        .y = y,
        .x_step = values,
        .padded = padded,
        .keys = m->state_dim,
        .count = block.count,
        .d = m->d[head],
        .soon = {projected + head * m->head_dim, projected + block.count * m->width + inner + head * m->head_dim},
        .soon_step = m->width,
    };
    update_head(tokens, state, values);
    if (block.snapshot >= 0)
      copy_past_caches(m->state + (block.snapshot * m->heads + head) * size, state, size);
    finish_head(m, block, head, y, values);
  }
}

static void normalize(const Mamba2 *m, int64_t first, int64_t last) {
  const int64_t inner = m->heads * m->head_dim, size = inner / m->norm_groups;
  for (int64_t t = first; t < last; t++)
    for (int64_t begin = 0; begin < inner; begin += size) {
      float *y = m->out + t * inner + begin;
      const float *gate = m->projected + t * m->width + begin;
      Wide sum = wide_set(0);
      for (int64_t i = 0; i < size; i += GROUP) {
        const Wide some = wide_load_some(size - i, y + i);
        sum = wide_fma(some, some, sum);
      }
      const Wide factor = wide_set(1 / sqrtf(wide_total(sum) / (float)size + m->eps));
      for (int64_t i = 0; i < size; i += GROUP) {
        Wide some = wide_mul(wide_load_some(size - i, m->norm + begin + i), wide_mul(wide_load_some(size - i, y + i), factor));
        if (m->is_before_gate) some = wide_mul(some, wide_silu(wide_load_some(size - i, gate + i)));
        wide_store_some(size - i, y + i, some);
      }
    }
}

#ifdef __AVX512F__
const Mamba2Kernels avx512_mamba2 = {convolve_shared, compute_head, normalize};
#else
const Mamba2Kernels avx2_mamba2 = {convolve_shared, compute_head, normalize};
#endif
