// Multiplies rows that are rounded to int8 by panels of a packed quantized weight, on the tiles of AMX: 16 rows by up to
// 64 features by 16 outputs. Integers are exact: it gives the bits of rounded.c.
#include "amx.h"
#include "linear.h"

#include <string.h>

#include "rounded_rows.h"

enum { ROWS = TILE_ROWS, DEPTH = 64, VECTORS = 2, CHUNK = 2048 };  // features of unpacked codes at a time

static int64_t block_rows(const Linear *l, int64_t block) {
  const int64_t left = l->num_rows - block * ROWS;
  return left < ROWS ? left : ROWS;
}

// Features of a row of a tile: they divide a group.
static int64_t depth_of(const Quantized *q) {
  int64_t depth = DEPTH;
  while (q->padded_group % depth) depth -= 4;
  return depth;
}

// Tiles, [padded_in / depth][16 rows][depth], [groups][16 rows][GROUP_NUMBERS], [16 rows].
static int64_t numbers_at(const Linear *l) { return (ROWS * l->padded_in + 63) & ~(int64_t)63; }
static int64_t block_bytes(const Linear *l) {
  const int64_t numbers = ROWS * (l->quantized->num_groups * GROUP_NUMBERS + 1);
  return (numbers_at(l) + numbers * (int64_t)sizeof(float) + 63) & ~(int64_t)63;
}

static void prepare(const Linear *l, int64_t block, float *scratch) {
  const Quantized *q = l->quantized;
  const int64_t depth = depth_of(q), steps = l->padded_in / depth;
  char *to = l->rows + block * block_bytes(l);
  float *numbers = (float *)(to + numbers_at(l));
  for (int64_t r = 0; r < block_rows(l, block); r++) {
    float *own = scratch + l->padded_in + (l->padded_in + 3) / 4;
    const RoundedRow row = round_row(l, block * ROWS + r, scratch, own);
    for (int64_t i = 0; i < steps; i++) memcpy(to + (i * ROWS + r) * depth, row.bytes + i * depth, (size_t)depth);
    for (int64_t g = 0; g < q->num_groups; g++)
      memcpy(numbers + (g * ROWS + r) * GROUP_NUMBERS, own + g * GROUP_NUMBERS, GROUP_NUMBERS * sizeof(float));
    numbers[q->num_groups * ROWS * GROUP_NUMBERS + r] = row.scale;
  }
}

// Rows of tiles: sums 0 and 1 of the first block, 2 and 3 of the second, 6 and 4 the rows of both, 7 the weight.
static void configure(int64_t depth, int64_t first_rows, int64_t second_rows) {
  const uint8_t first = (uint8_t)first_rows, second = (uint8_t)second_rows, wide = (uint8_t)depth;
  configure_tiles_of((const uint8_t[8]){first, first, second, second, second, 0, first, wide / 4},
                     (const uint8_t[8]){64, 64, 64, 64, wide, 0, wide, 64});
}

// Sums of a group for one or two blocks of rows: for each block a tile of the panel's first 16 outputs and one of the others.
typedef struct {
  const int32_t (*tiles)[TILE_BYTES / 4];
  GroupNumbers of_group[VECTORS];
  const float *numbers, *scales;  // of the first block's rows: of the group, and of all groups
  int64_t next_block;             // floats from a block's numbers to the next one's
  float *totals;                  // [rows, PANEL]
  int64_t row, rows, out;
  int is_first, is_last;
} Sums;

// Adds some rows of them to the groups before, and writes the results after the last.
INLINE void finish_rows(const Linear *l, const Sums *sums, int64_t first, int64_t last) {
  const Quantized *q = l->quantized;
  for (int64_t r = first; r < last; r++) {
    const int64_t block = r / ROWS, row = r % ROWS;
    const float *numbers = sums->numbers + block * sums->next_block + row * GROUP_NUMBERS;
    float *totals = sums->totals + r * PANEL;
    Vec total[VECTORS];
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) {
      Ints products = ints_load((const char *)(sums->tiles[block * VECTORS + j] + row * LANES));
      if (q->form.values != CODES_UINT4) {  // codes of half a byte are centered when they are unpacked
        int32_t center_sum;
        memcpy(&center_sum, numbers + CENTER_SUM, sizeof center_sum);
        products = ints_sub(products, ints_set(center_sum));
      }
      total[j] = sums->is_first ? vec_zero() : vec_load(totals + j * LANES);
      total[j] = add_rounded(q, &sums->of_group[j], products, numbers, 1, total[j]);
    }
    if (sums->is_last) {
      const Vec scale = vec_set(sums->scales[block * sums->next_block + row]);
      finish_pair(l, sums->row + r, sums->out, vec_mul(total[0], scale), vec_mul(total[1], scale));
    } else {
      vec_store(totals, total[0]);
      vec_store(totals + LANES, total[1]);
    }
  }
}

INLINE void prefetch(const char *codes) {
  for (int line = 0; line < PANEL * DEPTH; line += 64) __builtin_prefetch(codes + SPAN_PREFETCH + line, 0, 2);
}

// Features of a group with a pair of blocks.
typedef struct {
  const char *codes, *first, *second;  // of the weight [features / 4][32][4], and rows of both blocks as tiles
  int64_t steps, depth;
  int32_t *partial;     // of tiles, in whose group there are features before or after
  int is_begin, is_end;  // of the group
  int waits;            // for the weight
} Part;

// Multiplies tiles, and finishes the sums of a group before meanwhile.
INLINE void multiply_part(const int blocks, const int is_half, const Linear *l, Part part, const Sums *before,
                          int32_t sums[4][TILE_BYTES / 4]) {
  if (part.is_begin) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, part.partial, 64);
    _tile_loadd(1, part.partial + TILE_BYTES / 4, 64);
    if (blocks > 1) {
      _tile_loadd(2, part.partial + 2 * TILE_BYTES / 4, 64);
      _tile_loadd(3, part.partial + 3 * TILE_BYTES / 4, 64);
    }
  }
  const char *codes = part.codes;
  int64_t done = 0;
  for (int64_t i = 0; i < part.steps; i++, codes += part.depth * PANEL) {
    if (part.waits) prefetch(codes);
    _tile_loadd(6, part.first + i * ROWS * part.depth, part.depth);
    if (blocks > 1) _tile_loadd(4, part.second + i * ROWS * part.depth, part.depth);
    _tile_loadd(7, codes, STEP_BYTES);
    if (is_half) {
      _tile_dpbssd(0, 6, 7);
      if (blocks > 1) _tile_dpbssd(2, 4, 7);
    } else {
      _tile_dpbsud(0, 6, 7);
      if (blocks > 1) _tile_dpbsud(2, 4, 7);
    }
    _tile_loadd(7, codes + 64, STEP_BYTES);
    if (is_half) {
      _tile_dpbssd(1, 6, 7);
      if (blocks > 1) _tile_dpbssd(3, 4, 7);
    } else {
      _tile_dpbsud(1, 6, 7);
      if (blocks > 1) _tile_dpbsud(3, 4, 7);
    }
    const int64_t until = before->rows * (i + 1) / part.steps;
    finish_rows(l, before, done, until);
    done = until;
  }
  int32_t *to = part.is_end ? sums[0] : part.partial;
  _tile_stored(0, to, 64);
  _tile_stored(1, to + TILE_BYTES / 4, 64);
  if (blocks > 1) {
    _tile_stored(2, to + 2 * TILE_BYTES / 4, 64);
    _tile_stored(3, to + 3 * TILE_BYTES / 4, 64);
  }
}

// Codes of half a byte less their center, as [features / 4][32][4] with the quads of quantized rows.
static void unpack(const Quantized *q, const char *codes, int64_t count, int8_t *to) {
  const Ints half = ints_set(0x0f0f0f0f), center = _mm512_set1_epi8((char)q->center);
  for (int64_t k = 0; k < count; k += 8, codes += STEP_BYTES, to += 2 * STEP_BYTES)
    for (int j = 0; j < STEP_BYTES; j += 64) {
      const Ints words = ints_load(codes + j);
      __builtin_prefetch(codes + j + SPAN_PREFETCH);
      ints_store(to + j, _mm512_sub_epi8(ints_and(words, half), center));
      ints_store(to + STEP_BYTES + j, _mm512_sub_epi8(ints_and(ints_down(words, 4), half), center));
    }
}

// A panel for some blocks.
typedef struct {
  const Linear *l;
  const char *panel;
  int64_t out, first_row, depth;
  float *scratch;  // totals, then partial sums, of these blocks' rows
  int64_t scratch_rows;
  Sums *before;
  int32_t (*sums)[4][TILE_BYTES / 4];  // those of before, and of the next group
  int *which;
} Panel;

// The features begin to end, of whole groups or within one, for one block or two.
INLINE void multiply_blocks_of(const int blocks, const int is_half, Panel *p, const char *unpacked, int64_t begin,
                               int64_t end, int64_t block, int waits) {
  const Linear *l = p->l;
  const Quantized *q = l->quantized;
  const char *rows = l->rows + block * block_bytes(l);
  const int64_t row = block * ROWS;
  float *totals = p->scratch + (row - p->first_row) * PANEL;
  for (int64_t k = begin, stop; k < end; k = stop) {
    const int64_t group = k / q->padded_group, group_begin = group * q->padded_group;
    stop = group_begin + q->padded_group < end ? group_begin + q->padded_group : end;
    const char *of_group = group_of(q, p->panel, group), *of_block = block_of(q, p->panel, group);
    const int64_t at = k / p->depth * ROWS * p->depth;
    const Part part = {
        .codes = is_half ? unpacked + (k - begin) * PANEL : of_group + (k - group_begin) * PANEL,
        .first = rows + at,
        .second = rows + block_bytes(l) + at,
        .steps = (stop - k) / p->depth,
        .depth = p->depth,
        .partial = (int32_t *)(p->scratch + (p->scratch_rows + row - p->first_row) * PANEL),
        .is_begin = k == group_begin,
        .is_end = stop == group_begin + q->padded_group,
        .waits = waits,
    };
    multiply_part(blocks, is_half, l, part, p->before, p->sums[*p->which]);
    p->before->rows = 0;
    if (!part.is_end) continue;
    const float *numbers = (const float *)(rows + numbers_at(l));
    *p->before = (Sums){
        .tiles = p->sums[*p->which],
        .of_group = {numbers_of(q, of_block, of_group, 0), numbers_of(q, of_block, of_group, LANES)},
        .numbers = numbers + group * ROWS * GROUP_NUMBERS,
        .scales = numbers + q->num_groups * ROWS * GROUP_NUMBERS,
        .next_block = block_bytes(l) / (int64_t)sizeof(float),
        .totals = totals,
        .row = row,
        .rows = blocks > 1 ? ROWS + block_rows(l, block + 1) : block_rows(l, block),
        .out = p->out,
        .is_first = group == 0,
        .is_last = group == q->num_groups - 1,
    };
    *p->which ^= 1;
  }
}

static void multiply_panel(const int is_half, Panel *p, int64_t first_block, int64_t last_block) {
  const Linear *l = p->l;
  const Quantized *q = l->quantized;
  int8_t unpacked[CHUNK * PANEL] __attribute__((aligned(64)));
  for (int64_t begin = 0, end; begin < l->padded_in; begin = end) {
    end = l->padded_in;
    if (is_half) {
      const int64_t chunk = CHUNK / p->depth * p->depth, left = q->padded_group - begin % q->padded_group;
      end = q->padded_group <= CHUNK ? begin + CHUNK / q->padded_group * q->padded_group : begin + (left < chunk ? left : chunk);
      if (end > l->padded_in) end = l->padded_in;
      for (int64_t k = begin, stop; k < end; k = stop) {
        const int64_t group = k / q->padded_group, first = k - group * q->padded_group;
        stop = k - first + q->padded_group < end ? k - first + q->padded_group : end;
        unpack(q, group_of(q, p->panel, group) + first * PANEL / 2, stop - k, unpacked + (k - begin) * PANEL);
      }
    }
    for (int64_t block = first_block; block < last_block; block += 2) {
      const int64_t second = block + 1 < last_block ? block_rows(l, block + 1) : 0, first = block_rows(l, block);
      const int waits = !is_half && block == first_block, is_odd = second < ROWS || first < ROWS;
      if (is_odd) configure(p->depth, first, second ? second : first);
      if (second) multiply_blocks_of(2, is_half, p, (const char *)unpacked, begin, end, block, waits);
      else multiply_blocks_of(1, is_half, p, (const char *)unpacked, begin, end, block, waits);
      if (is_odd && first_block + 1 < last_block) configure(p->depth, ROWS, ROWS);
    }
  }
}

static void multiply(const Linear *l, int64_t panel, int64_t last_panel, int64_t first_block, int64_t last_block,
                     float *scratch) {
  int32_t sums[2][4][TILE_BYTES / 4] __attribute__((aligned(64)));
  Sums before = {0};
  int which = 0;
  const int is_half = l->quantized->form.values == CODES_UINT4;
  Panel p = {
      .l = l,
      .first_row = first_block * ROWS,
      .depth = depth_of(l->quantized),
      .scratch = scratch,
      .scratch_rows = (last_block - first_block + 1) * ROWS,
      .before = &before,
      .sums = sums,
      .which = &which,
  };
  configure(p.depth, ROWS, ROWS);
  for (; panel < last_panel; panel++) {
    p.panel = l->weight + panel * panel_bytes(l->quantized);
    p.out = panel * l->panel_outs;
    if (is_half) multiply_panel(1, &p, first_block, last_block);
    else multiply_panel(0, &p, first_block, last_block);
  }
  finish_rows(l, &before, 0, before.rows);
  _tile_release();
}

const LinearKernels amx_rounded = {ROWS, block_bytes, prepare, multiply};
