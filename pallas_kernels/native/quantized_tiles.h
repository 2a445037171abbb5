// Products on the tiles of AMX with the groups of a quantized weight. What includes it defines the type Sum of products,
// ITEM, the bytes of a number on tiles, NUMBERS of each group of a row, CHUNK, the features that are unpacked at a time, and
// FEW_CHUNK, those for few rows, is_unpacked, unpack, NUMBERS_OF a group, add_sums, which adds a group's sums of a row to those before, and
// TILE_PRODUCT.
//
// A block of rows is 16. Sums of the groups before lie in memory; while a group is multiplied those of the last one are
// added to them.
#pragma once
#include "amx.h"
#include "quantized_rows.h"

enum { FEW_FINISHED = 8 };  // rows that are not worth a call

static int64_t block_rows(const Linear *l, int64_t block) {
  const int64_t left = l->num_rows - block * ROWS;
  return left < ROWS ? left : ROWS;
}

// Features of a row of a tile: they divide a group, and are whole words of codes.
static int64_t depth_of(const Quantized *q) {
  int64_t depth = 64 / ITEM;
  const int64_t unit = code_unit(&q->form) > 1 ? code_unit(&q->form) : 2;
  while (q->padded_group % depth) depth -= unit;
  return depth;
}

// Tiles, [padded_in / depth][16 rows][depth], [groups][16 rows][NUMBERS], [16 rows].
static int64_t numbers_at(const Linear *l) { return (ROWS * l->padded_in * ITEM + 63) & ~(int64_t)63; }
static int64_t block_bytes(const Linear *l) {
  const int64_t numbers = ROWS * (l->quantized->num_groups * NUMBERS + 1);
  return (numbers_at(l) + numbers * (int64_t)sizeof(float) + 63) & ~(int64_t)63;
}

// Stores a prepared row, the numbers of its groups, and the factor of its results.
static void store_row(const Linear *l, int64_t block, int64_t r, const void *row, const float *numbers, float scale) {
  const int64_t depth_bytes = depth_of(l->quantized) * ITEM, groups = l->quantized->num_groups;
  char *to = l->rows + block * block_bytes(l);
  float *of_row = (float *)(to + numbers_at(l));
  for (int64_t i = 0; i < l->padded_in * ITEM / depth_bytes; i++)
    memcpy(to + (i * ROWS + r) * depth_bytes, (const char *)row + i * depth_bytes, (size_t)depth_bytes);
  for (int64_t g = 0; g < groups; g++)
    memcpy(of_row + (g * ROWS + r) * NUMBERS, numbers + g * NUMBERS, NUMBERS * sizeof(float));
  of_row[groups * ROWS * NUMBERS + r] = scale;
}

// Rows of tiles: sums 0 and 1 of the first block, 2 and 3 of the second, 6 and 4 the rows of both, 7 the weight.
static void configure(int64_t depth, int64_t first_rows, int64_t second_rows) {
  const uint8_t first = (uint8_t)first_rows, second = (uint8_t)second_rows, wide = (uint8_t)(depth * ITEM);
  configure_tiles_of((const uint8_t[8]){first, first, second, second, second, 0, first, wide / 4},
                     (const uint8_t[8]){64, 64, 64, 64, wide, 0, wide, 64});
}

// Sums of a group for one or two blocks of rows: for each block a tile of the panel's first 16 outputs and one of the others.
typedef struct {
  const Sum (*tiles)[TILE_BYTES / 4];
  GroupNumbers of_group[VECTORS];
  const float *numbers, *scales;  // of the first block's rows: of the group, and of all groups
  int64_t next_block;             // floats from a block's numbers to the next one's
  float *totals;                  // [rows, PANEL]
  int64_t row, rows, out;
  int is_first, is_last;
} Sums;

INLINE void finish_some(const Parts parts, const Linear *l, const Sums *sums, int64_t first, int64_t last) {
  const int64_t block = first / ROWS, row = first % ROWS;
  const Sum *left = sums->tiles[block * VECTORS] + row * LANES, *right = left + TILE_BYTES / 4;
  const float *numbers = sums->numbers + block * sums->next_block + row * NUMBERS;
  const float *scales = sums->scales + block * sums->next_block + row;
  const GroupNumbers of_left = sums->of_group[0], of_right = sums->of_group[1];
  float *totals = sums->totals + first * PANEL;
  for (int64_t r = first; r < last; r++, left += LANES, right += LANES, numbers += NUMBERS, totals += PANEL) {
    Vec total[VECTORS] = {vec_zero(), vec_zero()};
    if (!sums->is_first) {
      total[0] = vec_load(totals);
      total[1] = vec_load(totals + LANES);
    }
    total[0] = add_sums(parts, &of_left, left, numbers, total[0]);
    total[1] = add_sums(parts, &of_right, right, numbers, total[1]);
    if (sums->is_last) {
      const Vec scale = vec_set(scales[r - first]);
      finish_pair(l, sums->row + r, sums->out, vec_mul(total[0], scale), vec_mul(total[1], scale));
    } else {
      vec_store(totals, total[0]);
      vec_store(totals + LANES, total[1]);
    }
  }
}

#define PARTS_CASE(n) \
  case n: finish_some(parts_of(n), l, sums, first, end); break;
// Adds some rows of them to the groups before, and writes the results after the last.
static void finish_rows(const Linear *l, const Sums *sums, int64_t first, int64_t last) {
  for (int64_t end; first < last; first = end) {
    end = (first / ROWS + 1) * ROWS < last ? (first / ROWS + 1) * ROWS : last;
    switch (number_of_parts(l->quantized)) {
      PARTS_CASE(0) PARTS_CASE(1) PARTS_CASE(2) PARTS_CASE(3) PARTS_CASE(4) PARTS_CASE(5) PARTS_CASE(6) PARTS_CASE(7)
    }
  }
}

INLINE void prefetch(const char *codes, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(codes + line, 0, 2);
}

// Features of a group with a pair of blocks.
typedef struct {
  const char *codes, *first, *second;  // of the weight, features in words of 32 outputs, and rows of both blocks as tiles
  int64_t steps, depth;
  Sum *partial;         // of tiles, in whose group there are features before or after
  int is_begin, is_end;  // of the group
  const char *ahead;     // what to fetch meanwhile, or null, and its bytes for each step
  int64_t ahead_bytes;
} Part;

// Multiplies tiles, and finishes the sums of a group before meanwhile.
INLINE void multiply_part(const int blocks, const int is_unpacked, const Linear *l, Part part, const Sums *before,
                          Sum sums[4][TILE_BYTES / 4]) {
  (void)is_unpacked;  // of codes of a byte, products differ
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
  const int64_t row_bytes = part.depth * ITEM;
  int64_t done = 0;
  for (int64_t i = 0; i < part.steps; i++, codes += row_bytes * PANEL) {
    if (part.ahead) prefetch(part.ahead + i * part.ahead_bytes, part.ahead_bytes);
    _tile_loadd(6, part.first + i * ROWS * row_bytes, row_bytes);
    if (blocks > 1) _tile_loadd(4, part.second + i * ROWS * row_bytes, row_bytes);
    _tile_loadd(7, codes, STEP_BYTES);
    TILE_PRODUCT(0, 6, 7);
    if (blocks > 1) TILE_PRODUCT(2, 4, 7);
    _tile_loadd(7, codes + 64, STEP_BYTES);
    TILE_PRODUCT(1, 6, 7);
    if (blocks > 1) TILE_PRODUCT(3, 4, 7);
    const int64_t until = before->rows * (i + 1) / part.steps;
    if (until - done < FEW_FINISHED && i + 1 < part.steps) continue;
    finish_rows(l, before, done, until);
    done = until;
  }
  Sum *to = part.is_end ? sums[0] : part.partial;
  _tile_stored(0, to, 64);
  _tile_stored(1, to + TILE_BYTES / 4, 64);
  if (blocks > 1) {
    _tile_stored(2, to + 2 * TILE_BYTES / 4, 64);
    _tile_stored(3, to + 3 * TILE_BYTES / 4, 64);
  }
}

// A panel for some blocks.
typedef struct {
  const Linear *l;
  const char *panel;
  int64_t out, first_row, depth;
  int64_t first_rows, second_rows;  // of tiles, as they are configured
  float *scratch;  // totals, then partial sums, of these blocks' rows
  int64_t scratch_rows;
  Sums *before;
  Sum (*sums)[4][TILE_BYTES / 4];  // those of before, and of the next group
  int *which;
} Panel;

// The features begin to end, of whole groups or within one, for one block or two.
INLINE void multiply_blocks_of(const int blocks, const int is_unpacked, Panel *p, const char *unpacked, int64_t begin,
                               int64_t end, int64_t block, int waits) {
  const Linear *l = p->l;
  const Quantized *q = l->quantized;
  const char *rows = l->rows + block * block_bytes(l);
  const int64_t row = block * ROWS;
  for (int64_t k = begin, stop; k < end; k = stop) {
    const int64_t group = k / q->padded_group, group_begin = group * q->padded_group;
    stop = group_begin + q->padded_group < end ? group_begin + q->padded_group : end;
    const char *of_group = group_of(q, p->panel, group), *of_block = block_of(q, p->panel, group);
    const char *codes = of_group + codes_bytes(&q->form, k - group_begin);
    const int64_t at = k * ROWS * ITEM, ahead_bytes = codes_bytes(&q->form, p->depth);
    const Part part = {
        .codes = is_unpacked ? unpacked + (k - begin) * PANEL * ITEM : codes,
        .first = rows + at,
        .second = rows + block_bytes(l) + at,
        .steps = (stop - k) / p->depth,
        .depth = p->depth,
        .partial = (Sum *)(p->scratch + (p->scratch_rows + row - p->first_row) * PANEL),
        .is_begin = k == group_begin,
        .is_end = stop == group_begin + q->padded_group,
        .ahead = waits ? codes + (is_unpacked ? (end - begin) / p->depth * ahead_bytes : SPAN_PREFETCH) : 0,
        .ahead_bytes = ahead_bytes,
    };
    multiply_part(blocks, is_unpacked, l, part, p->before, p->sums[*p->which]);
    p->before->rows = 0;
    if (!part.is_end) continue;
    const float *numbers = (const float *)(rows + numbers_at(l));
    *p->before = (Sums){
        .tiles = p->sums[*p->which],
        .of_group = {NUMBERS_OF(q, of_block, of_group, 0), NUMBERS_OF(q, of_block, of_group, LANES)},
        .numbers = numbers + group * ROWS * NUMBERS,
        .scales = numbers + q->num_groups * ROWS * NUMBERS,
        .next_block = block_bytes(l) / (int64_t)sizeof(float),
        .totals = p->scratch + (row - p->first_row) * PANEL,
        .row = row,
        .rows = blocks > 1 ? ROWS + block_rows(l, block + 1) : block_rows(l, block),
        .out = p->out,
        .is_first = group == 0,
        .is_last = group == q->num_groups - 1,
    };
    *p->which ^= 1;
  }
}

// The end of the features from one on that are unpacked at a time: of whole groups, or of tiles within one.
static int64_t chunk_end(const Linear *l, int64_t depth, int64_t most, int64_t begin) {
  const int64_t group = l->quantized->padded_group, left = group - begin % group, chunk = most / depth * depth;
  const int64_t end = begin + (group <= most ? most / group * group : left < chunk ? left : chunk);
  return end < l->padded_in ? end : l->padded_in;
}

static void unpack_chunk(const Panel *p, int64_t begin, int64_t end, char *to) {
  const Quantized *q = p->l->quantized;
  for (int64_t k = begin, stop; k < end; k = stop) {
    const int64_t group = k / q->padded_group, first = k - group * q->padded_group;
    stop = k - first + q->padded_group < end ? k - first + q->padded_group : end;
    const char *codes = group_of(q, p->panel, group) + codes_bytes(&q->form, first);
    unpack(q, codes, stop - k, to + (k - begin) * PANEL * ITEM);
  }
}

static void multiply_panel(const int is_unpacked, Panel *p, int64_t first_block, int64_t last_block) {
  const Linear *l = p->l;
  char unpacked[CHUNK * PANEL * ITEM] __attribute__((aligned(64)));
  for (int64_t begin = 0, end; begin < l->padded_in; begin = end) {
    end = is_unpacked ? chunk_end(l, p->depth, last_block - first_block > 2 ? CHUNK : FEW_CHUNK, begin) : l->padded_in;
    if (is_unpacked) unpack_chunk(p, begin, end, unpacked);
    for (int64_t block = first_block; block < last_block; block += 2) {
      const int64_t second = block + 1 < last_block ? block_rows(l, block + 1) : 0, first = block_rows(l, block);
      const int waits = block == first_block;
      if (first != p->first_rows || (second && second != p->second_rows)) {
        p->first_rows = first;
        p->second_rows = second ? second : first;
        configure(p->depth, p->first_rows, p->second_rows);
      }
      if (second) multiply_blocks_of(2, is_unpacked, p, unpacked, begin, end, block, waits);
      else multiply_blocks_of(1, is_unpacked, p, unpacked, begin, end, block, waits);
    }
  }
}

static void multiply(const Linear *l, int64_t panel, int64_t last_panel, int64_t first_block, int64_t last_block,
                     float *scratch) {
  Sum sums[2][4][TILE_BYTES / 4] __attribute__((aligned(64)));
  Sums before = {0};
  int which = 0;
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
  for (; panel < last_panel; panel++) {
    p.panel = l->weight + panel * panel_bytes(l->quantized);
    p.out = panel * l->panel_outs;
    if (is_unpacked(l->quantized)) multiply_panel(1, &p, first_block, last_block);
    else multiply_panel(0, &p, first_block, last_block);
  }
  finish_rows(l, &before, 0, before.rows);
  _tile_release();
}
