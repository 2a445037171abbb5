// The write of keys and values to their pages, called by XLA.
#include "handlers.h"

typedef struct {
  const float *key, *value;           // [T, K, H]
  char *keys, *values;                // [P, K, H, p], [P, K, p, H]
  const int32_t *pages, *offsets;     // [T]
  int64_t num_tokens;
  int num_kv_heads, width, page_size, is_bf16;
  _Alignas(64) atomic_llong next;
} WriteJob;

enum { TOKENS_AT_ONCE = 8 };

static uint16_t to_bf16(float x) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A value that is not finite moves to its key as NaN and leaves zero: the next owner of its place is safe, since masked
// keys do not count, and the sequence itself still gets NaN.
static void write_one(const WriteJob *job, int64_t key_at, int64_t value_at, float key, float value) {
  if (job->is_bf16) {
    const uint16_t stored = to_bf16(value);
    const int is_finite = (stored & 0x7f80) != 0x7f80;
    ((uint16_t *)job->keys)[key_at] = is_finite ? to_bf16(key) : 0x7fc0;
    ((uint16_t *)job->values)[value_at] = is_finite ? stored : 0;
    return;
  }
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const int is_finite = (bits & 0x7f800000) != 0x7f800000;
  ((float *)job->keys)[key_at] = is_finite ? key : __builtin_nanf("");
  ((float *)job->values)[value_at] = is_finite ? value : 0;
}

static void write_job(void *context) {
  WriteJob *job = context;
  const int heads = job->num_kv_heads, width = job->width, page_size = job->page_size;
  for (int64_t from; (from = atomic_fetch_add(&job->next, TOKENS_AT_ONCE)) < job->num_tokens;)
    for (int64_t t = from; t < from + TOKENS_AT_ONCE && t < job->num_tokens; t++)
      for (int k = 0; k < heads; k++) {
        const int64_t source = (t * heads + k) * width;
        const int64_t head = ((int64_t)job->pages[t] * heads + k) * width * page_size;
        for (int h = 0; h < width; h++)
          write_one(job, head + (int64_t)h * page_size + job->offsets[t], head + (int64_t)job->offsets[t] * width + h,
                    job->key[source + h], job->value[source + h]);
      }
}

// Arguments: key, value f32 [T, K, H], both pools (results 0 and 1 are the same memory), token_pages, token_offsets s32
// [T]. Attribute: page_size.
EXPORT FfiError *jaxserve_write_kv(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  FfiBuffer *key = ffi_argument(frame, 0), *keys = ffi_argument(frame, 2), *values = ffi_argument(frame, 3);
  if (keys->data != ffi_result(frame, 0)->data || values->data != ffi_result(frame, 1)->data)
    return ffi_error(frame, "jaxserve_write_kv: the pools are not updated in place");
  FfiBuffer *value = ffi_argument(frame, 1);
  if (frame->arguments.size != 6 || key->dtype != FFI_F32 || value->dtype != FFI_F32 || key->rank != 3 ||
      elements(value) != elements(key) || !is_s32(ffi_argument(frame, 4), 1, key->dims[0]) ||
      !is_s32(ffi_argument(frame, 5), 1, key->dims[0]) ||
      !are_pools(keys, values, key->dims[1], key->dims[2], ffi_int(frame, "page_size")))
    return ffi_error(frame, "jaxserve_write_kv: shapes or dtypes do not go together");
  WriteJob job = {
      .key = key->data,
      .value = ffi_argument(frame, 1)->data,
      .keys = keys->data,
      .values = values->data,
      .pages = ffi_argument(frame, 4)->data,
      .offsets = ffi_argument(frame, 5)->data,
      .num_tokens = key->dims[0],
      .num_kv_heads = (int)key->dims[1],
      .width = (int)key->dims[2],
      .page_size = ffi_int(frame, "page_size"),
      .is_bf16 = keys->dtype == FFI_BF16,
  };
  // Pages for padding tokens are written by many tokens at once; whatever they hold is finite and never read.
  if (job.num_tokens <= 2 * TOKENS_AT_ONCE) write_job(&job);
  else run_job(write_job, &job);
  return 0;
}
