// Multiplies rows in bfloat16 by panels of a packed quantized weight, on the tiles of AMX: 16 rows by up to 32 features by
// 16 outputs.
//
// Codes are exact in bfloat16, and rows are rounded to it, as amx_linear does. Each group is added up by itself, in the
// order of pairs of features, whatever the number of rows.
#include "linear.h"

#include <string.h>

#include "amx.h"
#include "quantized_rows.h"

typedef float Sum;
#define NUMBERS_OF row_numbers_of
enum { ROWS = TILE_ROWS, VECTORS = 2, ITEM = 2, NUMBERS = 1, CHUNK = 1024, FEW_CHUNK = 128 };

static int is_unpacked(const Quantized *q) {
  (void)q;
  return 1;
}

// The scale, and as the bias what is added for each 1 of a row's sum.
INLINE GroupNumbers row_numbers_of(const Quantized *q, const char *block, const char *group, int lane) {
  const GroupNumbers found = numbers_of(q, block, group, lane);
  return (GroupNumbers){vec_mul(found.scale, vec_set(code_power(q))), found.zero, row_factor(q, &found)};
}

// Pairs of numbers that bfloat16 holds.
INLINE void store_pairs(char *to, Vec first, Vec second) { vec_store((float *)to, vec_pair_bf16(first, second)); }

// Of words of codes of half a byte the pairs of features are (0, 4), (1, 5), (2, 6) and (3, 7).
static void unpack_halves(const Quantized *q, const char *codes, int64_t count, char *to) {
  // The table twice: the fifth bit of an index does not count.
  const Vec table = vec_pair_bf16(vec_load(q->table), vec_load(q->table));
  const __m512i order = _mm512_set_epi16(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0, 30, 28, 26, 24, 22, 20,
                                         18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i twice = _mm512_permutexvar_epi16(order, (__m512i)table);
  for (int64_t k = 0; k < count; k += 8, codes += STEP_BYTES, to += 4 * STEP_BYTES)
    for (int j = 0; j < STEP_BYTES; j += 64) {
      const Ints words = ints_load(codes + j);
      __builtin_prefetch(codes + j + SPAN_PREFETCH);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        ints_store(to + i * STEP_BYTES + j, _mm512_permutexvar_epi16(ints_down(words, 4 * i), twice));
    }
}

static void unpack_six(const char *codes, int64_t count, char *to) {
  const Ints center = ints_set(0x20202020);
  for (int64_t k = 0; k < count; k += 16, codes += 3 * STEP_BYTES, to += 8 * STEP_BYTES)
    for (int j = 0; j < STEP_BYTES; j += 64) {
      const Ints high = ints_load(codes + 2 * STEP_BYTES + j);
#pragma GCC unroll 2
      for (int second = 0; second < 2; second++) {
        const Ints low = ints_load(codes + second * STEP_BYTES + j);
        const Ints even = ints_sub_bytes(six_quads(low, high, second, 0), center);
        const Ints odd = ints_sub_bytes(six_quads(low, high, second, 1), center);
        __builtin_prefetch(codes + (second ? 2 : 0) * STEP_BYTES + j + SPAN_PREFETCH);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
          store_pairs(to + (4 * second + i) * STEP_BYTES + j, vec_from_ints(top_byte(even, i)), vec_from_ints(top_byte(odd, i)));
      }
      __builtin_prefetch(codes + STEP_BYTES + j + SPAN_PREFETCH);
    }
}

static void unpack(const Quantized *q, const char *codes, int64_t count, char *to) {
  if (q->form.values == CODES_UINT4) return unpack_halves(q, codes, count, to);
  if (q->form.values >= CODES_E4M3) {
    const int is_e4m3 = q->form.values == CODES_E4M3;
    for (int64_t k = 0; k < count; k += 2, codes += 2 * PANEL, to += STEP_BYTES)
      for (int j = 0; j < PANEL; j += LANES) {
        __builtin_prefetch(codes + j + SPAN_PREFETCH);
        if (is_e4m3) store_pairs(to + 4 * j, vec_load_e4m3(codes + j), vec_load_e4m3(codes + PANEL + j));
        else store_pairs(to + 4 * j, vec_load_e5m2(codes + j), vec_load_e5m2(codes + PANEL + j));
      }
    return;
  }
  if (q->form.values == CODES_INT6) return unpack_six(codes, count, to);
  const Ints flip = ints_set((int)0x80808080);
  for (int64_t k = 0; k < count; k += 4, codes += STEP_BYTES, to += 2 * STEP_BYTES)
    for (int j = 0; j < STEP_BYTES; j += 64) {
      const Ints words = ints_xor(ints_load(codes + j), flip);
      __builtin_prefetch(codes + j + SPAN_PREFETCH);
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++)
        store_pairs(to + i * STEP_BYTES + j, vec_from_ints(top_byte(words, 2 * i)), vec_from_ints(top_byte(words, 2 * i + 1)));
    }
}

INLINE Vec add_sums(const Parts parts, const GroupNumbers *of_group, const Sum *sums, const float *numbers, Vec total) {
  total = vec_fma(vec_load(sums), of_group->scale, total);
  return parts.has_offset || parts.has_biases ? vec_fma(of_group->bias, vec_set(*numbers), total) : total;
}

#define TILE_PRODUCT(sum, rows, weight) _tile_dpbf16ps(sum, rows, weight)
#include "quantized_tiles.h"

static void prepare(const Linear *l, int64_t block, float *scratch) {
  const Quantized *q = l->quantized;
  const Form *f = &q->form;
  uint16_t *to = (uint16_t *)(scratch + l->padded_in);
  float *sums = scratch + 2 * l->padded_in;
  for (int64_t r = 0; r < block_rows(l, block); r++) {
    const float *x = l->x + (block * ROWS + r) * l->row_features;
    const Vec factor = norm_factor(l, x);
    for (int64_t g = 0; g < q->num_groups; g++) {
      Vec sum = vec_zero();
      for (int64_t k = 0; k < q->padded_group; k += LANES) {
        const int64_t padded = q->padded_group - k;
        const Vec value = vec_round_bf16(load_some_prepared(l, x, g * f->group + k, f->group - k, factor));
        vec_store_some(vec_lanes(0, padded < LANES ? (int)padded : LANES), scratch + g * q->padded_group + k, value);
        sum = vec_add(sum, value);
      }
      sums[g] = vec_total(sum);
    }
    const int is_half = f->values == CODES_UINT4;
    for (int64_t k = 0; k < l->padded_in; k++) {
      uint32_t bits;
      memcpy(&bits, scratch + (is_half ? (k & ~(int64_t)7) + (k % 8 / 2) + k % 2 * 4 : k), sizeof bits);
      to[k] = (uint16_t)(bits >> 16);
    }
    store_row(l, block, r, to, sums, 1);
  }
}

const LinearKernels amx_quantized = {ROWS, block_bytes, prepare, multiply};
