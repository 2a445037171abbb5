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

// Panels of a packed weight, and the row of the weight that is output r of one, or -1.
int64_t num_panels(int64_t num_out, int is_gated);
int64_t row_of_panel(int64_t num_out, int is_gated, int64_t panel, int r);

// Whether the last four dimensions of a buffer are those of such a weight.
int is_packed(const FfiBuffer *weight, int64_t num_out, int64_t num_in, int is_gated);

// The same for a quantized one, of which `quantized` says what it holds.
int is_packed_quantized(const FfiBuffer *weight, const Quantized *quantized, int64_t num_out, int is_gated);

// Reads the attributes form (s32 [11], the fields of Form) and table (f32 [16]); returns 0 if there is no layout for them.
int read_form(FfiFrame *frame, int64_t num_in, Quantized *quantized);
