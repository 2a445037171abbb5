#include "linear_job.h"

#include "handlers.h"

enum { L2_BYTES = 768 << 10, FEW_ROWS = 4, PIECES_EACH = 8, MOST_PANELS = 16, MOST_RANGES = 32 };
enum { TILE_ROWS_LEAST = 5 };  // that int8 on tiles is worth

typedef struct {
  Matmul *matmuls;
  int64_t count;
  const LinearKernels *kernels;
  int64_t panels, num_blocks;
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
  float *scratch = reserve(OF_JOB, 3 * sizeof(float) * job->matmuls->linear.padded_in);
  int64_t m = 0;
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->num_blocks;) {
    while (m + 1 < job->count && job->matmuls[m + 1].first_block <= i) m++;
    if (scratch) job->kernels->prepare(&job->matmuls[m].linear, i - job->matmuls[m].first_block, scratch);
    else job->failed = 1;
  }
}

// Pieces of a matmul: for each group of blocks, its panels in order.
static void multiply_piece(const LinearJob *job, const Matmul *m, int64_t piece, float *scratch) {
  const int64_t parts = (job->panels + job->panels_at_once - 1) / job->panels_at_once, blocks = m->linear.num_blocks;
  const int64_t begin = piece % parts * job->panels_at_once, first = piece / parts * job->blocks_at_once;
  const int64_t end = begin + job->panels_at_once < job->panels ? begin + job->panels_at_once : job->panels;
  const int64_t last = first + job->blocks_at_once < blocks ? first + job->blocks_at_once : blocks;
  job->kernels->multiply(&m->linear, begin, end, first, last, scratch);
}

static int64_t range_start(const LinearJob *job, int range) { return job->num_pieces * range / job->num_ranges; }

static void multiply_job(void *context) {
  LinearJob *job = context;
  const int64_t sums = PANELS_AT_ONCE * PANEL * job->blocks_at_once * job->kernels->most_rows;
  float *scratch = reserve(OF_JOB, sizeof(float) * sums * (job->matmuls->linear.quantized ? 2 : 1));
  if (!scratch) {
    job->failed = 1;
    return;
  }
  const int own = atomic_fetch_add(&job->next_range, 1);
  for (int i = 0; i < job->num_ranges; i++) {
    const int range = (own + i) % job->num_ranges;
    const int64_t stop = range_start(job, range + 1);
    int64_t m = 0;
    for (int64_t piece; (piece = atomic_fetch_add(&job->ranges[range].next, 1)) < stop;) {
      while (m + 1 < job->count && job->matmuls[m + 1].first_piece <= piece) m++;
      multiply_piece(job, &job->matmuls[m], piece - job->matmuls[m].first_piece, scratch);
    }
  }
}

// Cuts rows into blocks, and gives them memory.
static int plan_rows(LinearJob *job) {
  const int64_t most_rows = job->kernels->most_rows, block_bytes = job->kernels->block_bytes(&job->matmuls->linear);
  int64_t most_blocks = 0;
  for (int64_t i = 0; i < job->count; i++) {
    Linear *l = &job->matmuls[i].linear;
    l->num_blocks = (l->num_rows + most_rows - 1) / most_rows;
    job->matmuls[i].first_block = job->num_blocks;
    job->num_blocks += l->num_blocks;
    if (l->num_blocks > most_blocks) most_blocks = l->num_blocks;
  }
  char *rows = reserve(OF_CALL, (size_t)(block_bytes * job->num_blocks));
  if (!rows) return 0;
  for (int64_t i = 0; i < job->count; i++)
    job->matmuls[i].linear.rows = rows + block_bytes * job->matmuls[i].first_block;
  job->blocks_at_once = L2_BYTES / block_bytes < 4 ? 4 : L2_BYTES / block_bytes;
  if (job->blocks_at_once > most_blocks) job->blocks_at_once = most_blocks;
  return 1;
}

// Cuts the work into pieces.
static void plan_pieces(LinearJob *job) {
  int64_t groups = 0;
  for (int64_t i = 0; i < job->count; i++) {
    Matmul *m = &job->matmuls[i];
    m->num_groups = (m->linear.num_blocks + job->blocks_at_once - 1) / job->blocks_at_once;
    groups += m->num_groups;
  }
  job->panels_at_once = job->panels * groups / (num_threads() * PIECES_EACH);
  if (job->panels_at_once > MOST_PANELS) job->panels_at_once = MOST_PANELS;
  job->panels_at_once = (job->panels_at_once + PANELS_AT_ONCE - 1) / PANELS_AT_ONCE * PANELS_AT_ONCE;
  if (job->panels_at_once < 1) job->panels_at_once = PANELS_AT_ONCE;
  const int64_t parts = (job->panels + job->panels_at_once - 1) / job->panels_at_once;
  for (int64_t i = 0; i < job->count; i++) {
    job->matmuls[i].first_piece = job->num_pieces;
    job->num_pieces += job->matmuls[i].num_groups * parts;
  }
  job->num_ranges = num_threads() < MOST_RANGES ? num_threads() : MOST_RANGES;
  for (int i = 0; i < job->num_ranges; i++) atomic_init(&job->ranges[i].next, range_start(job, i));
}

static const LinearKernels *choose_rounded(int64_t rows_each) {
  const int isa = instructions_in_use();
  if (isa < HAS_AVX512) return &avx2_rounded;
  if (isa < HAS_AVX512VNNI) return &avx512_rounded;
  return rows_each >= TILE_ROWS_LEAST && isa >= HAS_AMX && has_amx_int8() ? &amx_rounded : &avx512vnni_rounded;
}

// The choice follows the number of rows only where all give the same bits.
static const LinearKernels *choose(const Linear *l, int64_t rows_each) {
  const int isa = instructions_in_use(), is_bf16 = l->is_bf16;
  if (l->quantized && l->quantized->form.activations >= ROUNDED_ROWS) return choose_rounded(rows_each);
  if (l->quantized && l->quantized->form.activations == BF16_ROWS && l->quantized->is_exact_in_bf16 && isa >= HAS_AMX)
    return &amx_quantized;
  if (l->quantized) return isa < HAS_AVX512 ? &avx2_quantized : &avx512_quantized;
  if (isa < HAS_AVX512) return &avx2_linear;
  if (isa < HAS_AVX512BF16 || !is_bf16) return &avx512_linear;
  return isa >= HAS_AMX ? &amx_linear : &avx512bf16_linear;
}

int run_matmuls(Matmul *matmuls, int64_t count) {
  const Linear *l = &matmuls->linear;
  int64_t rows = 0;
  for (int64_t i = 0; i < count; i++) rows += matmuls[i].linear.num_rows;
  LinearJob job = {
      .matmuls = matmuls,
      .count = count,
      .kernels = choose(l, rows / count),
      .panels = (l->num_out + l->panel_outs - 1) / l->panel_outs,
  };
  if (!plan_rows(&job)) return 0;
  if (rows <= FEW_ROWS) prepare_job(&job);
  else run_job(prepare_job, &job);
  plan_pieces(&job);
  run_job(multiply_job, &job);
  return !job.failed;
}

int is_packed(const FfiBuffer *weight, int64_t num_out, int64_t num_in, int is_gated) {
  const int is_bf16 = weight->dtype == FFI_BF16;
  if ((weight->dtype != FFI_F32 && !is_bf16) || weight->rank < 4) return 0;
  const int64_t *dims = weight->dims + weight->rank - 4;
  return dims[0] == num_panels(num_out, is_gated) && dims[2] == PANEL && dims[3] == (is_bf16 ? 2 : 1) &&
         dims[1] * dims[3] == (is_bf16 ? (num_in + 31) / 32 * 32 : num_in);
}
