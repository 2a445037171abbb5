// How keys and values lie in a page, for each key/value head.
//
// Keys lie in groups of 16 tokens, of 8 where the page size is no multiple of 16: [H][group] numbers in float32,
// [H / 2][group] pairs of features in bfloat16. Values lie as [p][H] in float32, as [p / 2][H] pairs of tokens in bfloat16.
// AMX multiplies such pairs as they are; other instructions take them apart with a shift.
#pragma once
#include <stdint.h>

static inline int group_tokens(int page_size) { return page_size % 16 ? 8 : 16; }

// Bytes from the beginning of a page's keys or values, of one head, to those of a token.
static inline int64_t key_offset(int token, int page_size, int width, int is_bf16) {
  const int group = group_tokens(page_size);
  return (int64_t)(token / group) * group * width * (is_bf16 ? 2 : 4) + token % group * 4;
}
static inline int64_t value_offset(int token, int width, int is_bf16) {
  return is_bf16 ? (int64_t)(token / 2) * width * 4 + token % 2 * 2 : (int64_t)token * width * 4;
}
