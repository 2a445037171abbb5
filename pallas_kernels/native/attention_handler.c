// Attention, called by XLA: cuts a step into tiles and hands these to the threads.
#include "handlers.h"

static Partial partial_at(char *memory, int rows) {
  float *numbers = (float *)memory;
  return (Partial){numbers, numbers + rows, numbers + ((2 * rows + 15) & ~15)};
}
static size_t partial_bytes(int rows, int padded) {
  return whole_lines(sizeof(float) * (((2 * rows + 15) & ~15) + (size_t)rows * padded + 16));
}

enum { SPLIT_BYTES = 64 << 20 };  // of partials of either kind, which are kept for the next call

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
  // Context tokens, whole blocks, that the first rows begin with: their softmax for all of these rows is computed first,
  // so that their keys and values are read once. Partials are [head][chunk], each of all rows.
  int shared, num_sharing, shared_chunks;
  char *shared_slots;
  size_t shared_bytes;  // of a partial
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
  return (Tile){low, i / tiles, first, left < job->tile_tokens ? left : job->tile_tokens, 0};
}

// The chunks of a tile: from the one that its first token sees first to the one after its last.
static void chunks_of(const Attention *a, Tile tile, int *first, int *stop) {
  const int visible = a->context_lens[tile.row] - a->query_lens[tile.row] + tile.first + 1;
  const int last = tokens_before(a, visible + tile.count - 1);
  *first = a->window && visible > a->window ? tokens_before(a, visible - a->window) / CHUNK : 0;
  *stop = last > 0 ? (last + CHUNK - 1) / CHUNK : 0;
}

// The partial of some of the sharing rows, from `row` on.
static Partial shared_partial(const AttendJob *job, int head, int chunk, int row) {
  const int group = job->attention.num_heads / job->attention.num_kv_heads;
  Partial all = partial_at(job->shared_slots + ((size_t)head * job->shared_chunks + chunk) * job->shared_bytes,
                           job->num_sharing * group);
  return (Partial){all.maximum + row * group, all.total + row * group, all.values + (size_t)row * group * job->padded};
}

// A tile of sharing rows, over a chunk.
static Piece shared_piece(const AttendJob *job, int index) {
  const int tiles = (job->num_sharing + job->tile_tokens - 1) / job->tile_tokens, first = index % tiles * job->tile_tokens;
  const int left = job->num_sharing - first, count = left < job->tile_tokens ? left : job->tile_tokens;
  const Tile tile = {first, index / tiles / job->shared_chunks, 0, count, job->shared};
  return (Piece){tile, index / tiles % job->shared_chunks, 0};
}
static int num_shared_pieces(const AttendJob *job) {
  const int tiles = (job->num_sharing + job->tile_tokens - 1) / job->tile_tokens;
  return tiles * job->shared_chunks * job->attention.num_kv_heads;
}

static void attend_piece(AttendJob *job, Piece piece, Piece after, Partial out) {
  const Attention *a = &job->attention;
  float *values = a->is_latent ? reserve(OF_VALUES, sizeof(float) * BLOCK * a->value_width) : 0;
  if (a->is_latent && !values) atomic_store(&job->failed, 1);
  else job->kernels->attend(a, piece, after, out, values);
}

static void shared_job(void *context) {
  AttendJob *job = context;
  const int pieces = num_shared_pieces(job);
  for (int i = atomic_fetch_add(&job->next, 1), next; i < pieces; i = next) {
    next = atomic_fetch_add(&job->next, 1);
    const Piece piece = shared_piece(job, i), after = next < pieces ? shared_piece(job, next) : (Piece){0};
    attend_piece(job, piece, after, shared_partial(job, piece.tile.head, piece.chunk, piece.tile.row));
  }
}

// A tile over a chunk, without what it shares with others.
static Piece piece_of(const AttendJob *job, Tile tile, int chunk) {
  const int left = tile.row < job->num_sharing ? job->shared - chunk * CHUNK : 0;
  return (Piece){tile, chunk, left < 0 ? 0 : left < CHUNK ? left : CHUNK};
}

// The softmax of a piece, from what its tile shares with others where it does.
static void attend_over(AttendJob *job, Piece piece, Piece after, Partial out) {
  const Tile tile = piece.tile;
  if (piece.done > 0) {
    const int rows = tile.count * (job->attention.num_heads / job->attention.num_kv_heads);
    const Partial from = shared_partial(job, tile.head, piece.chunk, tile.row);
    memcpy(out.maximum, from.maximum, sizeof(float) * rows);
    memcpy(out.total, from.total, sizeof(float) * rows);
    memcpy(out.values, from.values, sizeof(float) * rows * job->padded);
  }
  if (piece.done < CHUNK) attend_piece(job, piece, after, out);
}

// All chunks of a tile.
static void attend_tile(AttendJob *job, Tile tile, Tile after) {
  const int rows = tile.count * (job->attention.num_heads / job->attention.num_kv_heads);
  char *memory = reserve(OF_JOB, 2 * job->slot_bytes);
  if (!memory) {
    atomic_store(&job->failed, 1);
    return;
  }
  Partial all = partial_at(memory, rows), more = partial_at(memory + job->slot_bytes, rows);
  int first, stop, after_first = 0, unused;
  chunks_of(&job->attention, tile, &first, &stop);
  if (after.count) chunks_of(&job->attention, after, &after_first, &unused);
  if (first >= stop) memset(memory, 0, job->slot_bytes);  // they see nothing
  for (int chunk = first; chunk < stop; chunk++) {
    const Piece next = chunk + 1 < stop ? piece_of(job, tile, chunk + 1) : piece_of(job, after, after_first);
    attend_over(job, piece_of(job, tile, chunk), next, chunk == first ? all : more);
    if (chunk > first) job->kernels->merge(all, more, rows, job->padded);
  }
  job->kernels->finish(&job->attention, tile, all);
}

static void tiles_job(void *context) {
  AttendJob *job = context;
  for (int i = atomic_fetch_add(&job->next, 1), next; i < job->num_tiles; i = next) {
    next = atomic_fetch_add(&job->next, 1);
    attend_tile(job, find_tile(job, i), next < job->num_tiles ? find_tile(job, next) : (Tile){0});
  }
}

// The next chunk of a tile that sees something of it; of a tile of no tokens: there is none.
static Piece take_piece(AttendJob *job, int *index) {
  while ((*index = atomic_fetch_add(&job->next, 1)) < job->num_tiles * job->most_chunks) {
    const Tile tile = find_tile(job, *index / job->most_chunks);
    int first, stop;
    chunks_of(&job->attention, tile, &first, &stop);
    const int chunk = *index % job->most_chunks;
    if (chunk >= first && chunk < stop) return piece_of(job, tile, chunk);
  }
  return (Piece){0};
}

static void chunks_job(void *context) {
  AttendJob *job = context;
  int index, next_index;
  for (Piece piece = take_piece(job, &index), next; piece.tile.count; piece = next, index = next_index) {
    next = take_piece(job, &next_index);
    const int tile_index = index / job->most_chunks;
    const int rows = piece.tile.count * (job->attention.num_heads / job->attention.num_kv_heads);
    char *slots = job->slots + (size_t)tile_index * job->most_chunks * job->slot_bytes;
    attend_over(job, piece, next, partial_at(slots + piece.chunk * job->slot_bytes, rows));
    if (atomic_fetch_sub(&job->left[tile_index], 1) != 1) continue;
    int first, stop;
    chunks_of(&job->attention, piece.tile, &first, &stop);
    Partial all = partial_at(slots + first * job->slot_bytes, rows);
    for (int i = first + 1; i < stop; i++)
      job->kernels->merge(all, partial_at(slots + i * job->slot_bytes, rows), rows, job->padded);
    job->kernels->finish(&job->attention, piece.tile, all);
  }
}

// Zeros for tokens that no row owns; rows own consecutive tokens, in order.
static void clear_unowned(const Attention *a, int num_rows, int64_t num_tokens) {
  const int64_t token_size = (int64_t)a->num_heads * out_width(a);
  int64_t done = 0;
  for (int r = 0; r <= num_rows; r++) {
    if (r < num_rows && a->query_lens[r] <= 0) continue;
    const int64_t start = r < num_rows ? a->query_starts[r] : num_tokens;
    if (start > done) memset(a->out + done * token_size, 0, sizeof(float) * (start - done) * token_size);
    if (r < num_rows) done = start + a->query_lens[r];
  }
}

// Whether argument i is a part that the attribute `parts` allows.
static int is_part(FfiFrame *frame, int i) {
  const int parts = ffi_int(frame, "parts");
  if (!is_s32(ffi_argument(frame, i), 0, 0) || parts < 0) return 0;
  const int part = *(const int32_t *)ffi_argument(frame, i)->data;
  return part >= 0 && (parts ? part < parts : part == 0);
}

static int are_attend_operands(FfiFrame *frame) {
  const FfiBuffer *query = ffi_argument(frame, 0), *out = ffi_result(frame, 0), *table = ffi_argument(frame, 3);
  if (frame->arguments.size != 12 || !is_first_page(ffi_argument(frame, 9), ffi_argument(frame, 1))) return 0;
  if (query->dtype != FFI_F32 || query->rank != 3 || !is_part(frame, 11)) return 0;
  if (out->dtype != FFI_F32 || out->rank != 3 || out->dims[0] != query->dims[0] || out->dims[1] != query->dims[1]) return 0;
  if (out->dims[2] != query->dims[2] + (ffi_int(frame, "parts") ? 2 : 0)) return 0;
  const int64_t heads = ffi_int(frame, "num_kv_heads"), width = query->dims[2];
  if (heads <= 0 || query->dims[1] % heads || query->dims[1] / heads > MOST_GROUP || width > MOST_WIDTH) return 0;
  if (!are_pools(ffi_argument(frame, 1), ffi_argument(frame, 2), heads, width, ffi_int(frame, "page_size"))) return 0;
  const FfiBuffer *sinks = ffi_argument(frame, 10);
  if (sinks->dtype != FFI_F32 || sinks->rank != 1 || (sinks->dims[0] && sinks->dims[0] != query->dims[1])) return 0;
  for (int i = 4; i < 7; i++)
    if (!is_s32(ffi_argument(frame, i), 1, table->dims[0])) return 0;
  return is_s32(table, 2, table->dims[0]) && is_s32(ffi_argument(frame, 7), 0, 0) && is_s32(ffi_argument(frame, 8), 0, 0);
}

// Decides what rows share, and computes it; 0 where there is no memory.
static int attend_shared(AttendJob *job, int num_decode, int num_pages) {
  const Attention *a = &job->attention;
  const int group = a->num_heads / a->num_kv_heads, rows = num_decode < job->num_rows ? num_decode : job->num_rows;
  const int64_t tokens = (int64_t)num_pages * a->page_size / BLOCK * BLOCK;
  if (rows < 2 || tokens < BLOCK || a->window) return 1;
  const int chunks = (int)((tokens + CHUNK - 1) / CHUNK);
  const size_t bytes = partial_bytes(rows * group, job->padded);
  if (bytes * chunks * a->num_kv_heads > SPLIT_BYTES) return 1;
  job->shared_slots = reserve(OF_SHARED, bytes * chunks * a->num_kv_heads);
  if (!job->shared_slots) return 0;
  job->shared = (int)tokens;
  job->num_sharing = rows;
  job->shared_chunks = chunks;
  job->shared_bytes = bytes;
  run_job(shared_job, job);
  atomic_store(&job->next, 0);
  return 1;
}

// Computes a step's attention; 0 where there is no memory.
static int attend_rows(Attention attention, int64_t num_tokens, int64_t num_rows, int num_decode, int num_shared_pages) {
  AttendJob job = {.attention = attention, .num_rows = (int)num_rows};
  const Attention *a = &job.attention;
  const int group = a->num_heads / a->num_kv_heads, is_amx_able = a->is_bf16 && !a->is_latent;
  job.kernels = choose_kernels(a->page_size, a->width, is_amx_able);
  job.tile_tokens = job.kernels->tile_tokens(group);
  if (job.tile_tokens * group * a->width > MOST_QUERY) job.tile_tokens = MOST_QUERY / (group * a->width);
  job.padded = job.kernels->padded_width(a->value_width);
  job.most_rows = job.tile_tokens * group;
  clear_unowned(a, job.num_rows, num_tokens);
  if (!attend_shared(&job, num_decode, num_shared_pages)) return 0;

  int longest = 0, most_tokens = 0;
  int *first = reserve(OF_CALL, sizeof(int) * (job.num_rows + 1));
  if (!first) return 0;
  for (int r = 0; r < job.num_rows; r++) {
    first[r] = job.num_tiles;
    if (a->query_lens[r] <= 0) continue;
    job.num_tiles += a->num_kv_heads * ((a->query_lens[r] + job.tile_tokens - 1) / job.tile_tokens);
    if (tokens_before(a, a->context_lens[r]) > longest) longest = tokens_before(a, a->context_lens[r]);
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
    char *memory = reserve(OF_SPLIT, lefts + (size_t)split_bytes);
    if (!memory) return 0;
    job.left = (atomic_int *)memory;
    job.slots = memory + lefts;
    for (int i = 0; i < job.num_tiles; i++) {
      int begin, stop;
      const Tile tile = find_tile(&job, i);
      chunks_of(a, tile, &begin, &stop);
      atomic_init(&job.left[i], stop - begin);
      if (begin >= stop) attend_tile(&job, tile, (Tile){0});  // it sees nothing
    }
  }
  run_job(job.is_split ? chunks_job : tiles_job, &job);
  return !atomic_load(&job.failed);
}

static int integer(FfiFrame *frame, int i) { return *(const int32_t *)ffi_argument(frame, i)->data; }

// Arguments: query f32 [T, N, H], keys [P, K, H, p], values [P, K, p, H] (flat rows [P, K * H * p] too), page_table s32
// [R, M], context_lens, query_starts, query_lens s32 [R], num_decode, num_shared_pages s32: the first rows have one token
// each, and the pages that all of them begin with; first_page s32: where the layer's pages begin in the pools; sinks f32
// [N], or [0] for none; part s32. Attributes: num_kv_heads, page_size, window, scale, soft_cap, parts. Result: f32
// [T, N, H], or [T, N, H + 2] with parts.
EXPORT FfiError *jaxserve_attend(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  if (!are_attend_operands(frame)) return ffi_error(frame, "jaxserve_attend: shapes or dtypes do not go together");
  const FfiBuffer *query = ffi_argument(frame, 0), *keys = ffi_argument(frame, 1), *table = ffi_argument(frame, 3);
  const Attention attention = {
      .query = query->data,
      .keys = pages_from(keys, ffi_argument(frame, 9)),
      .values = pages_from(ffi_argument(frame, 2), ffi_argument(frame, 9)),
      .table = table->data,
      .context_lens = ffi_argument(frame, 4)->data,
      .query_starts = ffi_argument(frame, 5)->data,
      .query_lens = ffi_argument(frame, 6)->data,
      .sinks = ffi_argument(frame, 10)->dims[0] ? ffi_argument(frame, 10)->data : 0,
      .out = ffi_result(frame, 0)->data,
      .num_heads = (int)query->dims[1],
      .num_kv_heads = ffi_int(frame, "num_kv_heads"),
      .width = (int)query->dims[2],
      .value_width = (int)query->dims[2],
      .page_size = ffi_int(frame, "page_size"),
      .table_width = (int)table->dims[1],
      .is_bf16 = keys->dtype == FFI_BF16,
      .scale = ffi_float(frame, "scale"),
      .soft_cap = ffi_float(frame, "soft_cap"),
      .window = ffi_int(frame, "window"),
      .parts = ffi_int(frame, "parts"),
      .part = integer(frame, 11),
  };
  const int is_done = attend_rows(attention, query->dims[0], table->dims[0], integer(frame, 7), integer(frame, 8));
  return is_done ? 0 : ffi_error(frame, "jaxserve_attend: out of memory");
}

static int are_latent_operands(FfiFrame *frame) {
  const FfiBuffer *query = ffi_argument(frame, 0), *pool = ffi_argument(frame, 1), *table = ffi_argument(frame, 2);
  const FfiBuffer *out = ffi_result(frame, 0);
  if (frame->arguments.size != 10 || !is_first_page(ffi_argument(frame, 8), pool) || !is_part(frame, 9)) return 0;
  if (query->dtype != FFI_F32 || query->rank != 3 || query->dims[1] <= 0) return 0;
  if (!is_latent_pool(pool, query->dims[2], ffi_int(frame, "page_size"))) return 0;
  if (out->dtype != FFI_F32 || out->rank != 3 || out->dims[0] != query->dims[0] || out->dims[1] != query->dims[1]) return 0;
  const int64_t values = out->dims[2] - (ffi_int(frame, "parts") ? 2 : 0);
  if (values <= 0 || values > query->dims[2]) return 0;
  for (int i = 3; i < 6; i++)
    if (!is_s32(ffi_argument(frame, i), 1, table->dims[0])) return 0;
  return is_s32(table, 2, table->dims[0]) && is_s32(ffi_argument(frame, 6), 0, 0) && is_s32(ffi_argument(frame, 7), 0, 0);
}

// Arguments: query f32 [T, N, H], latents [P, H, p], then as of jaxserve_attend from page_table to first_page; part s32.
// Attributes: page_size, scale, parts. Result: f32 [T, N, values], of the latents' first features, or [T, N, values + 2]
// with parts.
EXPORT FfiError *jaxserve_attend_latents(FfiFrame *frame) {
  if (ffi_answered_metadata(frame)) return 0;
  if (!are_latent_operands(frame))
    return ffi_error(frame, "jaxserve_attend_latents: shapes or dtypes do not go together");
  const FfiBuffer *query = ffi_argument(frame, 0), *pool = ffi_argument(frame, 1), *table = ffi_argument(frame, 2);
  const int num_heads = (int)query->dims[1], parts = ffi_int(frame, "parts");
  int group = num_heads < LATENT_GROUP ? num_heads : LATENT_GROUP;
  while (num_heads % group) group--;
  const Attention attention = {
      .query = query->data,
      .keys = pages_from(pool, ffi_argument(frame, 8)),
      .table = table->data,
      .context_lens = ffi_argument(frame, 3)->data,
      .query_starts = ffi_argument(frame, 4)->data,
      .query_lens = ffi_argument(frame, 5)->data,
      .out = ffi_result(frame, 0)->data,
      .num_heads = num_heads,
      .num_kv_heads = num_heads / group,
      .width = (int)query->dims[2],
      .value_width = (int)ffi_result(frame, 0)->dims[2] - (parts ? 2 : 0),
      .page_size = ffi_int(frame, "page_size"),
      .table_width = (int)table->dims[1],
      .is_bf16 = pool->dtype == FFI_BF16,
      .is_latent = 1,
      .scale = ffi_float(frame, "scale"),
      .parts = parts,
      .part = integer(frame, 9),
  };
  const int is_done = attend_rows(attention, query->dims[0], table->dims[0], integer(frame, 6), integer(frame, 7));
  return is_done ? 0 : ffi_error(frame, "jaxserve_attend_latents: out of memory");
}
