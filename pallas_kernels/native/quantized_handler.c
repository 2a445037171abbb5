// Forms of quantized weights as XLA hands them over, and single rows of such a weight.
#include <math.h>

#include "handlers.h"
#include "linear_job.h"

int read_form(FfiFrame *frame, int64_t num_in, Quantized *quantized) {
  const FfiArray *form = ffi_array(frame, "form"), *table = ffi_array(frame, "table");
  if (form->dtype != FFI_S32 || form->size != sizeof(Form) / sizeof(int32_t)) return 0;
  if (table->dtype != FFI_F32 || table->size != 16 || num_in <= 0) return 0;
  return describe(quantized, form->values, num_in, table->values);
}

int is_packed_quantized(const FfiBuffer *weight, const Quantized *q, int64_t num_out, int is_gated) {
  if (weight->dtype != FFI_U8 || weight->rank < 3) return 0;
  const int64_t *dims = weight->dims + weight->rank - 3;
  return dims[0] == num_panels(num_out, is_gated) && dims[1] == q->num_blocks && dims[2] == q->block_bytes;
}

// A float of few bits; all ones in the exponent are infinite or NaN if `has_infinity`.
static float small_float(uint32_t bits, int exponent_bits, int fraction_bits, int has_infinity) {
  const uint32_t fraction = bits & ((1u << fraction_bits) - 1), most = (1u << exponent_bits) - 1;
  const uint32_t exponent = bits >> fraction_bits & most;
  const int bias = (int)most / 2;
  float size;
  if (exponent == most && has_infinity) size = fraction ? NAN : INFINITY;
  else if (!exponent) size = ldexpf((float)fraction, 1 - bias - fraction_bits);
  else size = ldexpf((float)(fraction | 1u << fraction_bits), (int)exponent - bias - fraction_bits);
  return bits >> (exponent_bits + fraction_bits) & 1 ? -size : size;
}

static float byte_float(uint32_t byte, int is_e4m3) {
  if (is_e4m3) return (byte & 0x7f) == 0x7f ? NAN : small_float(byte, 4, 3, 0);
  return small_float(byte, 5, 2, 1);
}

// Number i of those that lie there.
static float number(int kind, const char *numbers, int i) {
  const char *at = numbers + i * number_bytes(kind);
  uint32_t bits = 0;
  memcpy(&bits, at, (size_t)number_bytes(kind));
  switch (kind) {
    case NUMBERS_F16: return small_float(bits, 5, 10, 1);
    case NUMBERS_E8M0: bits = bits ? bits << 23 : 1 << 22; break;
    case NUMBERS_BF16: bits <<= 16; break;
    case NUMBERS_E4M3: return byte_float(bits, 1);
    case NUMBERS_E5M2: return byte_float(bits, 0);
    case NUMBERS_S8: return (float)(int8_t)bits;
    case NUMBERS_U8: return (float)bits;
    default: break;
  }
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}

typedef struct {
  const Quantized *q;
  const char *packed;
  const int32_t *indices;
  float *rows;
  int64_t num_rows;
  float values[256];  // of codes
  _Alignas(64) atomic_llong next;
} RowsJob;

static void list_values(const Form *form, const float *table, float *values) {
  for (int code = 0; code < 256; code++)
    switch (form->values) {
      case CODES_INT8: values[code] = (float)(code - 128); break;
      case CODES_UINT8: values[code] = (float)code; break;
      case CODES_UINT4: values[code] = table[code & 15]; break;
      case CODES_INT6: values[code] = (float)(code - 32); break;
      default: values[code] = byte_float((uint32_t)code, form->values == CODES_E4M3);
    }
}

// The code of a feature of output r.
static uint8_t code_of(const Form *f, const char *group, int64_t k, int r) {
  const int64_t unit = code_unit(f), i = k % unit;
  if (unit == 1) return (uint8_t)group[k * PANEL + r];
  const char *words = group + codes_bytes(f, k - i) + r * 4;
  if (unit == 4) return (uint8_t)words[i];
  const uint8_t half = (uint8_t)words[i / 8 * PANEL * 4 + i % 8 / 2] >> i % 2 * 4 & 15;
  if (unit == 8) return half;
  const uint8_t upper = (uint8_t)words[2 * PANEL * 4 + i % 8 / 2] >> (i / 8 * 4 + i % 2 * 2) & 3;
  return (uint8_t)(half | upper << 4);
}

// Decodes output r of a panel.
static void decode_row(const RowsJob *job, const char *panel, int r, float *to) {
  const Quantized *q = job->q;
  const Form *f = &q->form;
  for (int64_t g = 0; g < q->num_groups; g++, to += f->group) {
    const char *group = group_of(q, panel, g), *block = block_of(q, panel, g);
    const float zero = f->zeros ? number(f->zeros, group + q->zero_at, r) : 0;
    float scale = number(f->scales, group + q->scale_at, r), bias = -0.0f;  // adding it changes no number
    if (f->factors && f->divides) scale /= number(f->factors, block, r);
    else if (f->factors) scale *= number(f->factors, block, r);
    if (f->biases) bias = number(f->biases, group + q->bias_at, r);
    if (f->biases && f->factors) bias *= number(f->factors, block + PANEL * number_bytes(f->factors), r);
    for (int64_t k = 0; k < f->group; k++) {
      const float value = job->values[code_of(f, group, k, r)];
      to[k] = (value - (float)f->zero - zero) * scale + bias;
    }
  }
}

static void rows_job(void *context) {
  RowsJob *job = context;
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->num_rows;)
    decode_row(job, job->packed + job->indices[i] / PANEL * panel_bytes(job->q), job->indices[i] % PANEL,
               job->rows + i * job->q->num_in);
}

// Arguments: packed u8 [panels, blocks, bytes], indices s32 [T] of outputs. Attributes: form, table. Result: f32 [T, K].
EXPORT FfiError *jaxserve_quantized_rows(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  const FfiBuffer *packed = ffi_argument(frame, 0), *indices = ffi_argument(frame, 1), *rows = ffi_result(frame, 0);
  Quantized q;
  if (rows->rank != 2 || rows->dtype != FFI_F32 || packed->rank != 3 || !read_form(frame, rows->dims[1], &q) ||
      !is_packed_quantized(packed, &q, packed->dims[0] * PANEL, 0) || !is_s32(indices, 1, rows->dims[0]))
    return ffi_error(frame, "jaxserve_quantized_rows: form, shapes or dtypes do not go together");
  RowsJob job = {.q = &q, .packed = packed->data, .indices = indices->data, .rows = rows->data, .num_rows = rows->dims[0]};
  list_values(&q.form, ffi_array(frame, "table")->values, job.values);
  for (int64_t i = 0; i < job.num_rows; i++)
    if (job.indices[i] < 0 || job.indices[i] >= packed->dims[0] * PANEL)
      return ffi_error(frame, "jaxserve_quantized_rows: there is no such row");
  run_job(rows_job, &job);
  return 0;
}
