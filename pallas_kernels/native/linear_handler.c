#include "handlers.h"
#include "linear_job.h"

// A vector of parameters: of `size` numbers, or of none.
static int is_vector(const FfiBuffer *buffer, int64_t size) {
  return (buffer->dtype == FFI_F32 || buffer->dtype == FFI_BF16) && (elements(buffer) == 0 || elements(buffer) == size);
}

static int are_linear_operands(FfiFrame *frame, const Quantized *quantized) {
  if (frame->arguments.size != (quantized ? 7 : 6)) return 0;
  const FfiBuffer *x = ffi_argument(frame, 0), *weight = ffi_argument(frame, 1), *residual = ffi_argument(frame, 4);
  const FfiBuffer *y = ffi_result(frame, 0);
  const int64_t num_in = ffi_int(frame, "num_in"), activation = ffi_int(frame, "activation");
  if (x->dtype != FFI_F32 || x->rank != 2 || num_in <= 0 || activation < NO_ACTIVATION || activation > RELU) return 0;
  const FfiBuffer *order = quantized ? ffi_argument(frame, 6) : 0;
  if (order && elements(order) ? !is_s32(order, 1, num_in) : x->dims[1] != num_in) return 0;
  if (y->dtype != FFI_F32 || y->rank != 2 || y->dims[0] != x->dims[0]) return 0;
  const int64_t num_out = activation ? 2 * y->dims[1] : y->dims[1];
  const int is_gated = activation != NO_ACTIVATION;
  if (weight->rank != (quantized ? 3 : 4)) return 0;
  if (!(quantized ? is_packed_quantized(weight, quantized, num_out, is_gated) : is_packed(weight, num_out, num_in, is_gated)))
    return 0;
  if (activation && elements(residual)) return 0;
  if (residual->dtype != FFI_F32 || (elements(residual) != 0 && elements(residual) != elements(y))) return 0;
  return is_vector(ffi_argument(frame, 2), x->dims[1]) && is_vector(ffi_argument(frame, 3), num_out) &&
         is_s32(ffi_argument(frame, 5), 0, 0);
}

static const void *given(const FfiBuffer *buffer) { return elements(buffer) ? buffer->data : 0; }

static FfiError *multiply(FfiFrame *frame, const Quantized *quantized) {
  FfiBuffer *x = ffi_argument(frame, 0), *weight = ffi_argument(frame, 1), *y = ffi_result(frame, 0);
  Matmul matmul = {0};
  Linear *l = &matmul.linear;
  *l = (Linear){
      .x = x->data,
      .order = quantized ? given(ffi_argument(frame, 6)) : 0,
      .weight = weight->data,
      .gain = given(ffi_argument(frame, 2)),
      .bias = given(ffi_argument(frame, 3)),
      .residual = given(ffi_argument(frame, 4)),
      .y = y->data,
      .num_rows = *(const int32_t *)ffi_argument(frame, 5)->data,
      .num_in = ffi_int(frame, "num_in"),
      .num_out = y->dims[1],
      .row_features = x->dims[1],
      .panel_outs = ffi_int(frame, "activation") ? GATES : PANEL,
      .padded_in = quantized ? padded_in(quantized) : weight->dims[1] * weight->dims[3],
      .is_bf16 = weight->dtype == FFI_BF16,
      .is_gain_bf16 = ffi_argument(frame, 2)->dtype == FFI_BF16,
      .is_bias_bf16 = ffi_argument(frame, 3)->dtype == FFI_BF16,
      .activation = ffi_int(frame, "activation"),
      .eps = ffi_float(frame, "eps"),
      .scale = ffi_float(frame, "scale"),
      .quantized = quantized,
  };
  if (l->num_rows > x->dims[0]) l->num_rows = x->dims[0];
  if (l->num_rows <= 0 || l->num_out == 0) return 0;
  return run_matmuls(&matmul, 1) ? 0 : ffi_error(frame, "jaxserve_linear: out of memory");
}

// Arguments: x f32 [M, K], weight f32 or bf16 as `jaxserve_pack` packs it, gain [K] or [0], bias [N] ([2 N] of a gated
// weight) or [0], both f32 or bf16, residual f32 [M, N] or [0] (none with an activation), num_rows s32: rows in use, others
// are left as they are. Attributes: num_in, activation (gated where there is one), eps, scale. Result: y f32 [M, N].
EXPORT FfiError *jaxserve_linear(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  if (!are_linear_operands(frame, 0)) return ffi_error(frame, "jaxserve_linear: shapes or dtypes do not go together");
  return multiply(frame, 0);
}

// The same with a weight u8 [panels, blocks, bytes] as `jaxserve_quantized_pack` packs it. Further argument: order s32 [K]
// of the weight's features among those of a row, or [0] where they are the same. Further attributes: form, table.
EXPORT FfiError *jaxserve_quantized_linear(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  Quantized quantized;
  if (!read_form(frame, ffi_int(frame, "num_in"), &quantized) || !are_linear_operands(frame, &quantized))
    return ffi_error(frame, "jaxserve_quantized_linear: form, shapes or dtypes do not go together");
  return multiply(frame, &quantized);
}
