// What XLA calls: handlers of its FFI that check shapes, cut the work into pieces and hand these to the threads.
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "attention.h"
#include "ffi.h"
#include "linear.h"
#include "threads.h"

#define EXPORT __attribute__((visibility("default")))

// Python refuses a library of another version, and puts the number into the names of its targets: programs that were
// compiled for older handlers must not find these. Raise it when arguments, attributes or layouts change.
enum { VERSION = 1 };
EXPORT int jaxserve_version(void) { return VERSION; }

// 2: AVX-512; 1: AVX2; 0: neither, and nothing here runs.
EXPORT int jaxserve_instructions(void) {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return 2;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
EXPORT void jaxserve_set_threads(int count) { set_num_threads(count); }
EXPORT int jaxserve_threads(void) { return num_threads(); }

// A program on machines with AVX-512 and without has the same bits on both if it is limited to AVX2.
static _Atomic int most_instructions = 2;
EXPORT void jaxserve_limit_instructions(int most) { most_instructions = most; }

// A vector of tokens must lie in one page. The choice follows the CPU, the limit and the page size, never a timing.
static const Kernels *choose_kernels(int page_size) {
  const int found = jaxserve_instructions(), most = most_instructions;
  return (found < most ? found : most) == 2 && page_size % avx512_kernels.lanes == 0 ? &avx512_kernels : &avx2_kernels;
}

// ---------------------------------------------------------------- memory that a thread keeps

typedef struct {
  char *memory;
  size_t size;
} Buffer;

static _Thread_local struct {
  Buffer call, split, job;  // of a caller, of one that splits its tiles, and of whoever computes a piece
  int is_known;
} own;
static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static void free_own(void *unused) {
  (void)unused;
  free(own.call.memory);
  free(own.split.memory);
  free(own.job.memory);
}
static void make_own_key(void) { pthread_key_create(&own_key, free_own); }

static void *reserve(Buffer *buffer, size_t size) {
  if (!own.is_known) {
    pthread_once(&own_once, make_own_key);
    pthread_setspecific(own_key, &own);
    own.is_known = 1;
  }
  if (buffer->size < size) {
    free(buffer->memory);
    size = (size + 4095) & ~(size_t)4095;
    buffer->memory = aligned_alloc(64, size);
    buffer->size = buffer->memory ? size : 0;
  }
  return buffer->memory;
}

static size_t whole_lines(size_t size) { return (size + 63) & ~(size_t)63; }

static Partial partial_at(char *memory, int rows) {
  float *numbers = (float *)memory;
  return (Partial){numbers, numbers + rows, numbers + ((2 * rows + 15) & ~15)};
}
static size_t partial_bytes(int rows, int padded) {
  return whole_lines(sizeof(float) * (((2 * rows + 15) & ~15) + (size_t)rows * padded + 16));
}

// ---------------------------------------------------------------- attention

enum { SPLIT_BYTES = 64 << 20 };  // of partials, which are kept for the next call

typedef struct {
  Attention attention;
  const Kernels *kernels;
  const int *first_piece;  // [R + 1] number of the first tile of each row
  int num_rows, num_tiles, tile_tokens, most_rows, padded;
  // With few tiles their chunks are handed out one by one: slots [tile][chunk] hold partials, the last to end merges.
  int is_split, most_chunks;
  char *slots;
  size_t slot_bytes;  // of a partial
  atomic_int *left;  // [tile] chunks that are not computed yet
  atomic_int failed;
  _Alignas(64) atomic_int next;
} AttendJob;

static Tile find_tile(const AttendJob *job, int index) {
  int low = 0, high = job->num_rows;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (job->first_piece[middle] <= index) low = middle;
    else high = middle;
  }
  const int tiles = (job->first_piece[low + 1] - job->first_piece[low]) / job->attention.num_kv_heads;
  const int i = index - job->first_piece[low];
  const int first = (tiles - 1 - i % tiles) * job->tile_tokens;  // the longest first
  const int left = job->attention.query_lens[low] - first;
  return (Tile){low, i / tiles, first, left < job->tile_tokens ? left : job->tile_tokens};
}

// The chunks of a tile: from the one that its first token sees first to the one after its last.
static void chunks_of(const Attention *a, Tile tile, int *first, int *stop) {
  const int visible = a->context_lens[tile.row] - a->query_lens[tile.row] + tile.first + 1;
  *first = a->window && visible > a->window ? (visible - a->window) / CHUNK : 0;
  *stop = visible + tile.count - 1 > 0 ? (visible + tile.count - 1 + CHUNK - 1) / CHUNK : 0;
}

static void attend_tile(AttendJob *job, Tile tile) {
  const int rows = tile.count * (job->attention.num_heads / job->attention.num_kv_heads);
  char *memory = reserve(&own.job, 2 * job->slot_bytes);
  if (!memory) {
    atomic_store(&job->failed, 1);
    return;
  }
  Partial all = partial_at(memory, rows), more = partial_at(memory + job->slot_bytes, rows);
  int first, stop;
  chunks_of(&job->attention, tile, &first, &stop);
  if (first >= stop) memset(memory, 0, job->slot_bytes);  // they see nothing
  for (int chunk = first; chunk < stop; chunk++) {
    job->kernels->attend(&job->attention, tile, chunk, chunk == first ? all : more);
    if (chunk > first) job->kernels->merge(all, more, rows, job->padded);
  }
  job->kernels->finish(&job->attention, tile, all);
}

static void attend_chunk(AttendJob *job, int index) {
  const int tile_index = index / job->most_chunks, chunk = index % job->most_chunks;
  const Tile tile = find_tile(job, tile_index);
  int first, stop;
  chunks_of(&job->attention, tile, &first, &stop);
  if (chunk < first || chunk >= stop) return;
  const int rows = tile.count * (job->attention.num_heads / job->attention.num_kv_heads);
  char *slots = job->slots + (size_t)tile_index * job->most_chunks * job->slot_bytes;
  job->kernels->attend(&job->attention, tile, chunk, partial_at(slots + chunk * job->slot_bytes, rows));
  if (atomic_fetch_sub(&job->left[tile_index], 1) != 1) return;
  Partial all = partial_at(slots + first * job->slot_bytes, rows);
  for (int i = first + 1; i < stop; i++)
    job->kernels->merge(all, partial_at(slots + i * job->slot_bytes, rows), rows, job->padded);
  job->kernels->finish(&job->attention, tile, all);
}

static void attend_job(void *context) {
  AttendJob *job = context;
  const int pieces = job->is_split ? job->num_tiles * job->most_chunks : job->num_tiles;
  for (int i; (i = atomic_fetch_add(&job->next, 1)) < pieces;) {
    if (job->is_split) attend_chunk(job, i);
    else attend_tile(job, find_tile(job, i));
  }
}

// Zeros for tokens that no row owns; rows own consecutive tokens, in order.
static void clear_unowned(const Attention *a, int num_rows, int64_t num_tokens) {
  const int64_t token_size = (int64_t)a->num_heads * a->width;
  int64_t done = 0;
  for (int r = 0; r <= num_rows; r++) {
    if (r < num_rows && a->query_lens[r] <= 0) continue;
    const int64_t start = r < num_rows ? a->query_starts[r] : num_tokens;
    if (start > done) memset(a->out + done * token_size, 0, sizeof(float) * (start - done) * token_size);
    if (r < num_rows) done = start + a->query_lens[r];
  }
}

static int64_t elements(const FfiBuffer *buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer->rank; i++) count *= buffer->dims[i];
  return count;
}

// Two pools of pages that hold num_kv_heads * width * page_size numbers each.
static int are_pools(const FfiBuffer *keys, const FfiBuffer *values, int64_t heads, int64_t width, int64_t page_size) {
  return (keys->dtype == FFI_F32 || keys->dtype == FFI_BF16) && values->dtype == keys->dtype && keys->rank >= 1 &&
         values->rank >= 1 && keys->dims[0] == values->dims[0] && page_size > 0 && page_size % avx2_kernels.lanes == 0 &&
         elements(keys) == keys->dims[0] * heads * width * page_size && elements(values) == elements(keys);
}

static int is_s32(const FfiBuffer *buffer, int64_t rank, int64_t first) {
  return buffer->dtype == FFI_S32 && buffer->rank == rank && (rank == 0 || buffer->dims[0] == first);
}

static int are_attend_operands(FfiFrame *frame) {
  const FfiBuffer *query = ffi_argument(frame, 0), *out = ffi_result(frame, 0), *table = ffi_argument(frame, 3);
  if (frame->arguments.size != 7 || query->dtype != FFI_F32 || query->rank != 3) return 0;
  if (out->dtype != FFI_F32 || elements(out) != elements(query)) return 0;
  const int64_t heads = ffi_int(frame, "num_kv_heads"), width = query->dims[2];
  if (heads <= 0 || query->dims[1] % heads || query->dims[1] / heads > MOST_GROUP || width > MOST_WIDTH) return 0;
  if (!are_pools(ffi_argument(frame, 1), ffi_argument(frame, 2), heads, width, ffi_int(frame, "page_size"))) return 0;
  for (int i = 4; i < 7; i++)
    if (!is_s32(ffi_argument(frame, i), 1, table->dims[0])) return 0;
  return is_s32(table, 2, table->dims[0]);
}

// Arguments: query f32 [T, N, H], keys [P, K, H, p], values [P, K, p, H] (flat rows [P, K * H * p] too), page_table s32
// [R, M], context_lens, query_starts, query_lens s32 [R]. Attributes: num_kv_heads, page_size, window, scale, soft_cap.
EXPORT FfiError *jaxserve_attend(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  if (!are_attend_operands(frame)) return ffi_error(frame, "jaxserve_attend: shapes or dtypes do not go together");
  FfiBuffer *query = ffi_argument(frame, 0), *keys = ffi_argument(frame, 1), *table = ffi_argument(frame, 3);
  AttendJob job = {.num_rows = (int)table->dims[0]};
  Attention *a = &job.attention;
  *a = (Attention){
      .query = query->data,
      .keys = keys->data,
      .values = ffi_argument(frame, 2)->data,
      .table = table->data,
      .context_lens = ffi_argument(frame, 4)->data,
      .query_starts = ffi_argument(frame, 5)->data,
      .query_lens = ffi_argument(frame, 6)->data,
      .out = ffi_result(frame, 0)->data,
      .num_heads = (int)query->dims[1],
      .num_kv_heads = ffi_int(frame, "num_kv_heads"),
      .width = (int)query->dims[2],
      .page_size = ffi_int(frame, "page_size"),
      .table_width = (int)table->dims[1],
      .is_bf16 = keys->dtype == FFI_BF16,
      .scale = ffi_float(frame, "scale"),
      .soft_cap = ffi_float(frame, "soft_cap"),
      .window = ffi_int(frame, "window"),
  };
  const int group = a->num_heads / a->num_kv_heads;
  job.kernels = choose_kernels(a->page_size);
  job.tile_tokens = job.kernels->tile_tokens(group);
  job.padded = job.kernels->padded_width(a->width);
  job.most_rows = job.tile_tokens * group;
  clear_unowned(a, job.num_rows, query->dims[0]);

  int longest = 0, most_tokens = 0;
  int *first = reserve(&own.call, sizeof(int) * (job.num_rows + 1));
  if (!first) return ffi_error(frame, "jaxserve_attend: out of memory");
  for (int r = 0; r < job.num_rows; r++) {
    first[r] = job.num_tiles;
    if (a->query_lens[r] <= 0) continue;
    job.num_tiles += a->num_kv_heads * ((a->query_lens[r] + job.tile_tokens - 1) / job.tile_tokens);
    if (a->context_lens[r] > longest) longest = a->context_lens[r];
    if (a->query_lens[r] > most_tokens) most_tokens = a->query_lens[r];
  }
  first[job.num_rows] = job.num_tiles;
  job.first_piece = first;

  job.most_chunks = (longest + CHUNK - 1) / CHUNK;
  if (most_tokens < job.tile_tokens) job.most_rows = most_tokens * group;
  job.slot_bytes = partial_bytes(job.most_rows, job.padded);
  const int64_t split_bytes = (int64_t)job.num_tiles * job.most_chunks * (int64_t)job.slot_bytes;
  job.is_split = num_threads() > 1 && job.num_tiles < 4 * num_threads() && job.most_chunks > 1 && split_bytes < SPLIT_BYTES;
  if (job.is_split) {  // the same arithmetic in the same order, by more threads
    const size_t lefts = whole_lines(sizeof(atomic_int) * job.num_tiles);
    char *memory = reserve(&own.split, lefts + (size_t)split_bytes);
    if (!memory) return ffi_error(frame, "jaxserve_attend: out of memory");
    job.left = (atomic_int *)memory;
    job.slots = memory + lefts;
    for (int i = 0; i < job.num_tiles; i++) {
      int begin, stop;
      const Tile tile = find_tile(&job, i);
      chunks_of(a, tile, &begin, &stop);
      atomic_init(&job.left[i], stop - begin);
      if (begin >= stop) attend_tile(&job, tile);  // it sees nothing
    }
  }
  run_job(attend_job, &job);
  return atomic_load(&job.failed) ? ffi_error(frame, "jaxserve_attend: out of memory") : 0;
}

// ---------------------------------------------------------------- writing keys and values

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

// ---------------------------------------------------------------- matrix multiplication

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
  job.kernels = choose_kernels(16) == &avx512_kernels ? &avx512_linear : &avx2_linear;
  job.num_tiles = (job.num_rows + job.kernels->most_rows - 1) / job.kernels->most_rows;
  job.tiles_at_once = L2_BYTES / (4 * num_in * job.kernels->most_rows);
  if (job.tiles_at_once < 1) job.tiles_at_once = 1;
  job.outs_at_once = OUT_BYTES / ((job.linear.is_bf16 ? 2 : 4) * num_in) / 8 * 8;
  if (job.outs_at_once < 8) job.outs_at_once = 8;
  run_job(linear_job, &job);
  return 0;
}
