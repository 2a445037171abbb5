// The largest of many numbers.
#pragma once
#include <stdint.h>

typedef struct {
  float largest;  // -inf for none
  int has_nan;
} Largest;

// The functions that exist once for each instruction set.
typedef Largest (*FindLargest)(const float *numbers, int64_t count);

extern const FindLargest avx512_largest, avx2_largest;
