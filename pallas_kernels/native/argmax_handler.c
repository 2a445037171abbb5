// Which number of each row is the largest: cuts rows into pieces and hands these to the threads.
#include "argmax.h"

#include "handlers.h"

typedef struct {
  const float *numbers;  // [num_rows, width]
  int64_t num_rows, width, num_pieces;  // pieces of a row
  Largest *found;                       // [num_rows, num_pieces]
  FindLargest find;
  _Alignas(64) atomic_llong next;
} ArgmaxJob;

enum { PIECE = 16384 };

static int64_t piece_size(const ArgmaxJob *job, int64_t piece) {
  const int64_t left = job->width - piece * PIECE;
  return left < PIECE ? left : PIECE;
}

static void argmax_job(void *context) {
  ArgmaxJob *job = context;
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->num_rows * job->num_pieces;) {
    const int64_t row = i / job->num_pieces, piece = i % job->num_pieces;
    job->found[i] = job->find(job->numbers + row * job->width + piece * PIECE, piece_size(job, piece));
  }
}

// The index of a row's maximum, or -1 if it has NaN, or nothing above -inf.
static int32_t place_of_largest(const ArgmaxJob *job, int64_t row) {
  const Largest *found = job->found + row * job->num_pieces;
  int64_t best = 0;
  for (int64_t i = 0; i < job->num_pieces; i++) {
    if (found[i].has_nan) return -1;
    if (found[i].largest > found[best].largest) best = i;
  }
  if (found[best].largest == -__builtin_inff()) return -1;
  const float *numbers = job->numbers + row * job->width + best * PIECE;
  int64_t place = 0;
  while (numbers[place] != found[best].largest) place++;
  return (int32_t)(best * PIECE + place);
}

// Arguments: numbers f32 [R, V], num_rows s32: rows in use, the others get -1. Result: s32 [R].
EXPORT FfiError *jaxserve_argmax(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  FfiBuffer *numbers = ffi_argument(frame, 0), *result = ffi_result(frame, 0);
  if (frame->arguments.size != 2 || numbers->dtype != FFI_F32 || numbers->rank != 2 || numbers->dims[1] < 1 ||
      !is_s32(result, 1, numbers->dims[0]) || !is_s32(ffi_argument(frame, 1), 0, 0))
    return ffi_error(frame, "jaxserve_argmax: shapes or dtypes do not go together");
  ArgmaxJob job = {
      .numbers = numbers->data,
      .num_rows = *(const int32_t *)ffi_argument(frame, 1)->data,
      .width = numbers->dims[1],
      .num_pieces = (numbers->dims[1] + PIECE - 1) / PIECE,
      .find = instructions_in_use() >= HAS_AVX512 ? avx512_largest : avx2_largest,
  };
  if (job.num_rows > numbers->dims[0]) job.num_rows = numbers->dims[0];
  if (job.num_rows < 0) job.num_rows = 0;
  job.found = reserve(OF_CALL, sizeof(Largest) * (size_t)(job.num_rows * job.num_pieces + 1));
  if (!job.found) return ffi_error(frame, "jaxserve_argmax: out of memory");
  if (job.num_rows * job.num_pieces <= 1) argmax_job(&job);
  else run_job(argmax_job, &job);
  int32_t *places = result->data;
  for (int64_t row = 0; row < numbers->dims[0]; row++) places[row] = row < job.num_rows ? place_of_largest(&job, row) : -1;
  return 0;
}
