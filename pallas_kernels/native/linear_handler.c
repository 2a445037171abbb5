// Matrix multiplication, called by XLA: cuts it into pieces and hands these to the threads.
#include "linear.h"

#include "handlers.h"

typedef struct {
  Linear linear;
  const LinearKernels *kernels;
  int64_t num_rows;
  int64_t num_tiles;     // register tiles of rows, of equal size as far as that goes
  int64_t tiles_at_once; // whose activations stay in the L2 cache
  int64_t outs_at_once;  // outputs of a piece of work
  _Alignas(64) atomic_llong next;
} LinearJob;

enum { L2_BYTES = 768 << 10, OUT_BYTES = 96 << 10 };

static int64_t tile_start(const LinearJob *job, int64_t tile) { return job->num_rows * tile / job->num_tiles; }

static void linear_job(void *context) {
  LinearJob *job = context;
  const int64_t outs = (job->linear.num_out + job->outs_at_once - 1) / job->outs_at_once;
  const int64_t groups = (job->num_tiles + job->tiles_at_once - 1) / job->tiles_at_once;
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < outs * groups;) {
    const int64_t begin = i % outs * job->outs_at_once, group = i / outs;
    const int64_t end = begin + job->outs_at_once < job->linear.num_out ? begin + job->outs_at_once : job->linear.num_out;
    const int64_t last = (group + 1) * job->tiles_at_once < job->num_tiles ? (group + 1) * job->tiles_at_once : job->num_tiles;
    // The outputs that stay in the L1 cache are few: all rows of the group go by them.
    const int64_t few = 8;
    for (int64_t out = begin; out < end; out += few)
      for (int64_t tile = group * job->tiles_at_once; tile < last; tile++) {
        const int64_t first = tile_start(job, tile);
        job->kernels->multiply(&job->linear, first, (int)(tile_start(job, tile + 1) - first), out,
                               out + few < end ? out + few : end);
      }
  }
}

// Arguments: x f32 [M, K], weight f32 or bf16 [N, K], num_rows s32: rows in use; the others get zeros. Result: y f32 [M, N].
EXPORT FfiError *jaxserve_linear(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  FfiBuffer *x = ffi_argument(frame, 0), *weight = ffi_argument(frame, 1), *y = ffi_result(frame, 0);
  if (frame->arguments.size != 3 || x->dtype != FFI_F32 || x->rank != 2 || weight->rank != 2 ||
      (weight->dtype != FFI_F32 && weight->dtype != FFI_BF16) || weight->dims[1] != x->dims[1] || y->dtype != FFI_F32 ||
      elements(y) != x->dims[0] * weight->dims[0] || !is_s32(ffi_argument(frame, 2), 0, 0))
    return ffi_error(frame, "jaxserve_linear: shapes or dtypes do not go together");
  LinearJob job = {
      .linear = {x->data, weight->data, y->data, x->dims[1], weight->dims[0], weight->dtype == FFI_BF16},
      .num_rows = *(const int32_t *)ffi_argument(frame, 2)->data,
  };
  const int64_t rows = x->dims[0], num_in = x->dims[1], num_out = weight->dims[0];
  if (job.num_rows > rows) job.num_rows = rows;
  if (job.num_rows < 0 || num_in == 0) job.num_rows = 0;
  if (job.num_rows < rows) memset(job.linear.y + job.num_rows * num_out, 0, sizeof(float) * (rows - job.num_rows) * num_out);
  if (job.num_rows <= 0) return 0;
  job.kernels = instructions_in_use() == 2 ? &avx512_linear : &avx2_linear;
  job.num_tiles = (job.num_rows + job.kernels->most_rows - 1) / job.kernels->most_rows;
  job.tiles_at_once = L2_BYTES / (4 * num_in * job.kernels->most_rows);
  if (job.tiles_at_once < 1) job.tiles_at_once = 1;
  job.outs_at_once = OUT_BYTES / ((job.linear.is_bf16 ? 2 : 4) * num_in) / 8 * 8;
  if (job.outs_at_once < 8) job.outs_at_once = 8;
  run_job(linear_job, &job);
  return 0;
}
