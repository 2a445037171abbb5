// What attention does for each query row, whatever multiplies it with keys and values; compiled for each instruction set.
#pragma once
#include <string.h>

#include "attention.h"
#include "pages.h"
#include "vectors.h"

enum { GROUPS = BLOCK / LANES };
static const float MASKED = -1e30f;

static int padded_width(int width) { return (width + LANES - 1) / LANES * LANES; }

static void clear_partial(Partial out, int rows, int padded) {
  for (int r = 0; r < rows; r++) {
    out.maximum[r] = MASKED;
    out.total[r] = 0;
  }
  memset(out.values, 0, sizeof(float) * rows * padded);
}

// Context tokens before a tile's first query token.
static int context_before(const Attention *a, Tile tile) {
  return a->context_lens[tile.row] - a->query_lens[tile.row] + tile.first;
}

// The first token of the pools that a piece sees, by blocks, and the one after its last.
static int context_begin(const Attention *a, Piece piece) {
  const int begin = piece.chunk * CHUNK + piece.done;
  const int seen = tokens_before(a, context_before(a, piece.tile) + 1 - a->window);
  return a->window && seen > begin ? seen / BLOCK * BLOCK : begin;
}
static int context_end(const Attention *a, Piece piece) {
  const Tile tile = piece.tile;
  const int end = tile.shared ? tile.shared : tokens_before(a, context_before(a, tile) + tile.count);
  return end < (piece.chunk + 1) * CHUNK ? end : (piece.chunk + 1) * CHUNK;
}

// A query row of a tile: token by token, with the heads of the group.
static const float *query_row(const Attention *a, Tile tile, int row) {
  const int group = a->num_heads / a->num_kv_heads, index = row / group;
  const int token = tile.shared ? a->query_starts[tile.row + index] : a->query_starts[tile.row] + tile.first + index;
  return a->query + ((int64_t)token * a->num_heads + tile.head * group + row % group) * a->width;
}

// Where the keys and values of some context tokens lie, a pointer for each LANES tokens.
typedef struct {
  int count, groups;
  const char *keys[GROUPS], *values[GROUPS];
} Block;

// The block from context token `at` on, of those before `end`; of no tokens if there are none.
static Block locate(const Attention *a, Tile tile, int at, int end) {
  const int count = end - at < BLOCK ? end - at : BLOCK, width = a->width, page_size = a->page_size;
  Block block = {.count = count, .groups = count > 0 ? (count + LANES - 1) / LANES : 0};
  const int32_t *pages = a->table + (int64_t)tile.row * a->table_width;
  for (int g = 0; g < block.groups; g++) {
    const int token = at + g * LANES, offset = token % page_size;
    const int head = a->is_latent ? 0 : tile.head, heads = a->is_latent ? 1 : a->num_kv_heads;
    const int64_t page = page_offset(pages[token / page_size], head, heads, page_size, width, a->is_bf16);
    block.keys[g] = (const char *)a->keys + page + key_offset(offset, page_size, width, a->is_bf16);
    if (!a->is_latent) block.values[g] = (const char *)a->values + page + value_offset(offset, width, a->is_bf16);
  }
  return block;
}

// The keys and values of the block that comes next, which are prefetched gradually while a block is computed: pages
// lie anywhere, so that no processor sees them coming, and asking for many lines at once would wait for them. After the
// first lines of a sequence the processor fetches the rest by itself, to the end of 4096 bytes.
typedef struct {
  const char *groups[2 * GROUPS];
  int num_groups, group_bytes, group, at;
  int pace;  // amount to prefetch per amount read
} Ahead;
enum { ASKED_BYTES = 256, SEQUENCE_BYTES = 4096, SEEN_AFTER = 1024 };

// The next block is one of the piece or the first of the piece after it.
static Block locate_next(const Attention *a, Piece piece, Piece after, int at, int groups, Ahead *ahead) {
  const int end = context_end(a, piece);
  Block next = {0};
  if (at + BLOCK < end) next = locate(a, piece.tile, at + BLOCK, end);
  else if (after.tile.count) next = locate(a, after.tile, context_begin(a, after), context_end(a, after));
  memcpy(ahead->groups, next.keys, next.groups * sizeof(char *));
  if (!a->is_latent) memcpy(ahead->groups + next.groups, next.values, next.groups * sizeof(char *));
  ahead->num_groups = (a->is_latent ? 1 : 2) * next.groups;
  ahead->group_bytes = LANES * a->width * (a->is_bf16 ? 2 : 4);
  ahead->group = ahead->at = 0;
  ahead->pace = (next.groups + groups - 1) / groups;
  return next;
}
INLINE void ask(Ahead *ahead, int bytes_read) {
  for (int i = bytes_read / ASKED_BYTES * ahead->pace; i > 0 && ahead->group < ahead->num_groups; i--) {
    const char *from = ahead->groups[ahead->group] + ahead->at;
    if ((uintptr_t)from % SEQUENCE_BYTES < SEEN_AFTER)
      for (int line = 0; line < ASKED_BYTES; line += 64) __builtin_prefetch(from + line, 0, 2);
    ahead->at += ASKED_BYTES;
    if (ahead->at < ahead->group_bytes) continue;
    ahead->at = 0;
    ahead->group++;
  }
}

// The position after a query row's own.
static int position_after(const Attention *a, int prefix, int row) {
  return prefix + row / (a->num_heads / a->num_kv_heads) + 1;
}

// Tokens of the pools that are no later than a query row, and those of them that its window leaves out.
static int visible_to(const Attention *a, Tile tile, int prefix, int row) {
  return tile.shared ? tile.shared : tokens_before(a, position_after(a, prefix, row));
}
static int hidden_from(const Attention *a, int prefix, int row) {
  return a->window ? tokens_before(a, position_after(a, prefix, row) - a->window) : 0;
}

// Whether none of some query rows sees anything of a block.
static int sees_nothing(const Attention *a, Tile tile, int prefix, int row, int rows, int at, int count) {
  return visible_to(a, tile, prefix, row + rows - 1) <= at || hidden_from(a, prefix, row) >= at + count;
}

static void scale_row(float *values, int padded, float factor) {
  for (int h = 0; h < padded; h += LANES) vec_store(values + h, vec_mul(vec_load(values + h), vec_set(factor)));
}

// Turns the scores of a query row into weights and updates its softmax; it sees tokens first to last - 1 of the block.
static void weigh(float *scores, int num_lanes, int first, int last, float soft_cap, float *maximum, float *total,
                  float *values, int padded) {
  if (soft_cap > 0)
    for (int i = 0; i < num_lanes; i += LANES) {
      const Vec x = vec_mul(vec_load(scores + i), vec_set(1 / soft_cap));
      vec_store(scores + i, vec_mul(vec_tanh(x), vec_set(soft_cap)));
    }
  Vec highest = vec_set(MASKED);
  for (int i = 0; i < num_lanes; i += LANES)
    highest = vec_max(highest, vec_pick(vec_lanes(first - i, last - i), vec_load(scores + i), vec_set(MASKED)));
  float now = vec_highest(highest);
  if (now < *maximum) now = *maximum;
  Vec sum = vec_zero();
  for (int i = 0; i < num_lanes; i += LANES) {
    Vec weight = vec_exp(vec_sub(vec_load(scores + i), vec_set(now)));
    weight = vec_pick(vec_lanes(first - i, last - i), weight, vec_zero());
    sum = vec_add(sum, weight);
    vec_store(scores + i, weight);
  }
  if (now != *maximum) {
    float kept = exp_of(*maximum - now);
    *total *= kept;
    scale_row(values, padded, kept);
    *maximum = now;
  }
  *total += vec_total(sum);
}

// The same for some rows of a tile, from `row` on.
static void weigh_rows(const Attention *a, Tile tile, int prefix, int row, int rows, int at, int count, int num_lanes,
                       float *scores, Partial out) {
  const int padded = padded_width(a->value_width);
  for (int r = 0; r < rows; r++) {
    const int visible = visible_to(a, tile, prefix, row + r);
    const int first = a->window ? hidden_from(a, prefix, row + r) - at : 0;
    weigh(scores + r * BLOCK, num_lanes, first, visible - at < count ? visible - at : count, a->soft_cap,
          out.maximum + row + r, out.total + row + r, out.values + (int64_t)(row + r) * padded, padded);
  }
}

static void merge(Partial into, Partial from, int rows, int padded) {
  for (int r = 0; r < rows; r++) {
    const float highest = into.maximum[r] > from.maximum[r] ? into.maximum[r] : from.maximum[r];
    const float kept = exp_of(into.maximum[r] - highest), added = exp_of(from.maximum[r] - highest);
    into.total[r] = into.total[r] * kept + from.total[r] * added;
    into.maximum[r] = highest;
    float *values = into.values + (int64_t)r * padded;
    const float *more = from.values + (int64_t)r * padded;
    for (int h = 0; h < padded; h += LANES)
      vec_store(values + h, vec_fma(vec_load(more + h), vec_set(added), vec_mul(vec_load(values + h), vec_set(kept))));
  }
}

// What the weighted values of a softmax are multiplied by, with a head's sink in its denominator.
static float with_sink(float sink, float maximum, float total) {
  if (sink <= maximum) return 1 / (total + exp_of(sink - maximum));
  const float kept = exp_of(maximum - sink);
  return kept / (total * kept + 1);
}

static void finish(const Attention *a, Tile tile, Partial from) {
  const int group = a->num_heads / a->num_kv_heads, width = a->value_width, padded = padded_width(width);
  const int to_width = out_width(a);
  for (int r = 0; r < tile.count * group; r++) {
    const int token = a->query_starts[tile.row] + tile.first + r / group;
    const int head = tile.head * group + r % group;
    float *to = a->out + ((int64_t)token * a->num_heads + head) * to_width;
    if (a->parts) {
      memcpy(to, from.values + (int64_t)r * padded, sizeof(float) * width);
      to[width] = from.total[r];
      to[width + 1] = from.total[r] == 0 ? MASKED : from.maximum[r];  // it sees nothing
      continue;
    }
    float factor = from.total[r] == 0 ? 0 : 1 / from.total[r];  // it sees nothing
    if (a->sinks && from.total[r] != 0) factor = with_sink(a->sinks[head], from.maximum[r], from.total[r]);
    const float *values = from.values + (int64_t)r * padded;
    for (int h = 0; h < width; h++) to[h] = values[h] * factor;
  }
}
