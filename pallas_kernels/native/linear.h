// Matrix multiplication of activations by a packed weight, with what stands before and after it in a layer.
//
// Packed weights are panels of 32 outputs, [N / 32][K / kp][32][kp]: kp = 1 for float32 and 2 for bfloat16, whose K is
// filled up with zeros to a multiple of 32, as N is to one of 32. So 128 bytes are one step of every kernel, and 16 steps
// of bfloat16 are two tiles of AMX. A gated weight has 16 gates in a panel, and then the 16 outputs they multiply.
#pragma once
#include <stdint.h>

#include "quantized.h"

enum { PANEL = 32, GATES = 16, STEP_BYTES = 128, PANELS_AT_ONCE = 3 };

// Bytes of the codes of some features of 32 outputs: whole words.
static inline int64_t codes_bytes(const Form *form, int64_t features) {
  return features * PANEL * (form->values == CODES_INT6 ? 6 : form->values == CODES_UINT4 ? 4 : 8) / 8;
}

enum { NO_ACTIVATION = 0, SILU, GELU, GELU_TANH, RELU };

typedef struct {
  const float *x;           // [M, features of a row]
  const int32_t *order;     // [K], the feature of a row that each of the weight's is, those beyond the last being zero; or null
  const char *weight;       // packed
  const void *gain;         // of a norm of each row, for its features, or null
  const void *bias;         // [N], or null; [2 N] of a gated weight, gates first
  const float *residual;    // [M, N], or null
  float *y;                 // [M, N]: (rows @ weight + bias) * scale + residual; gated: activation(gates) * the others
  int64_t num_rows, num_in, num_out;
  int64_t row_features;     // of a row of x: K, unless there is an order
  int64_t padded_in;        // K as it is packed
  int64_t panel_outs;       // results of a panel
  int is_bf16, is_gain_bf16, is_bias_bf16, activation;  // with an activation the weight is gated
  float eps, scale;
  char *rows;               // prepared activations, block by block
  int64_t num_blocks;       // of rows
  const Quantized *quantized;  // what a quantized weight holds, or null; is_bf16 is 0 then
} Linear;

// The functions that exist once for each instruction set.
typedef struct {
  int most_rows;  // of a block
  int64_t (*block_bytes)(const Linear *);                  // of prepared activations, at most
  void (*prepare)(const Linear *, int64_t block, float *scratch);  // scratch: [3, padded_in]
  // Outputs of panels for some blocks. Partial sums lie in scratch, [PANELS_AT_ONCE, rows of these blocks, PANEL], where K
  // comes in parts, for quantized weights twice: those of a group, and those of all groups before.
  void (*multiply)(const Linear *, int64_t first_panel, int64_t last_panel, int64_t first_block, int64_t last_block,
                   float *scratch);
} LinearKernels;

extern const LinearKernels amx_linear, avx512bf16_linear, avx512_linear, avx2_linear;
extern const LinearKernels amx_quantized, avx512_quantized, avx2_quantized;  // rows that are not rounded
extern const LinearKernels amx_rounded, avx512vnni_rounded, avx512_rounded, avx2_rounded;
