// Updates of recurrent layers, called by XLA: rows and heads are the pieces that threads take.
#include "handlers.h"
#include "recurrent.h"

typedef struct {
  DeltaNet layer;
  ComputeDeltaNet compute;
  int64_t num_used;  // tokens of all rows
  _Alignas(64) atomic_llong next;
  atomic_int failed;
} DeltaNetJob;

typedef struct {
  Mamba2 layer;
  const Mamba2Kernels *kernels;
  int64_t num_used;  // tokens of all rows
  _Alignas(64) atomic_llong next;
  atomic_int failed;
} Mamba2Job;

typedef struct {
  ShortConvolution layer;
  ComputeShortConvolution compute;
  _Alignas(64) atomic_llong next;
} ShortConvolutionJob;

enum { ROW_ARRAYS = 4, SHARED_AT_ONCE = 4, TOKENS_AT_ONCE = 8, CHANNELS_AT_ONCE = 128 };
enum { HEADS_AT_ONCE = 8, PIECES_PER_THREAD = 4 };

static int is_f32(const FfiBuffer *buffer, int64_t count) { return buffer->dtype == FFI_F32 && elements(buffer) == count; }

static StateRows rows_of(const FfiBuffer *buffer, const FfiBuffer *pages_after) {
  const int32_t *data = buffer->data;
  const int64_t count = buffer->dims[1];
  return (StateRows){data, data + count, data + 2 * count, data + 3 * count, pages_after->data, count};
}

// Whether each row's tokens and pages exist, and rows follow each other; returns the tokens of all rows, or -1.
static int64_t count_tokens(const StateRows *rows, int64_t num_tokens, int64_t num_pages) {
  int64_t used = 0;
  for (int64_t i = 0; i < rows->count; i++) {
    const int64_t len = rows->lens[i];
    if (len == 0) continue;
    if (len < 0 || rows->starts[i] != used || used + len > num_tokens) return -1;
    if (rows->pages[i] < 0 || rows->pages[i] >= num_pages) return -1;
    used += len;
  }
  for (int64_t t = 0; t < used; t++)
    if (rows->pages_after[t] < -1 || rows->pages_after[t] >= num_pages) return -1;
  return used;
}

// Whether weight [taps, channels], bias [channels] or [0], tail [P, taps - 1, channels], rows [4, R] and the pages after
// tokens go together.
static int is_convolution(const FfiBuffer *weight, const FfiBuffer *bias, const FfiBuffer *tail, const FfiBuffer *rows,
                          const FfiBuffer *pages_after, int64_t num_tokens, int64_t channels) {
  return weight->dtype == FFI_F32 && weight->rank == 2 && weight->dims[0] >= LEAST_TAPS && weight->dims[0] <= MOST_TAPS &&
         weight->dims[1] == channels && (is_f32(bias, channels) || is_f32(bias, 0)) && tail->dtype == FFI_F32 &&
         tail->rank == 3 && tail->dims[1] == weight->dims[0] - 1 && tail->dims[2] == channels &&
         rows->dtype == FFI_S32 && rows->rank == 2 && rows->dims[0] == ROW_ARRAYS && pages_after->dtype == FFI_S32 &&
         elements(pages_after) == num_tokens;
}

static Convolution convolution_of(const FfiBuffer *weight, const FfiBuffer *bias, const FfiBuffer *tail) {
  return (Convolution){weight->data, elements(bias) ? bias->data : 0, tail->data, weight->dims[1], (int)weight->dims[0]};
}

static int is_state(const FfiBuffer *state, const FfiBuffer *tail, int64_t heads, int64_t keys, int64_t values) {
  return is_f32(state, tail->dims[0] * heads * keys * whole_groups(values));
}

static int are_rows(const FfiBuffer *x, const FfiBuffer *y, int64_t width, int64_t inner) {
  return x->dtype == FFI_F32 && x->rank == 2 && x->dims[1] == width && is_f32(y, x->dims[0] * inner);
}

static void clear_padding(const FfiBuffer *out, int64_t used, int64_t num_tokens) {
  if (num_tokens == 0) return;
  const size_t size = sizeof(float) * (size_t)(elements(out) / num_tokens);
  memset((char *)out->data + (size_t)used * size, 0, (size_t)(num_tokens - used) * size);
}

// How many neighbouring heads a thread takes at a time. Where each row has one token, a head's pass reads the next head's
// state ahead; threads that took every other head would take these lines from each other.
static int64_t heads_at_once(const StateRows *rows, int64_t heads, int64_t num_used) {
  const int64_t fair = rows->count * heads / (PIECES_PER_THREAD * num_threads());
  return num_used > rows->count || fair < 1 ? 1 : fair < HEADS_AT_ONCE ? fair : HEADS_AT_ONCE;
}

static void delta_net_job(void *context) {
  DeltaNetJob *job = context;
  const int64_t heads = job->layer.key_heads, total = job->layer.rows.count * heads;
  const int64_t at_once = heads_at_once(&job->layer.rows, heads, job->num_used);
  float *scratch = reserve(OF_JOB, sizeof(float) * (size_t)delta_net_scratch(&job->layer));
  if (!scratch) job->failed = 1;
  for (int64_t i; scratch && (i = at_once * atomic_fetch_add(&job->next, 1)) < total;)
    for (int64_t j = i; j < i + at_once && j < total; j++) job->compute(&job->layer, j / heads, j % heads, scratch);
}

static int is_delta_net(FfiFrame *frame, const DeltaNet *d) {
  if (d->key_heads <= 0 || d->value_heads % d->key_heads || d->key_dim <= 0 || d->value_dim <= 0) return 0;
  const FfiBuffer *tail = ffi_argument(frame, 6);
  const int64_t heads = d->value_heads, channels = 2 * d->key_heads * d->key_dim + heads * d->value_dim;
  const int64_t width = channels + heads * d->value_dim + heads + num_decays(d);
  return are_rows(ffi_argument(frame, 0), ffi_result(frame, 0), width, heads * d->value_dim) &&
         is_convolution(ffi_argument(frame, 1), ffi_argument(frame, 2), tail, ffi_argument(frame, 8),
                        ffi_argument(frame, 9), ffi_argument(frame, 0)->dims[0], channels) &&
         is_f32(ffi_argument(frame, 4), num_decays(d)) && is_f32(ffi_argument(frame, 5), d->value_dim) &&
         is_state(ffi_argument(frame, 7), tail, heads, d->key_dim, d->value_dim);
}

// Arguments: projected f32 [T, width], weight of the convolution f32 [taps, channels], bias f32 [channels] or [0], a_log
// f32 [Hv], dt_bias f32 [decays], norm f32 [dv], tail f32 [P, taps - 1, channels], state f32 [P, Hv, tiles, dk, 16], rows s32
// [4, R]: the first fields of StateRows, pages after tokens s32 [T]. Attributes: key_heads, key_dim, value_dim,
// has_key_decays, eps.
// Results: heads f32 [T, Hv * dv], zeros for padding tokens; tail and state, which are the same memory as the arguments.
EXPORT FfiError *jaxserve_delta_net(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  if (frame->arguments.size != 10) return ffi_error(frame, "jaxserve_delta_net: shapes or dtypes do not go together");
  const FfiBuffer *x = ffi_argument(frame, 0), *tail = ffi_argument(frame, 6), *state = ffi_argument(frame, 7);
  const FfiBuffer *a_log = ffi_argument(frame, 3), *rows = ffi_argument(frame, 8), *out = ffi_result(frame, 0);
  DeltaNetJob job = {
      .layer =
          {
              .projected = x->data,
              .a_log = a_log->data,
              .dt_bias = ffi_argument(frame, 4)->data,
              .norm = ffi_argument(frame, 5)->data,
              .state = state->data,
              .out = out->data,
              .key_heads = ffi_int(frame, "key_heads"),
              .value_heads = a_log->dtype == FFI_F32 ? elements(a_log) : 0,
              .key_dim = ffi_int(frame, "key_dim"),
              .value_dim = ffi_int(frame, "value_dim"),
              .has_key_decays = ffi_int(frame, "has_key_decays"),
              .eps = ffi_float(frame, "eps"),
          },
      .compute = instructions_in_use() >= HAS_AVX512 ? avx512_delta_net : avx2_delta_net,
  };
  if (!is_delta_net(frame, &job.layer)) return ffi_error(frame, "jaxserve_delta_net: shapes or dtypes do not go together");
  if (tail->data != ffi_result(frame, 1)->data || state->data != ffi_result(frame, 2)->data)
    return ffi_error(frame, "jaxserve_delta_net: the states are not updated in place");
  job.layer.rows = rows_of(rows, ffi_argument(frame, 9));
  job.layer.width = x->dims[1];
  job.layer.convolution = convolution_of(ffi_argument(frame, 1), ffi_argument(frame, 2), tail);
  job.num_used = count_tokens(&job.layer.rows, x->dims[0], tail->dims[0]);
  if (job.num_used < 0) return ffi_error(frame, "jaxserve_delta_net: rows name tokens or pages that do not exist");
  clear_padding(out, job.num_used, x->dims[0]);
  if (job.num_used) run_job(delta_net_job, &job);
  return job.failed ? ffi_error(frame, "jaxserve_delta_net: out of memory") : 0;
}

static int64_t shared_groups(const Mamba2 *m) { return m->groups * 2 * whole_groups(m->state_dim) / GROUP; }

static void mamba2_shared_job(void *context) {
  Mamba2Job *job = context;
  const int64_t groups = shared_groups(&job->layer), total = job->layer.rows.count * groups;
  for (int64_t i; (i = SHARED_AT_ONCE * atomic_fetch_add(&job->next, 1)) < total;)
    for (int64_t j = i; j < i + SHARED_AT_ONCE && j < total; j++)
      job->kernels->convolve_shared(&job->layer, j / groups, j % groups);
}

static void mamba2_heads_job(void *context) {
  Mamba2Job *job = context;
  const int64_t heads = job->layer.heads, total = job->layer.rows.count * heads;
  const int64_t at_once = heads_at_once(&job->layer.rows, heads, job->num_used);
  float *scratch = reserve(OF_JOB, sizeof(float) * (size_t)mamba2_scratch(&job->layer));
  if (!scratch) job->failed = 1;
  for (int64_t i; scratch && (i = at_once * atomic_fetch_add(&job->next, 1)) < total;)
    for (int64_t j = i; j < i + at_once && j < total; j++)
      job->kernels->compute_head(&job->layer, j / heads, j % heads, scratch);
}

static void mamba2_norm_job(void *context) {
  Mamba2Job *job = context;
  for (int64_t i; (i = TOKENS_AT_ONCE * atomic_fetch_add(&job->next, 1)) < job->num_used;)
    job->kernels->normalize(&job->layer, i, i + TOKENS_AT_ONCE < job->num_used ? i + TOKENS_AT_ONCE : job->num_used);
}

static int is_mamba2(FfiFrame *frame, const Mamba2 *m) {
  if (m->heads <= 0 || m->groups <= 0 || m->heads % m->groups || m->head_dim <= 0 || m->state_dim <= 0) return 0;
  const FfiBuffer *tail = ffi_argument(frame, 7), *norm = ffi_argument(frame, 6);
  const int64_t inner = m->heads * m->head_dim, channels = inner + 2 * m->groups * m->state_dim;
  if (!is_f32(norm, inner) && !is_f32(norm, 0)) return 0;
  if (elements(norm) && (m->norm_groups <= 0 || inner % m->norm_groups || !m->is_gated)) return 0;
  return are_rows(ffi_argument(frame, 0), ffi_result(frame, 0), inner + channels + m->heads, inner) &&
         is_convolution(ffi_argument(frame, 1), ffi_argument(frame, 2), tail, ffi_argument(frame, 9),
                        ffi_argument(frame, 10), ffi_argument(frame, 0)->dims[0], channels) &&
         is_f32(ffi_argument(frame, 4), m->heads) && is_f32(ffi_argument(frame, 5), m->heads) &&
         is_state(ffi_argument(frame, 8), tail, m->heads, m->state_dim, m->head_dim);
}

static void run_mamba2(Mamba2Job *job) {
  run_job(mamba2_shared_job, job);
  job->next = 0;
  run_job(mamba2_heads_job, job);
  job->next = 0;
  if (!job->layer.norm) return;
  if (job->num_used <= TOKENS_AT_ONCE) mamba2_norm_job(job);
  else run_job(mamba2_norm_job, job);
}

// Arguments: projected f32 [T, width], weight of the convolution f32 [taps, channels], bias f32 [channels] or [0], a_log,
// dt_bias, d f32 [heads], norm f32 [heads * head_dim] or [0], tail f32 [P, taps - 1, channels], state f32 [P, heads, tiles,
// state_dim, 16], rows s32 [4, R], pages after tokens s32 [T].
// Attributes: head_dim, groups, state_dim, norm_groups, is_before_gate, is_gated, eps, least, most.
// Results: heads f32 [T, heads * head_dim], zeros for padding tokens; tail and state, the same memory as the arguments.
EXPORT FfiError *jaxserve_mamba2(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  if (frame->arguments.size != 11) return ffi_error(frame, "jaxserve_mamba2: shapes or dtypes do not go together");
  const FfiBuffer *x = ffi_argument(frame, 0), *tail = ffi_argument(frame, 7), *state = ffi_argument(frame, 8);
  const FfiBuffer *a_log = ffi_argument(frame, 3), *norm = ffi_argument(frame, 6), *out = ffi_result(frame, 0);
  Mamba2Job job = {
      .layer =
          {
              .projected = x->data,
              .a_log = a_log->data,
              .dt_bias = ffi_argument(frame, 4)->data,
              .d = ffi_argument(frame, 5)->data,
              .norm = elements(norm) ? norm->data : 0,
              .state = state->data,
              .out = out->data,
              .heads = a_log->dtype == FFI_F32 ? elements(a_log) : 0,
              .head_dim = ffi_int(frame, "head_dim"),
              .groups = ffi_int(frame, "groups"),
              .state_dim = ffi_int(frame, "state_dim"),
              .norm_groups = ffi_int(frame, "norm_groups"),
              .is_before_gate = ffi_int(frame, "is_before_gate"),
              .is_gated = ffi_int(frame, "is_gated"),
              .eps = ffi_float(frame, "eps"),
              .least = ffi_float(frame, "least"),
              .most = ffi_float(frame, "most"),
          },
      .kernels = instructions_in_use() >= HAS_AVX512 ? &avx512_mamba2 : &avx2_mamba2,
  };
  if (!is_mamba2(frame, &job.layer)) return ffi_error(frame, "jaxserve_mamba2: shapes or dtypes do not go together");
  if (tail->data != ffi_result(frame, 1)->data || state->data != ffi_result(frame, 2)->data)
    return ffi_error(frame, "jaxserve_mamba2: the states are not updated in place");
  job.layer.rows = rows_of(ffi_argument(frame, 9), ffi_argument(frame, 10));
  job.layer.width = x->dims[1];
  job.layer.num_tokens = x->dims[0];
  job.layer.convolution = convolution_of(ffi_argument(frame, 1), ffi_argument(frame, 2), tail);
  job.num_used = count_tokens(&job.layer.rows, x->dims[0], tail->dims[0]);
  if (job.num_used < 0) return ffi_error(frame, "jaxserve_mamba2: rows name tokens or pages that do not exist");
  clear_padding(out, job.num_used, x->dims[0]);
  if (job.num_used == 0) return 0;
  job.layer.shared = reserve(OF_CALL, sizeof(float) * GROUP * (size_t)(shared_groups(&job.layer) * x->dims[0]));
  if (!job.layer.shared) return ffi_error(frame, "jaxserve_mamba2: out of memory");
  run_mamba2(&job);
  return job.failed ? ffi_error(frame, "jaxserve_mamba2: out of memory") : 0;
}

static void short_convolution_job(void *context) {
  ShortConvolutionJob *job = context;
  const int64_t channels = job->layer.convolution.channels, parts = (channels + CHANNELS_AT_ONCE - 1) / CHANNELS_AT_ONCE;
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->layer.rows.count * parts;) {
    const int64_t first = i % parts * CHANNELS_AT_ONCE, last = first + CHANNELS_AT_ONCE;
    job->compute(&job->layer, i / parts, first, last < channels ? last : channels);
  }
}

// Arguments: projected f32 [T, 3 * channels], weight f32 [taps, channels], bias f32 [channels] or [0], tail f32 [P, taps - 1,
// channels], rows s32 [4, R], pages after tokens s32 [T].
// Results: f32 [T, channels], zeros for padding tokens; the tail, which is the same memory as the argument.
EXPORT FfiError *jaxserve_short_convolution(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  const FfiBuffer *x = ffi_argument(frame, 0), *weight = ffi_argument(frame, 1), *bias = ffi_argument(frame, 2);
  const FfiBuffer *tail = ffi_argument(frame, 3), *out = ffi_result(frame, 0);
  if (frame->arguments.size != 6 || weight->rank != 2 ||
      !are_rows(x, out, 3 * weight->dims[1], weight->dims[1]) ||
      !is_convolution(weight, bias, tail, ffi_argument(frame, 4), ffi_argument(frame, 5), x->dims[0], weight->dims[1]))
    return ffi_error(frame, "jaxserve_short_convolution: shapes or dtypes do not go together");
  if (tail->data != ffi_result(frame, 1)->data)
    return ffi_error(frame, "jaxserve_short_convolution: the tail is not updated in place");
  ShortConvolutionJob job = {
      .layer = {.rows = rows_of(ffi_argument(frame, 4), ffi_argument(frame, 5)), .projected = x->data, .out = out->data},
      .compute = instructions_in_use() >= HAS_AVX512 ? avx512_short_convolution : avx2_short_convolution,
  };
  job.layer.convolution = convolution_of(weight, bias, tail);
  const int64_t used = count_tokens(&job.layer.rows, x->dims[0], tail->dims[0]);
  if (used < 0) return ffi_error(frame, "jaxserve_short_convolution: rows name tokens or pages that do not exist");
  clear_padding(out, used, x->dims[0]);
  if (used) run_job(short_convolution_job, &job);
  return 0;
}
