// Matmuls with packed weights of one shape, cut into pieces for the threads.
#pragma once
#include "ffi.h"
#include "linear.h"

typedef struct {
  Linear linear;  // all but `rows` and `num_blocks`
  int64_t first_block, first_piece, num_groups;  // of blocks of rows, which panels meet together; set by run_matmuls
} Matmul;

// Runs matmuls that differ in their rows and weights alone, in order; returns 0 if there is no memory.
//
// Every thread begins with pieces of its own that lie side by side in memory, however many matmuls these belong to.
int run_matmuls(Matmul *matmuls, int64_t count);

// Panels of a packed weight.
int64_t num_panels(int64_t num_out, int is_gated);

// Whether the last four dimensions of a buffer are those of such a weight.
int is_packed(const FfiBuffer *weight, int64_t num_out, int64_t num_in, int is_gated);
