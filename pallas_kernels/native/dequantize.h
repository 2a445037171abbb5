// Decoding of quantized weights: the element (r, c) is (value of its code - zero) * scale + bias of its group, in float32.
#pragma once
#include <stdint.h>

// A number for each group of rows and columns, and the numbers to step over from group to group; 0: one for all.
typedef struct {
  const float *numbers;
  int64_t row, column;
} Grid;

// The layout of dequantize_native.py's _Job.
typedef struct {
  const uint8_t *codes;  // [num_rows, num_columns], columns contiguous
  int64_t code_row;      // bytes from row to row
  int64_t num_rows, num_columns;
  const float *table;           // the value of each of 256 codes; null: codes are the values
  int64_t is_signed;            // codes without a table are int8
  const int32_t *row_groups;    // the group of each row
  const int32_t *run_starts;    // columns of one group lie in runs: the first of each, then num_columns
  const int32_t *run_groups;    // the group of each run
  Grid zeros, scales, biases;
  void *result;
  int64_t result_row, result_column;  // elements from row to row and from column to column
  int64_t is_bf16;                    // round to bfloat16; else float32
} Dequantize;

void avx512_dequantize(const Dequantize *job);
void avx2_dequantize(const Dequantize *job);
