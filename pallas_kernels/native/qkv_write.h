// The write of keys and values to their pages, after the norm and rotation of heads.
#pragma once
#include <stdint.h>

typedef struct {
  // The heads of the first token; those of the next one are `stride` numbers later.
  const float *query, *key, *value;         // [N, H], [K, H], [K, H]
  const float *cos, *sin;                   // [T, half]
  const float *query_weight, *key_weight;   // [H] of the norms; null: none
  const int32_t *pages, *offsets;           // [T]
  float *out;                               // [T, N, H] queries
  void *keys, *values;                      // [P, K, H, p], [P, K, p, H]; see pages.h; null values: none are written
  int64_t stride;
  int num_heads, num_kv_heads, width, half, page_size, is_bf16;
  float eps;
  int32_t unread;  // a page that is not written; -1: none
} QkvWrite;

// Writes tokens first to last - 1.
typedef void (*WriteTokens)(const QkvWrite *, int64_t first, int64_t last);

// The function exists once for each instruction set.
void avx512_write_tokens(const QkvWrite *, int64_t first, int64_t last);
void avx2_write_tokens(const QkvWrite *, int64_t first, int64_t last);
