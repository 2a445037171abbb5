// Norm and rotation of the heads of tokens, and the write of keys and values; compiled once for AVX-512 and once for AVX2.
//
// Features are the lanes, and a token's numbers are computed in the same order wherever it stands. Keys lie transposed
// (see pages.h): those of consecutive tokens of one group are turned over in registers and stored together.
#include "qkv_write.h"

#include "attention.h"
#include "pages.h"
#include "vectors.h"

enum { FEW = 3 };  // tokens whose keys are stored number by number

INLINE Vec load_up_to(int count, const float *p) {
  return count >= LANES ? vec_load(p) : vec_load_some(vec_lanes(0, count), p);
}
INLINE void store_up_to(int count, float *p, Vec v) {
  if (count >= LANES) vec_store(p, v);
  else vec_store_some(vec_lanes(0, count), p, v);
}

INLINE Vec load_normed(int count, const float *from, const float *weight, float factor) {
  const Vec x = load_up_to(count, from);
  return weight ? vec_mul(vec_mul(x, vec_set(factor)), load_up_to(count, weight)) : x;
}

// A head, normalized if there is a weight, its leading features rotated in pairs (h, h + half).
static void prepare_head(const QkvWrite *w, int64_t token, const float *from, const float *weight, float *to) {
  const int width = w->width, half = w->half;
  const float factor = weight ? 1 / __builtin_sqrtf(sum_of_squares(from, width) / width + w->eps) : 1;
  for (int h = 0; h < half; h += LANES) {
    const int count = half - h;
    const Vec first = load_normed(count, from + h, weight ? weight + h : 0, factor);
    const Vec second = load_normed(count, from + half + h, weight ? weight + half + h : 0, factor);
    const Vec cosine = load_up_to(count, w->cos + token * half + h), sine = load_up_to(count, w->sin + token * half + h);
    store_up_to(count, to + h, vec_sub(vec_mul(first, cosine), vec_mul(second, sine)));
    store_up_to(count, to + half + h, vec_add(vec_mul(second, cosine), vec_mul(first, sine)));
  }
  for (int h = 2 * half; h < width; h += LANES)
    store_up_to(width - h, to + h, load_normed(width - h, from + h, weight ? weight + h : 0, factor));
}

// Bytes from the beginning of a pool to what the page of a token has of a head.
static int64_t page_of(const QkvWrite *w, int64_t token, int head) {
  return page_offset(w->pages[token], head, w->num_kv_heads, w->page_size, w->width, w->is_bf16);
}

// A value that is not finite moves to its key as NaN and leaves zero: the page's next owner is safe, since masked
// keys do not count, and the sequence itself still gets NaN. What the pools' type cannot hold is not finite there.
static void write_value(const QkvWrite *w, int64_t token, int head, float *key) {
  const int width = w->width, is_bf16 = w->is_bf16;
  const float *from = w->value + token * w->stride + (int64_t)head * width;
  char *to = (char *)w->values + page_of(w, token, head) + value_offset(w->offsets[token], width, is_bf16);
  for (int h = 0; h < width; h += LANES) {
    const int count = width - h;
    Vec value = load_up_to(count, from + h), stored_key = load_up_to(count, key + h);
    if (is_bf16) {
      value = vec_round_bf16(value);
      stored_key = vec_round_bf16(stored_key);
    }
    const Mask is_finite = vec_finite(value);
    store_up_to(count, key + h, vec_pick(is_finite, stored_key, vec_set(__builtin_nanf(""))));
    value = vec_pick(is_finite, value, vec_zero());
    if (is_bf16) vec_store_apart_bf16(count, (uint16_t *)to + 2 * h, value);
    else store_up_to(count, (float *)to + h, value);
  }
}

// Keys of count consecutive tokens of a group, [count][width], to their places from the first token's on: those of a
// feature, or of a pair of features in bfloat16, are `stride` bytes after those of the one before.
INLINE void write_keys(int is_bf16, const float *from, int count, int width, int stride, char *to) {
  const int features = is_bf16 ? 2 : 1;
  if (count < FEW) {
    for (int i = 0; i < count; i++)
      for (int h = 0; h < width; h++) {
        char *word = to + (int64_t)(h / features) * stride + i * 4;
        if (is_bf16) __builtin_memcpy(word + h % 2 * 2, (const char *)(from + i * width + h) + 2, 2);
        else __builtin_memcpy(word, from + i * width + h, 4);
      }
    return;
  }
  for (int h = 0; h < width; h += LANES) {
    Vec rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = load_up_to(width - h, from + (i < count ? i : 0) * width + h);
    vec_transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += features)
      if (h + i < width)
        store_up_to(count, (float *)(to + (int64_t)((h + i) / features) * stride),
                    is_bf16 ? vec_pair_bf16(rows[i], rows[i + 1]) : rows[i]);
  }
}
static void write_keys_f32(const float *from, int count, int width, int stride, char *to) {
  write_keys(0, from, count, width, stride, to);
}
static void write_keys_bf16(const float *from, int count, int width, int stride, char *to) {
  write_keys(1, from, count, width, stride, to);
}

// How many of the tokens from `first` on have consecutive places in one group of a page, at most LANES.
static int count_together(const QkvWrite *w, int64_t first, int64_t last) {
  const int left = group_tokens(w->page_size) - w->offsets[first] % group_tokens(w->page_size);
  int count = 1;
  while (count < LANES && count < left && first + count < last && w->pages[first + count] == w->pages[first] &&
         w->offsets[first + count] == w->offsets[first] + count)
    count++;
  return count;
}

static void write_tokens(const QkvWrite *w, int64_t first, int64_t last) {
  const int width = w->width, stride = key_stride(w->page_size);
  float keys[LANES * MOST_LATENT];  // [token][width]
  for (int count; first < last; first += count) {
    count = count_together(w, first, last);
    for (int64_t t = first; t < first + count; t++)
      for (int n = 0; n < w->num_heads; n++)
        prepare_head(w, t, w->query + t * w->stride + (int64_t)n * width, w->query_weight,
                     w->out + (t * w->num_heads + n) * width);
    if (w->pages[first] == w->unread) continue;
    for (int k = 0; k < w->num_kv_heads; k++) {
      for (int i = 0; i < count; i++) {
        prepare_head(w, first + i, w->key + (first + i) * w->stride + (int64_t)k * width, w->key_weight, keys + i * width);
        if (w->values) write_value(w, first + i, k, keys + i * width);
      }
      char *to = (char *)w->keys + page_of(w, first, k) + key_offset(w->offsets[first], w->page_size, width, w->is_bf16);
      (w->is_bf16 ? write_keys_bf16 : write_keys_f32)(keys, count, width, stride, to);
    }
  }
}

#ifdef __AVX512F__
void avx512_write_tokens(const QkvWrite *w, int64_t first, int64_t last) { write_tokens(w, first, last); }
#else
void avx2_write_tokens(const QkvWrite *w, int64_t first, int64_t last) { write_tokens(w, first, last); }
#endif
