// The largest of many numbers; compiled once for AVX-512 and once for AVX2.
#include "argmax.h"

#include "vectors.h"

enum { VECTORS = 4 };

static Largest find_largest(const float *numbers, int64_t count) {
  Vec largest[VECTORS];
  Mask nan = vec_lanes(0, 0);
  for (int j = 0; j < VECTORS; j++) largest[j] = vec_set(-__builtin_inff());
  int64_t i = 0;
  for (; i + VECTORS * LANES <= count; i += VECTORS * LANES)
    for (int j = 0; j < VECTORS; j++) {
      const Vec some = vec_load(numbers + i + j * LANES);
      nan = mask_or(nan, vec_is_nan(some));
      largest[j] = vec_max(some, largest[j]);
    }
  for (; i < count; i += LANES) {
    const Mask rest = vec_lanes(0, count - i < LANES ? (int)(count - i) : LANES);
    const Vec some = vec_pick(rest, vec_load_some(rest, numbers + i), vec_set(-__builtin_inff()));
    nan = mask_or(nan, vec_is_nan(some));
    largest[0] = vec_max(some, largest[0]);
  }
  for (int j = 1; j < VECTORS; j++) largest[0] = vec_max(largest[j], largest[0]);
  return (Largest){vec_highest(largest[0]), mask_any(nan)};
}

#ifdef __AVX512F__
const FindLargest avx512_largest = find_largest;
#else
const FindLargest avx2_largest = find_largest;
#endif
