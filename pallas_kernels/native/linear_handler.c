// Matrix multiplication and the packing of weights: cuts them into pieces and hands these to the threads.
#include "linear.h"

#include "handlers.h"

// ---------------------------------------------------------------- packing

typedef struct {
  const char *from;
  char *to;
  int64_t num_in, num_out, num_units;  // units of 4 bytes: a float, or a pair in bfloat16
  int item, is_gated, is_inverse;
  _Alignas(64) atomic_llong next;
} PackJob;

enum { UNITS_AT_ONCE = 16 };

// The row of the weight that is output r of a panel, or -1.
static int64_t row_of(const PackJob *job, int64_t panel, int r) {
  if (!job->is_gated) return panel * PANEL + r < job->num_out ? panel * PANEL + r : -1;
  const int64_t half = job->num_out / 2, i = panel * GATES + r % GATES;
  return i >= half ? -1 : r < GATES ? i : half + i;
}

static int64_t num_panels(int64_t num_out, int is_gated) {
  return is_gated ? (num_out / 2 + GATES - 1) / GATES : (num_out + PANEL - 1) / PANEL;
}

// A panel of whole rows: 16 units of each at a time, a cache line.
static void pack_whole(const uint32_t *const *rows, uint32_t *packed, int64_t num_units) {
  for (int64_t start = 0; start < num_units; start += UNITS_AT_ONCE) {
    const int64_t end = start + UNITS_AT_ONCE < num_units ? start + UNITS_AT_ONCE : num_units;
    for (int64_t unit = start; unit < end; unit++)
      for (int r = 0; r < PANEL; r++) packed[unit * PANEL + r] = rows[r][unit];
  }
}

static void pack_panel(const PackJob *job, int64_t panel) {
  const int64_t row_bytes = job->num_in * job->item, packed_row = job->num_units * 4;
  char *packed = (job->is_inverse ? (char *)job->from : job->to) + panel * packed_row * PANEL;
  char *plain = job->is_inverse ? job->to : (char *)job->from, *rows[PANEL];
  int is_whole = packed_row == row_bytes;
  for (int r = 0; r < PANEL; r++) {
    const int64_t row = row_of(job, panel, r);
    rows[r] = row < 0 ? 0 : plain + row * row_bytes;
    is_whole &= row >= 0;
  }
  if (!job->is_inverse && is_whole) {
    pack_whole((const uint32_t *const *)rows, (uint32_t *)packed, job->num_units);
    return;
  }
  if (!job->is_inverse) memset(packed, 0, (size_t)packed_row * PANEL);
  for (int r = 0; r < PANEL; r++)
    for (int64_t unit = 0; rows[r] && unit * 4 < row_bytes; unit++) {
      const size_t size = row_bytes - unit * 4 < 4 ? 2 : 4;
      char *of_row = rows[r] + unit * 4, *of_panel = packed + (unit * PANEL + r) * 4;
      if (job->is_inverse) memcpy(of_row, of_panel, size);
      else memcpy(of_panel, of_row, size);
    }
}

static void pack_job(void *context) {
  PackJob *job = context;
  const int64_t panels = num_panels(job->num_out, job->is_gated);
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < panels;) pack_panel(job, i);
}

// Packs a weight [num_out, num_in] of 2 or 4 bytes an item into panels of padded_in features, or restores it. The first
// half of a gated one's outputs are gates.
EXPORT void jaxserve_pack(const void *from, void *to, int64_t num_out, int64_t num_in, int64_t padded_in, int item,
                          int is_gated, int is_inverse) {
  PackJob job = {from, to, num_in, num_out, padded_in * item / 4, item, is_gated, is_inverse, 0};
  run_job(pack_job, &job);
}

// ---------------------------------------------------------------- products

enum { L2_BYTES = 768 << 10, FEW_ROWS = 4, PIECES_EACH = 8, MOST_PANELS = 16, MOST_RANGES = 32 };

typedef struct {
  Linear linear;
  const LinearKernels *kernels;
  int64_t blocks_at_once;  // whose prepared activations stay in the L2 cache
  int64_t panels_at_once;  // of a piece of work
  int64_t num_pieces;
  int failed;
  _Alignas(64) atomic_llong next;  // block of rows to prepare
  // Each thread begins with a range of pieces of its own, since weights stream faster in one run, then helps the others.
  int num_ranges;
  _Alignas(64) atomic_int next_range;
  struct {
    _Alignas(64) atomic_llong next;
  } ranges[MOST_RANGES];
} LinearJob;

static void prepare_job(void *context) {
  LinearJob *job = context;
  const Linear *l = &job->linear;
  float *scratch = reserve(OF_JOB, sizeof(float) * l->padded_in);
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < l->num_blocks;) {
    if (scratch) job->kernels->prepare(l, i, scratch);
    else job->failed = 1;
  }
}

static void multiply_piece(LinearJob *job, int64_t piece, float *scratch) {
  const Linear *l = &job->linear;
  const int64_t panels = (l->num_out + l->panel_outs - 1) / l->panel_outs, parts = (panels + job->panels_at_once - 1) / job->panels_at_once;
  const int64_t begin = piece % parts * job->panels_at_once, first = piece / parts * job->blocks_at_once;
  const int64_t end = begin + job->panels_at_once < panels ? begin + job->panels_at_once : panels;
  const int64_t last = first + job->blocks_at_once < l->num_blocks ? first + job->blocks_at_once : l->num_blocks;
  job->kernels->multiply(l, begin, end, first, last, scratch);
}

static int64_t range_start(const LinearJob *job, int range) { return job->num_pieces * range / job->num_ranges; }

static void linear_job(void *context) {
  LinearJob *job = context;
  float *scratch = reserve(OF_JOB, sizeof(float) * PANELS_AT_ONCE * PANEL * job->blocks_at_once * job->kernels->most_rows);
  if (!scratch) {
    job->failed = 1;
    return;
  }
  const int own = atomic_fetch_add(&job->next_range, 1);
  for (int i = 0; i < job->num_ranges; i++) {
    const int range = (own + i) % job->num_ranges;
    const int64_t stop = range_start(job, range + 1);
    for (int64_t piece; (piece = atomic_fetch_add(&job->ranges[range].next, 1)) < stop;)
      multiply_piece(job, piece, scratch);
  }
}

// A vector of parameters: of `size` numbers, or of none.
static int is_vector(const FfiBuffer *buffer, int64_t size) {
  return (buffer->dtype == FFI_F32 || buffer->dtype == FFI_BF16) && (elements(buffer) == 0 || elements(buffer) == size);
}

static int are_linear_operands(FfiFrame *frame) {
  if (frame->arguments.size != 6) return 0;
  const FfiBuffer *x = ffi_argument(frame, 0), *weight = ffi_argument(frame, 1), *residual = ffi_argument(frame, 4);
  const FfiBuffer *y = ffi_result(frame, 0);
  const int64_t num_in = ffi_int(frame, "num_in"), activation = ffi_int(frame, "activation");
  if (x->dtype != FFI_F32 || x->rank != 2 || num_in <= 0 || activation < NO_ACTIVATION || activation > RELU) return 0;
  if (x->dims[1] != num_in) return 0;
  const int is_bf16 = weight->dtype == FFI_BF16;
  if ((weight->dtype != FFI_F32 && !is_bf16) || weight->rank != 4 || weight->dims[2] != PANEL) return 0;
  if (weight->dims[3] != (is_bf16 ? 2 : 1)) return 0;
  if (weight->dims[1] * weight->dims[3] != (is_bf16 ? (num_in + 31) / 32 * 32 : num_in)) return 0;
  if (y->dtype != FFI_F32 || y->rank != 2 || y->dims[0] != x->dims[0]) return 0;
  const int64_t num_out = activation ? 2 * y->dims[1] : y->dims[1];
  if (weight->dims[0] != num_panels(num_out, activation != NO_ACTIVATION)) return 0;
  if (activation && elements(residual)) return 0;
  if (residual->dtype != FFI_F32 || (elements(residual) != 0 && elements(residual) != elements(y))) return 0;
  return is_vector(ffi_argument(frame, 2), num_in) && is_vector(ffi_argument(frame, 3), num_out) &&
         is_s32(ffi_argument(frame, 5), 0, 0);
}

static const void *given(const FfiBuffer *buffer) { return elements(buffer) ? buffer->data : 0; }

// Arguments: x f32 [M, K], weight f32 or bf16 as `jaxserve_pack` packs it, gain [K] or [0], bias [N] ([2 N] of a gated
// weight) or [0], both f32 or bf16, residual f32 [M, N] or [0] (none with an activation), num_rows s32: rows in use, others
// are left as they are. Attributes: num_in, activation (gated where there is one), eps, scale. Result: y f32 [M, N].
EXPORT FfiError *jaxserve_linear(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  if (!are_linear_operands(frame)) return ffi_error(frame, "jaxserve_linear: shapes or dtypes do not go together");
  FfiBuffer *x = ffi_argument(frame, 0), *weight = ffi_argument(frame, 1), *y = ffi_result(frame, 0);
  LinearJob job = {0};
  Linear *l = &job.linear;
  *l = (Linear){
      .x = x->data,
      .weight = weight->data,
      .gain = given(ffi_argument(frame, 2)),
      .bias = given(ffi_argument(frame, 3)),
      .residual = given(ffi_argument(frame, 4)),
      .y = y->data,
      .num_rows = *(const int32_t *)ffi_argument(frame, 5)->data,
      .num_in = ffi_int(frame, "num_in"),
      .num_out = y->dims[1],
      .panel_outs = ffi_int(frame, "activation") ? GATES : PANEL,
      .padded_in = weight->dims[1] * weight->dims[3],
      .is_bf16 = weight->dtype == FFI_BF16,
      .is_gain_bf16 = ffi_argument(frame, 2)->dtype == FFI_BF16,
      .is_bias_bf16 = ffi_argument(frame, 3)->dtype == FFI_BF16,
      .activation = ffi_int(frame, "activation"),
      .eps = ffi_float(frame, "eps"),
      .scale = ffi_float(frame, "scale"),
  };
  if (l->num_rows > x->dims[0]) l->num_rows = x->dims[0];
  if (l->num_rows <= 0 || l->num_out == 0) return 0;
  const int isa = instructions_in_use();
  job.kernels = l->is_bf16 && isa >= 3 ? &amx_linear : isa >= 2 ? &avx512_linear : &avx2_linear;
  const int64_t panels = weight->dims[0], most_rows = job.kernels->most_rows;
  l->num_blocks = (l->num_rows + most_rows - 1) / most_rows;
  const int64_t block_bytes = job.kernels->block_bytes(l);
  l->rows = reserve(OF_CALL, (size_t)(block_bytes * l->num_blocks));
  if (!l->rows) return ffi_error(frame, "jaxserve_linear: out of memory");
  if (l->num_rows <= FEW_ROWS) prepare_job(&job);
  else run_job(prepare_job, &job);
  job.blocks_at_once = L2_BYTES / block_bytes < 4 ? 4 : L2_BYTES / block_bytes;
  if (job.blocks_at_once > l->num_blocks) job.blocks_at_once = l->num_blocks;
  const int64_t groups = (l->num_blocks + job.blocks_at_once - 1) / job.blocks_at_once;
  job.panels_at_once = panels * groups / (num_threads() * PIECES_EACH);
  if (job.panels_at_once > MOST_PANELS) job.panels_at_once = MOST_PANELS;
  job.panels_at_once = (job.panels_at_once + PANELS_AT_ONCE - 1) / PANELS_AT_ONCE * PANELS_AT_ONCE;
  if (job.panels_at_once < 1) job.panels_at_once = PANELS_AT_ONCE;
  job.num_pieces = groups * ((panels + job.panels_at_once - 1) / job.panels_at_once);
  job.num_ranges = num_threads() < MOST_RANGES ? num_threads() : MOST_RANGES;
  for (int i = 0; i < job.num_ranges; i++) atomic_init(&job.ranges[i].next, range_start(&job, i));
  run_job(linear_job, &job);
  return job.failed ? ffi_error(frame, "jaxserve_linear: out of memory") : 0;
}
