// Truncation of rows of scores, called by XLA: hands rows to the threads.
#include "handlers.h"
#include "truncation.h"

typedef struct {
  const float *scores;  // [num_rows, width]
  const int32_t *top_k;
  const float *top_p, *min_p;
  float *floors;
  int64_t num_rows, width;
  FindFloor find;
  atomic_int failed;
  _Alignas(64) atomic_llong next;
} TruncationJob;

static void truncation_job(void *context) {
  TruncationJob *job = context;
  const size_t masses = BINS * sizeof(double);
  char *scratch = reserve(OF_JOB, masses + sizeof(Candidate) * (size_t)job->width);
  if (!scratch) {
    atomic_store(&job->failed, 1);
    return;
  }
  for (int64_t row; (row = atomic_fetch_add(&job->next, 1)) < job->num_rows;) {
    const Cuts cuts = {job->top_k[row], job->top_p[row], job->min_p[row]};
    const float *scores = job->scores + row * job->width;
    job->floors[row] = job->find(scores, job->width, cuts, (double *)scratch, (Candidate *)(scratch + masses));
  }
}

static int is_f32(const FfiBuffer *buffer, int64_t count) {
  return buffer->dtype == FFI_F32 && buffer->rank == 1 && buffer->dims[0] == count;
}

// Arguments: scores f32 [R, V], top_k s32 [R], top_p, min_p f32 [R]. Result: the lowest score that each row keeps, f32 [R].
EXPORT FfiError *jaxserve_truncation(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  FfiBuffer *scores = ffi_argument(frame, 0), *result = ffi_result(frame, 0);
  if (frame->arguments.size != 4 || scores->dtype != FFI_F32 || scores->rank != 2 || scores->dims[1] < 1 ||
      !is_s32(ffi_argument(frame, 1), 1, scores->dims[0]) || !is_f32(ffi_argument(frame, 2), scores->dims[0]) ||
      !is_f32(ffi_argument(frame, 3), scores->dims[0]) || !is_f32(result, scores->dims[0]))
    return ffi_error(frame, "jaxserve_truncation: shapes or dtypes do not go together");
  TruncationJob job = {
      .scores = scores->data,
      .top_k = ffi_argument(frame, 1)->data,
      .top_p = ffi_argument(frame, 2)->data,
      .min_p = ffi_argument(frame, 3)->data,
      .floors = result->data,
      .num_rows = scores->dims[0],
      .width = scores->dims[1],
      .find = instructions_in_use() >= HAS_AVX512 ? avx512_floor : avx2_floor,
  };
  if (job.num_rows <= 1) truncation_job(&job);
  else run_job(truncation_job, &job);
  return atomic_load(&job.failed) ? ffi_error(frame, "jaxserve_truncation: out of memory") : 0;
}
