// Decodes quantized weights tile by tile; compiled once for AVX-512 and once for AVX2.
//
// Each element is computed as NumPy does: subtract, multiply, add, each rounded to float32, then rounded once to bfloat16.
#include "dequantize.h"

#include <string.h>

#include "vectors.h"

enum { TILE_ROWS = 16, TILE_COLUMNS = 256 };

// The columns of a tile, and the first run that has some of them.
typedef struct {
  int64_t first, count, run;
} Columns;

static void look_up(const Dequantize *job, int64_t row, Columns columns, float *values) {
  const uint8_t *codes = job->codes + row * job->code_row + columns.first;
  if (job->table)
    for (int64_t i = 0; i < columns.count; i++) values[i] = job->table[codes[i]];
  else if (job->is_signed)
    for (int64_t i = 0; i < columns.count; i++) values[i] = (float)(int8_t)codes[i];
  else
    for (int64_t i = 0; i < columns.count; i++) values[i] = (float)codes[i];
}

INLINE float number_of(Grid grid, int64_t row_group, int64_t column_group) {
  return grid.numbers[row_group * grid.row + column_group * grid.column];
}

static void scale(const Dequantize *job, int64_t row, Columns columns, float *values) {
  const int64_t group = job->row_groups[row], end = columns.first + columns.count;
  for (int64_t run = columns.run, i = columns.first; i < end; run++) {
    const int64_t stop = job->run_starts[run + 1] < end ? job->run_starts[run + 1] : end;
    const float zero = number_of(job->zeros, group, job->run_groups[run]);
    const float factor = number_of(job->scales, group, job->run_groups[run]);
    const float bias = number_of(job->biases, group, job->run_groups[run]);
    for (; i < stop; i++) {
      float *value = values + (i - columns.first);
      *value = (*value - zero) * factor + bias;
    }
  }
}

// Rounds to the nearest, ties to even; a NaN keeps its sign only.
INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 & 0x8000) | 0x7fc0 : rounded);
}

// Writes a tile row by row, or column by column if the result's columns are not contiguous.
static void write(const Dequantize *job, int64_t row, int64_t num_rows, Columns columns,
                  float values[TILE_ROWS][TILE_COLUMNS]) {
  const int64_t at = row * job->result_row + columns.first * job->result_column;
  const int64_t down = job->result_row, across = job->result_column;
  float *floats = (float *)job->result + at;
  uint16_t *halves = (uint16_t *)job->result + at;
  if (across == 1) {
    for (int64_t r = 0; r < num_rows; r++)
      if (job->is_bf16)
        for (int64_t c = 0; c < columns.count; c++) halves[r * down + c] = to_bf16(values[r][c]);
      else memcpy(floats + r * down, values[r], sizeof(float) * (size_t)columns.count);
    return;
  }
  for (int64_t c = 0; c < columns.count; c++)
    if (job->is_bf16)
      for (int64_t r = 0; r < num_rows; r++) halves[r * down + c * across] = to_bf16(values[r][c]);
    else
      for (int64_t r = 0; r < num_rows; r++) floats[r * down + c * across] = values[r][c];
}

static void dequantize(const Dequantize *job) {
  float values[TILE_ROWS][TILE_COLUMNS];
  Columns columns = {0, 0, 0};
  for (; columns.first < job->num_columns; columns.first += columns.count) {
    const int64_t left = job->num_columns - columns.first;
    columns.count = left < TILE_COLUMNS ? left : TILE_COLUMNS;
    while (job->run_starts[columns.run + 1] <= columns.first) columns.run++;
    for (int64_t row = 0; row < job->num_rows; row += TILE_ROWS) {
      const int64_t num_rows = job->num_rows - row < TILE_ROWS ? job->num_rows - row : TILE_ROWS;
      for (int64_t r = 0; r < num_rows; r++) {
        look_up(job, row + r, columns, values[r]);
        scale(job, row + r, columns, values[r]);
      }
      write(job, row, num_rows, columns, values);
    }
  }
}

#ifdef __AVX512F__
void avx512_dequantize(const Dequantize *job) { dequantize(job); }
#else
void avx2_dequantize(const Dequantize *job) { dequantize(job); }
#endif
