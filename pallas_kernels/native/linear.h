// Matrix multiplication of activations by a weight as checkpoints store it, [out, in].
#pragma once
#include <stdint.h>

typedef struct {
  const float *x;      // [M, K]
  const void *weight;  // [N, K], float32 or bfloat16
  float *y;            // [M, N]
  int64_t num_in, num_out;
  int is_bf16;
} Linear;

// The functions that exist once for each instruction set.
typedef struct {
  int most_rows;  // of a register tile
  // Rows first to first + rows - 1, at most most_rows of them, by outputs begin to end - 1.
  void (*multiply)(const Linear *, int64_t first, int rows, int64_t begin, int64_t end);
} LinearKernels;

extern const LinearKernels avx512_linear, avx2_linear;
