// Decoding of quantized weights: the element (r, c) is (value of its code - zero) * scale + bias of its group, in float32.
#pragma once
#include <stdint.h>

// A number for each group of rows and columns, and the numbers to step over from group to group; 0: one for all.
typedef struct {
  const float *numbers;
  int64_t row, column;
} Grid;

// Bit fields of bytes that follow one another: runs of bytes hold the lowest field of each, then the next of each.
typedef struct {
  int64_t offset;      // the first byte in its block
  int64_t width, run;  // bits of a field, bytes of a run; no width: there are none; no run: eight run from byte to byte
} Fields;

// A row is blocks of bytes; a code is a low field, with a high one above it, minus the zero.
typedef struct {
  Fields low, high;
  int64_t zero;
  int64_t num_bytes, num_codes;  // of a block; no codes: the bytes of the row are the codes
  int64_t first;                 // codes of the first block that are skipped
} Blocks;

// The layout of dequantize_native.py's _Job.
typedef struct {
  const uint8_t *codes;  // [num_rows, num_columns], columns contiguous, or blocks
  int64_t code_row;      // bytes from row to row
  Blocks blocks;
  int64_t num_rows, num_columns;
  const float *table;  // the value of each code; null: codes are the values
  int64_t table_size;  // 16 or 256
  int64_t is_signed;   // codes without a table are int8
  const int32_t *row_groups;     // the group of each row; null: each row is one
  const int32_t *run_starts;     // columns of one group lie in runs: the first of each, then num_columns
  const int32_t *run_groups;     // the group of each run
  // In place of the runs, the group of each column, and up to LANES - 1 more; else null. If each row is a group too,
  // the numbers of rows follow one another.
  const int32_t *column_groups;
  Grid zeros, scales, biases;
  void *result;
  int64_t result_row, result_column;  // elements from row to row and from column to column
  int64_t is_bf16;                    // round to bfloat16; else float32
} Dequantize;

void avx512_dequantize(const Dequantize *job);
void avx2_dequantize(const Dequantize *job);
