// How keys and values lie in a page, for each key/value head.
//
// Keys lie in groups of 16 tokens, of 8 where the page size is no multiple of 16: [H][group] numbers in float32,
// [H / 2][group] pairs of features in bfloat16. Values lie as [p][H] in float32, as [p / 2][H] pairs of tokens in bfloat16.
// AMX multiplies such pairs as they are; other instructions separate them with a shift.
#pragma once
#include <stdint.h>

static inline int group_tokens(int page_size) { return page_size % 16 ? 8 : 16; }

// Bytes from the keys of a feature, or of a pair of features, to those of the next.
static inline int key_stride(int page_size) { return group_tokens(page_size) * 4; }

// Bytes from the beginning of a pool to what a page has of a head, and from there to what it has of a token.
static inline int64_t page_offset(int64_t page, int head, int num_kv_heads, int page_size, int width, int is_bf16) {
  return (page * num_kv_heads + head) * width * page_size * (is_bf16 ? 2 : 4);
}
static inline int64_t key_offset(int token, int page_size, int width, int is_bf16) {
  const int group = group_tokens(page_size);
  return (int64_t)(token / group) * group * width * (is_bf16 ? 2 : 4) + token % group * 4;
}
static inline int64_t value_offset(int token, int width, int is_bf16) {
  return is_bf16 ? (int64_t)(token / 2) * width * 4 + token % 2 * 2 : (int64_t)token * width * 4;
}
