// Rows of records of a quantized weight, made of a box of it as its file has it.
#pragma once
#include "dequantize.h"

// A number for each group of rows and columns, as records have it, and the bytes from group to group; 0: one for all.
typedef struct {
  const char *numbers;
  int64_t size, row, column;
} Numbers;

// The layout of records_native.py's _Job.
typedef struct {
  const uint8_t *codes;  // [num_rows, num_columns], columns contiguous, or blocks
  int64_t code_row;      // bytes from row to row
  Blocks blocks;
  int64_t num_rows, num_columns, span;  // columns of a record
  int64_t added;                        // to each code, modulo 256
  int64_t is_halves;                    // a record has two codes a byte
  const int32_t *row_groups, *record_groups;  // the group of each row and record; null: each is one
  Numbers numbers[5];                         // after the codes of a record; no size: there are no more
  const int32_t *columns;  // the given column that each is, or below 0 for one that is filled up; null: they are the same
  uint8_t *whole;          // room for the codes of a row as they are given, if there are columns
  int64_t num_given;       // columns of these
  char *result;
  int64_t result_row, record_bytes;  // bytes from row to row and of a record
} Records;

// Codes of four bits that words of eight hold along the rows: uint32 [num_columns, num_words].
typedef struct {
  const char *words;
  int64_t word_row;               // bytes from column to column
  int64_t num_columns, num_words;
  int64_t place[8];  // of each code of a word, the lowest first, among the eight rows
  char *result;      // [8 * num_words, (num_columns + 1) / 2], the codes of a row in pairs, the first in the lower half
} Turn;
