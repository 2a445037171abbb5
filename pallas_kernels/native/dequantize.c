// Decodes quantized weights tile by tile; compiled once for AVX-512 and once for AVX2.
//
// Each element is computed as NumPy does: subtract, multiply, add, each rounded to float32, then rounded once to bfloat16.
#include "block_codes.h"

enum { TILE_ROWS = 32, WIDTH = TILE_COLUMNS + LANES };  // rows begin in other sets

// The columns of a tile, and the first run that has some of them.
typedef struct {
  int64_t first, count, run;
} Columns;

static void look_up(const Dequantize *job, const uint8_t *codes, int64_t count, float *values) {
  int64_t i = 0;
  if (job->table && job->table_size == 16)
    for (; i + LANES <= count; i += LANES) vec_store(values + i, vec_look_up(job->table, codes + i));
  if (job->table)
    for (; i < count; i++) values[i] = job->table[codes[i]];
  else if (job->is_signed)
    for (; i < count; i++) values[i] = (float)(int8_t)codes[i];
  else
    for (; i < count; i++) values[i] = (float)codes[i];
}

INLINE float number_of(Grid grid, int64_t row_group, int64_t column_group) {
  return grid.numbers[row_group * grid.row + column_group * grid.column];
}

INLINE int64_t group_of(const Dequantize *job, int64_t row) { return job->row_groups ? job->row_groups[row] : row; }

static void scale_runs(const Dequantize *job, int64_t row, Columns columns, float *values) {
  const int64_t group = group_of(job, row), end = columns.first + columns.count;
  for (int64_t run = columns.run, i = columns.first; i < end; run++) {
    const int64_t stop = job->run_starts[run + 1] < end ? job->run_starts[run + 1] : end;
    const float zero = number_of(job->zeros, group, job->run_groups[run]);
    const float factor = number_of(job->scales, group, job->run_groups[run]);
    const float bias = number_of(job->biases, group, job->run_groups[run]);
    for (; i + LANES <= stop; i += LANES) {
      const Vec value = vec_sub(vec_load(values + (i - columns.first)), vec_set(zero));
      vec_store(values + (i - columns.first), vec_add(vec_mul(value, vec_set(factor)), vec_set(bias)));
    }
    for (; i < stop; i++) {
      float *value = values + (i - columns.first);
      *value = (*value - zero) * factor + bias;
    }
  }
}

// The numbers of LANES rows, which follow one another.
INLINE Vec numbers_of(Grid grid, int64_t row, int64_t column_group) {
  const float *numbers = grid.numbers + row * grid.row + column_group * grid.column;
  return grid.row ? vec_load(numbers) : vec_set(*numbers);
}

// Scales LANES rows and columns of a tile, turned so that the numbers of a group are a vector.
INLINE void scale_block(const Dequantize *job, int64_t row, const int32_t *groups, float *values) {
  Vec lanes[LANES];
  for (int i = 0; i < LANES; i++) lanes[i] = vec_load(values + i * WIDTH);
  vec_transpose(lanes);
  for (int i = 0; i < LANES; i++) {
    const Vec value = vec_sub(lanes[i], numbers_of(job->zeros, row, groups[i]));
    lanes[i] = vec_add(vec_mul(value, numbers_of(job->scales, row, groups[i])), numbers_of(job->biases, row, groups[i]));
  }
  vec_transpose(lanes);
  for (int i = 0; i < LANES; i++) vec_store(values + i * WIDTH, lanes[i]);
}

// Scales a tile whose columns have a group each.
static void scale_columns(const Dequantize *job, int64_t row, int64_t num_rows, Columns columns,
                          float values[TILE_ROWS][WIDTH]) {
  const int32_t *groups = job->column_groups + columns.first;
  int64_t r = 0;
  for (; !job->row_groups && r + LANES <= num_rows; r += LANES)
    for (int64_t c = 0; c < columns.count; c += LANES) scale_block(job, row + r, groups + c, values[r] + c);
  for (; r < num_rows; r++)
    for (int64_t c = 0; c < columns.count; c++) {
      const int64_t group = group_of(job, row + r);
      const float value = values[r][c] - number_of(job->zeros, group, groups[c]);
      values[r][c] = value * number_of(job->scales, group, groups[c]) + number_of(job->biases, group, groups[c]);
    }
}

// Rounds to the nearest, ties to even; a NaN keeps its sign only.
INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 & 0x8000) | 0x7fc0 : rounded);
}

static void write_rows(const Dequantize *job, int64_t at, int64_t num_rows, int64_t count,
                       float values[TILE_ROWS][WIDTH]) {
  for (int64_t r = 0; r < num_rows; r++, at += job->result_row)
    if (job->is_bf16)
      for (int64_t c = 0; c < count; c++) ((uint16_t *)job->result)[at + c] = to_bf16(values[r][c]);
    else
      memcpy((float *)job->result + at, values[r], sizeof(float) * (size_t)count);
}

// Writes LANES columns of a tile, in which they are vectors of a number each, or of two of bfloat16.
INLINE void write_columns(const Dequantize *job, int64_t at, const float values[TILE_ROWS][WIDTH], int64_t column) {
  const int per_lane = job->is_bf16 ? 2 : 1;
  for (int64_t row = 0; row < TILE_ROWS; row += LANES * per_lane) {
    Vec lanes[LANES];
    for (int i = 0; i < LANES; i++)
      lanes[i] = job->is_bf16 ? vec_pair_bf16(vec_load(values[row + 2 * i] + column), vec_load(values[row + 2 * i + 1] + column))
                              : vec_load(values[row + i] + column);
    vec_transpose(lanes);
    for (int64_t i = 0; i < LANES; i++) {
      const int64_t to = at + row + (column + i) * job->result_column;
      vec_store(job->is_bf16 ? (float *)((uint16_t *)job->result + to) : (float *)job->result + to, lanes[i]);
    }
  }
}

// Writes a tile whose columns follow one another in the result, or lie in it anywhere.
static void write_any(const Dequantize *job, int64_t at, int64_t num_rows, int64_t count,
                      float values[TILE_ROWS][WIDTH]) {
  int64_t c = 0;
  if (job->is_bf16)
    for (int64_t r = 0; r < num_rows; r++)
      for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)to_bf16(values[r][i]) << 16;
        memcpy(&values[r][i], &bits, sizeof bits);
      }
  if (job->result_row == 1 && num_rows == TILE_ROWS)
    for (; c + LANES <= count; c += LANES) write_columns(job, at, values, c);
  for (; c < count; c++)
    for (int64_t r = 0; r < num_rows; r++) {
      const int64_t to = at + r * job->result_row + c * job->result_column;
      if (job->is_bf16)
        memcpy((uint16_t *)job->result + to, (char *)&values[r][c] + 2, 2);
      else
        ((float *)job->result)[to] = values[r][c];
    }
}

static void dequantize(const Dequantize *job) {
  float values[TILE_ROWS][WIDTH];
  uint8_t scratch[SCRATCH_BYTES];
  Columns columns = {0, 0, 0};
  for (; columns.first < job->num_columns; columns.first += columns.count) {
    const int64_t left = job->num_columns - columns.first;
    columns.count = left < TILE_COLUMNS ? left : TILE_COLUMNS;
    while (!job->column_groups && job->run_starts[columns.run + 1] <= columns.first) columns.run++;
    for (int64_t row = 0; row < job->num_rows; row += TILE_ROWS) {
      const int64_t num_rows = job->num_rows - row < TILE_ROWS ? job->num_rows - row : TILE_ROWS;
      for (int64_t r = 0; r < num_rows; r++) {
        const uint8_t *codes = job->codes + (row + r) * job->code_row;
        look_up(job, read_codes(&job->blocks, codes, columns.first, columns.count, scratch), columns.count, values[r]);
        if (!job->column_groups) scale_runs(job, row + r, columns, values[r]);
      }
      if (job->column_groups) scale_columns(job, row, num_rows, columns, values);
      const int64_t at = row * job->result_row + columns.first * job->result_column;
      (job->result_column == 1 ? write_rows : write_any)(job, at, num_rows, columns.count, values);
    }
  }
}

#ifdef __AVX512F__
void avx512_dequantize(const Dequantize *job) { dequantize(job); }
#else
void avx2_dequantize(const Dequantize *job) { dequantize(job); }
#endif
