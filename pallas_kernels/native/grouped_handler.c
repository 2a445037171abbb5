// Matmul of each row with the matrix of its expert.
#include "handlers.h"
#include "linear_job.h"

static int are_grouped_operands(FfiFrame *frame, const Quantized *quantized) {
  if (frame->arguments.size != 3) return 0;
  const FfiBuffer *x = ffi_argument(frame, 0), *weight = ffi_argument(frame, 1), *y = ffi_result(frame, 0);
  const int is_gated = ffi_int(frame, "is_gated");
  if (x->dtype != FFI_F32 || x->rank != 2 || x->dims[1] <= 0 || weight->rank != (quantized ? 4 : 5)) return 0;
  if (y->dtype != FFI_F32 || y->rank != 2 || y->dims[0] != x->dims[0]) return 0;
  const int64_t num_out = is_gated ? 2 * y->dims[1] : y->dims[1];
  if (!(quantized ? is_packed_quantized(weight, quantized, num_out, is_gated)
                  : is_packed(weight, num_out, x->dims[1], is_gated)))
    return 0;
  return is_s32(ffi_argument(frame, 2), 1, weight->dims[0]);
}

// The rows that all experts have together, or -1: a size is negative, or there are not that many.
static int64_t sum_of_sizes(const int32_t *sizes, int64_t num_experts, int64_t num_rows) {
  int64_t sum = 0;
  for (int64_t e = 0; e < num_experts; e++) {
    if (sizes[e] < 0) return -1;
    sum += sizes[e];
  }
  return sum <= num_rows ? sum : -1;
}

// Fills in a matmul for each expert that has rows; returns how many.
static int64_t list_matmuls(FfiFrame *frame, const Quantized *quantized, Matmul *matmuls) {
  const FfiBuffer *x = ffi_argument(frame, 0), *weight = ffi_argument(frame, 1), *y = ffi_result(frame, 0);
  const int32_t *sizes = ffi_argument(frame, 2)->data;
  const int is_gated = ffi_int(frame, "is_gated"), is_bf16 = weight->dtype == FFI_BF16;
  const int64_t matrix_bytes = elements(weight) / weight->dims[0] * (quantized ? 1 : is_bf16 ? 2 : 4);
  int64_t count = 0, row = 0;
  for (int64_t e = 0; e < weight->dims[0]; row += sizes[e], e++) {
    if (!sizes[e]) continue;
    matmuls[count++].linear = (Linear){
        .x = (const float *)x->data + row * x->dims[1],
        .weight = (const char *)weight->data + e * matrix_bytes,
        .y = (float *)y->data + row * y->dims[1],
        .num_rows = sizes[e],
        .num_in = x->dims[1],
        .row_features = x->dims[1],
        .num_out = y->dims[1],
        .panel_outs = is_gated ? GATES : PANEL,
        .padded_in = quantized ? padded_in(quantized) : weight->dims[2] * weight->dims[4],
        .is_bf16 = is_bf16,
        .activation = is_gated ? SILU : NO_ACTIVATION,
        .scale = 1,
        .quantized = quantized,
    };
  }
  return count;
}

static FfiError *multiply(FfiFrame *frame, const Quantized *quantized) {
  const FfiBuffer *x = ffi_argument(frame, 0), *weight = ffi_argument(frame, 1), *y = ffi_result(frame, 0);
  const int32_t *sizes = ffi_argument(frame, 2)->data;
  const int64_t num_experts = weight->dims[0], width = y->dims[1];
  const int64_t used = sum_of_sizes(sizes, num_experts, x->dims[0]);
  if (used < 0)
    return ffi_error(frame, "jaxserve_grouped_matmul: group_sizes must not be negative, nor exceed the rows together");
  memset((float *)y->data + used * width, 0, sizeof(float) * (size_t)((x->dims[0] - used) * width));
  if (used == 0 || width == 0) return 0;
  Matmul *matmuls = reserve(OF_EXPERTS, sizeof(Matmul) * (size_t)num_experts);
  if (!matmuls || !run_matmuls(matmuls, list_matmuls(frame, quantized, matmuls)))
    return ffi_error(frame, "jaxserve_grouped_matmul: out of memory");
  return 0;
}

// Arguments: x f32 [M, K], rows in the order of their experts; weight f32 or bf16 [E, ...], each matrix as `jaxserve_pack`
// packs it; group_sizes s32 [E], rows of each expert. Attribute: is_gated. Result: y f32 [M, N], gated silu(gate) * up;
// zeros after the last expert's rows. Matrices of experts without rows are not read.
EXPORT FfiError *jaxserve_grouped_matmul(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  if (!are_grouped_operands(frame, 0))
    return ffi_error(frame, "jaxserve_grouped_matmul: shapes or dtypes do not go together");
  return multiply(frame, 0);
}

// The same with matrices u8 [E, panels, blocks, bytes] as `jaxserve_quantized_pack` packs each. Further attributes: form,
// table.
EXPORT FfiError *jaxserve_quantized_grouped_matmul(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  Quantized quantized;
  const FfiBuffer *x = ffi_argument(frame, 0);
  if (x->rank != 2 || !read_form(frame, x->dims[1], &quantized) || !are_grouped_operands(frame, &quantized))
    return ffi_error(frame, "jaxserve_quantized_grouped_matmul: form, shapes or dtypes do not go together");
  return multiply(frame, &quantized);
}
