// Multiplies rows that are rounded to int8 by panels of a packed quantized weight, on the tiles of AMX: 16 rows by up to
// 64 features by 16 outputs. Integers are exact: it gives the bits of rounded.c.
#include "linear.h"

#include <string.h>

#include "amx.h"
#include "rounded_rows.h"

typedef int32_t Sum;
#define NUMBERS_OF numbers_of
enum { ROWS = TILE_ROWS, VECTORS = 2, ITEM = 1, NUMBERS = GROUP_NUMBERS, CHUNK = 2048, FEW_CHUNK = 512 };

// Codes of a byte lie as they are multiplied.
static int is_unpacked(const Quantized *q) { return q->form.values == CODES_UINT4 || q->form.values == CODES_INT6; }

// The same with codes of six bits.
static void unpack_six(const Quantized *q, const char *codes, int64_t count, char *to) {
  const Ints center = _mm512_set1_epi8((char)q->center);
  for (int64_t k = 0; k < count; k += 16, codes += 3 * STEP_BYTES, to += 4 * STEP_BYTES)
    for (int j = 0; j < STEP_BYTES; j += 64) {
      const Ints high = ints_load(codes + 2 * STEP_BYTES + j);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const Ints low = ints_load(codes + i / 2 * STEP_BYTES + j);
        if (i < 3) __builtin_prefetch(codes + i * STEP_BYTES + j + SPAN_PREFETCH);
        ints_store(to + i * STEP_BYTES + j, ints_sub_bytes(six_quads(low, high, i / 2, i % 2), center));
      }
    }
}

// Codes of half a byte less their center, as [features / 4][32][4] with the quads of quantized rows.
static void unpack(const Quantized *q, const char *codes, int64_t count, char *to) {
  if (q->form.values == CODES_INT6) return unpack_six(q, codes, count, to);
  const Ints half = ints_set(0x0f0f0f0f), center = _mm512_set1_epi8((char)q->center);
  for (int64_t k = 0; k < count; k += 8, codes += STEP_BYTES, to += 2 * STEP_BYTES)
    for (int j = 0; j < STEP_BYTES; j += 64) {
      const Ints words = ints_load(codes + j);
      __builtin_prefetch(codes + j + SPAN_PREFETCH);
      ints_store(to + j, _mm512_sub_epi8(ints_and(words, half), center));
      ints_store(to + STEP_BYTES + j, _mm512_sub_epi8(ints_and(ints_down(words, 4), half), center));
    }
}

// The centers of codes are subtracted from what is unpacked; others take theirs from the sum of the row.
INLINE Vec add_sums(const Parts parts, const GroupNumbers *of_group, const Sum *sums, const float *numbers, Vec total) {
  int32_t center_sum;
  memcpy(&center_sum, numbers + CENTER_SUM, sizeof center_sum);
  const Ints products = ints_sub(ints_load((const char *)sums), ints_set(center_sum));
  return add_rounded(parts, of_group, products, numbers, 1, total);
}

#define TILE_PRODUCT(sum, rows, weight)            \
  do {                                             \
    if (is_unpacked) _tile_dpbssd(sum, rows, weight); \
    else _tile_dpbsud(sum, rows, weight);          \
  } while (0)
#include "quantized_tiles.h"

static void prepare(const Linear *l, int64_t block, float *scratch) {
  for (int64_t r = 0; r < block_rows(l, block); r++) {
    float *numbers = scratch + l->padded_in + (l->padded_in + 3) / 4;
    const RoundedRow row = round_row(l, block * ROWS + r, scratch, numbers);
    for (int64_t g = 0; g < l->quantized->num_groups && is_unpacked(l->quantized); g++)
      numbers[g * GROUP_NUMBERS + CENTER_SUM] = 0;  // the int 0 too
    store_row(l, block, r, row.bytes, numbers, row.scale);
  }
}

const LinearKernels amx_rounded = {ROWS, block_bytes, prepare, multiply};
