// The writes of keys and values to their pages and copies of pages, called by XLA.
#include "handlers.h"
#include "qkv_write.h"

typedef struct {
  QkvWrite write;
  WriteTokens write_tokens;
  int64_t num_tokens;
  _Alignas(64) atomic_llong next;
} WriteJob;

enum { TOKENS_AT_ONCE = 16, MOST_PLACES = 1024 };

static void write_job(void *context) {
  WriteJob *job = context;
  for (int64_t from; (from = atomic_fetch_add(&job->next, TOKENS_AT_ONCE)) < job->num_tokens;) {
    const int64_t last = from + TOKENS_AT_ONCE < job->num_tokens ? from + TOKENS_AT_ONCE : job->num_tokens;
    job->write_tokens(&job->write, from, last);
  }
}

// The page of padding tokens, if two of them have the same place there: it is the last one, and nothing reads it, so that
// several threads need not write it at once.
static int32_t unread_page(const QkvWrite *w, int64_t count) {
  int32_t last = -1;
  for (int64_t t = 0; t < count; t++)
    if (w->pages[t] > last) last = w->pages[t];
  uint64_t seen[MOST_PLACES / 64] = {0};
  int64_t num_there = 0;
  for (int64_t t = 0; t < count; t++) {
    if (w->pages[t] != last) continue;
    if (++num_there > w->page_size) return last;
    const int32_t place = w->offsets[t];
    if (place >= MOST_PLACES) continue;
    if (seen[place / 64] >> place % 64 & 1) return last;
    seen[place / 64] |= (uint64_t)1 << place % 64;
  }
  return -1;
}

static void run_write(WriteJob *job) {
  job->write_tokens = instructions_in_use() >= HAS_AVX512 ? avx512_write_tokens : avx2_write_tokens;
  job->write.unread = unread_page(&job->write, job->num_tokens);
  if (job->num_tokens <= TOKENS_AT_ONCE) write_job(job);
  else run_job(write_job, job);
}

// Whether results from `result` on are the memory of arguments from `argument` on: both pools.
static int are_in_place(FfiFrame *frame, int argument, int result) {
  return ffi_argument(frame, argument)->data == ffi_result(frame, result)->data &&
         ffi_argument(frame, argument + 1)->data == ffi_result(frame, result + 1)->data;
}

// Whether both pools and the places of tokens are as they must be.
static int are_places(const FfiBuffer *keys, const FfiBuffer *values, const FfiBuffer *pages, const FfiBuffer *offsets,
                      int64_t num_tokens, int64_t heads, int64_t width, int64_t page_size) {
  return width <= MOST_WIDTH && is_s32(pages, 1, num_tokens) && is_s32(offsets, 1, num_tokens) &&
         are_pools(keys, values, heads, width, page_size);
}

// Arguments: key, value f32 [T, K, H], both pools (results 0 and 1 are the same memory), token_pages, token_offsets s32
// [T], first_page s32: where the layer's pages begin in the pools. Attribute: page_size.
EXPORT FfiError *jaxserve_write_kv(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  FfiBuffer *key = ffi_argument(frame, 0), *keys = ffi_argument(frame, 2), *values = ffi_argument(frame, 3);
  if (!are_in_place(frame, 2, 0))
    return ffi_error(frame, "jaxserve_write_kv: the pools are not updated in place");
  FfiBuffer *value = ffi_argument(frame, 1), *pages = ffi_argument(frame, 4), *offsets = ffi_argument(frame, 5);
  const int is_complete = frame->arguments.size == 7 && is_first_page(ffi_argument(frame, 6), keys);
  if (!is_complete || key->dtype != FFI_F32 || value->dtype != FFI_F32 || key->rank != 3 ||
      elements(value) != elements(key) ||
      !are_places(keys, values, pages, offsets, key->dims[0], key->dims[1], key->dims[2], ffi_int(frame, "page_size")))
    return ffi_error(frame, "jaxserve_write_kv: shapes or dtypes do not go together");
  WriteJob job = {
      .write =
          {
              .key = key->data,
              .value = value->data,
              .pages = pages->data,
              .offsets = offsets->data,
              .keys = pages_from(keys, ffi_argument(frame, 6)),
              .values = pages_from(values, ffi_argument(frame, 6)),
              .stride = key->dims[1] * key->dims[2],
              .num_kv_heads = (int)key->dims[1],
              .width = (int)key->dims[2],
              .page_size = ffi_int(frame, "page_size"),
              .is_bf16 = keys->dtype == FFI_BF16,
          },
      .num_tokens = key->dims[0],
  };
  run_write(&job);
  return 0;
}

// Arguments: latents f32 [T, H], which the pool's type holds exactly, the pool [P, H, p] (the result is the same memory),
// token_pages, token_offsets s32 [T], first_page s32: where the layer's pages begin in the pool. Attribute: page_size.
EXPORT FfiError *jaxserve_write_latents(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  const FfiBuffer *latents = ffi_argument(frame, 0), *pool = ffi_argument(frame, 1);
  const FfiBuffer *pages = ffi_argument(frame, 2), *offsets = ffi_argument(frame, 3);
  if (pool->data != ffi_result(frame, 0)->data)
    return ffi_error(frame, "jaxserve_write_latents: the pool is not updated in place");
  if (frame->arguments.size != 5 || !is_first_page(ffi_argument(frame, 4), pool) || latents->dtype != FFI_F32 ||
      latents->rank != 2 || !is_latent_pool(pool, latents->dims[1], ffi_int(frame, "page_size")) ||
      !is_s32(pages, 1, latents->dims[0]) || !is_s32(offsets, 1, latents->dims[0]))
    return ffi_error(frame, "jaxserve_write_latents: shapes or dtypes do not go together");
  WriteJob job = {
      .write =
          {
              .key = latents->data,
              .pages = pages->data,
              .offsets = offsets->data,
              .keys = pages_from(pool, ffi_argument(frame, 4)),
              .stride = latents->dims[1],
              .num_kv_heads = 1,
              .width = (int)latents->dims[1],
              .page_size = ffi_int(frame, "page_size"),
              .is_bf16 = pool->dtype == FFI_BF16,
          },
      .num_tokens = latents->dims[0],
  };
  run_write(&job);
  return 0;
}

static int are_qkv_operands(FfiFrame *frame) {
  if (frame->arguments.size != 11 || !is_first_page(ffi_argument(frame, 10), ffi_argument(frame, 1))) return 0;
  const FfiBuffer *qkv = ffi_argument(frame, 0), *cos = ffi_argument(frame, 3), *sin = ffi_argument(frame, 4);
  const FfiBuffer *weights[] = {ffi_argument(frame, 5), ffi_argument(frame, 6)}, *out = ffi_result(frame, 0);
  if (qkv->dtype != FFI_F32 || qkv->rank != 2 || out->dtype != FFI_F32 || out->rank != 3) return 0;
  const int64_t num_tokens = qkv->dims[0], heads = ffi_int(frame, "num_kv_heads"), width = out->dims[2];
  if (out->dims[0] != num_tokens || heads <= 0 || qkv->dims[1] != (out->dims[1] + 2 * heads) * width) return 0;
  if (cos->dtype != FFI_F32 || cos->rank != 2 || cos->dims[0] != num_tokens || 2 * cos->dims[1] > width) return 0;
  if (sin->dtype != FFI_F32 || sin->rank != 2 || sin->dims[0] != num_tokens || sin->dims[1] != cos->dims[1]) return 0;
  for (int i = 0; i < 2; i++)
    if (weights[i]->dtype != FFI_F32 || elements(weights[i]) != (ffi_int(frame, "is_normed") ? width : 0)) return 0;
  return is_s32(ffi_argument(frame, 9), 0, 0) &&
         are_places(ffi_argument(frame, 1), ffi_argument(frame, 2), ffi_argument(frame, 7), ffi_argument(frame, 8),
                    num_tokens, heads, width, ffi_int(frame, "page_size"));
}

// Arguments: qkv f32 [T, (N + 2 K) * H], both pools, cos, sin f32 [T, half] (half 0: no rotation), weights of the norms of
// queries and keys f32 [H] (empty without norms), token_pages, token_offsets s32 [T], num_tokens s32: tokens in use, at the
// front; nothing is written for the others, whose queries are zeros; first_page s32: where the layer's pages begin in the
// pools. Attributes: num_kv_heads, page_size, is_normed, eps.
// Results: queries f32 [T, N, H], and both pools, which are the same memory as the arguments.
EXPORT FfiError *jaxserve_qkv_write(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  FfiBuffer *keys = ffi_argument(frame, 1), *values = ffi_argument(frame, 2), *out = ffi_result(frame, 0);
  if (!are_in_place(frame, 1, 1))
    return ffi_error(frame, "jaxserve_qkv_write: the pools are not updated in place");
  if (!are_qkv_operands(frame)) return ffi_error(frame, "jaxserve_qkv_write: shapes or dtypes do not go together");
  const float *qkv = ffi_argument(frame, 0)->data;
  const int64_t num_tokens = out->dims[0], heads = out->dims[1], width = out->dims[2];
  const int num_kv_heads = ffi_int(frame, "num_kv_heads"), is_normed = ffi_int(frame, "is_normed");
  WriteJob job = {
      .write =
          {
              .query = qkv,
              .key = qkv + heads * width,
              .value = qkv + (heads + num_kv_heads) * width,
              .cos = ffi_argument(frame, 3)->data,
              .sin = ffi_argument(frame, 4)->data,
              .query_weight = is_normed ? ffi_argument(frame, 5)->data : 0,
              .key_weight = is_normed ? ffi_argument(frame, 6)->data : 0,
              .pages = ffi_argument(frame, 7)->data,
              .offsets = ffi_argument(frame, 8)->data,
              .out = out->data,
              .keys = pages_from(keys, ffi_argument(frame, 10)),
              .values = pages_from(values, ffi_argument(frame, 10)),
              .stride = (heads + 2 * num_kv_heads) * width,
              .num_heads = (int)heads,
              .num_kv_heads = num_kv_heads,
              .width = (int)width,
              .half = (int)ffi_argument(frame, 3)->dims[1],
              .page_size = ffi_int(frame, "page_size"),
              .is_bf16 = keys->dtype == FFI_BF16,
              .eps = ffi_float(frame, "eps"),
          },
      .num_tokens = *(const int32_t *)ffi_argument(frame, 9)->data,
  };
  if (job.num_tokens > num_tokens) job.num_tokens = num_tokens;
  if (job.num_tokens < 0) job.num_tokens = 0;
  memset(job.write.out + job.num_tokens * heads * width, 0, sizeof(float) * (num_tokens - job.num_tokens) * heads * width);
  run_write(&job);
  return 0;
}

// Reads all sources before a target is written, since one page may be both.
static void copy_pages_of(const FfiBuffer *pool, const FfiBuffer *sources, const FfiBuffer *targets, char *scratch) {
  const int32_t *from = sources->data, *to = targets->data;
  const int64_t num_pages = pool->dims[0], size = (int64_t)page_bytes(pool);
  char *pages = pool->data;
  for (int64_t i = 0; i < targets->dims[0]; i++) {
    if (to[i] < 0 || to[i] >= num_pages) continue;
    const int64_t source = from[i] < 0 ? 0 : from[i] < num_pages ? from[i] : num_pages - 1;
    memcpy(scratch + i * size, pages + source * size, size);
  }
  for (int64_t i = 0; i < targets->dims[0]; i++)
    if (to[i] >= 0 && to[i] < num_pages) memcpy(pages + to[i] * size, scratch + i * size, size);
}

// Arguments: one or two pools (the results are the same memory), sources, targets s32 [C]; nothing is written to a target
// that is no page.
EXPORT FfiError *jaxserve_copy_pages(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  const int count = (int)frame->arguments.size - 2;
  if (count != 1 && count != 2) return ffi_error(frame, "jaxserve_copy_pages: shapes or dtypes do not go together");
  FfiBuffer *sources = ffi_argument(frame, count), *targets = ffi_argument(frame, count + 1);
  size_t largest = 0;
  for (int i = 0; i < count; i++) {
    const FfiBuffer *pool = ffi_argument(frame, i);
    if (pool->data != ffi_result(frame, i)->data)
      return ffi_error(frame, "jaxserve_copy_pages: the pools are not updated in place");
    if ((pool->dtype != FFI_F32 && pool->dtype != FFI_BF16) || pool->rank < 1 || pool->dims[0] == 0)
      return ffi_error(frame, "jaxserve_copy_pages: shapes or dtypes do not go together");
    if (page_bytes(pool) > largest) largest = page_bytes(pool);
  }
  if (!is_s32(sources, 1, sources->dims[0]) || !is_s32(targets, 1, sources->dims[0]))
    return ffi_error(frame, "jaxserve_copy_pages: shapes or dtypes do not go together");
  char *scratch = reserve(OF_CALL, (size_t)targets->dims[0] * largest);
  if (!scratch) return ffi_error(frame, "jaxserve_copy_pages: out of memory");
  for (int i = 0; i < count; i++) copy_pages_of(ffi_argument(frame, i), sources, targets, scratch);
  return 0;
}
