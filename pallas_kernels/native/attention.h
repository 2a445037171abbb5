// Attention of a step over paged keys and values.
#pragma once
#include <stdint.h>

enum {
  BLOCK = 128,      // context tokens whose scores are computed together
  CHUNK = 1024,     // context tokens whose softmax is computed from nothing; chunks are merged in order
  MOST_WIDTH = 512, // of a head
  MOST_GROUP = 64,  // query heads that share a key/value head
  MOST_LATENT = 1024,  // width of a latent with its rotated key
  LATENT_GROUP = 16,   // query heads of a tile over latents
  MOST_QUERY = MOST_GROUP * MOST_WIDTH  // numbers of a tile's query rows
};

typedef struct {
  const float *query;     // [T, N, H]
  const void *keys;       // [P, K, H, p], each page as pages.h says
  const void *values;     // [P, K, p, H]
  const int32_t *table;   // [R, M]
  const int32_t *context_lens, *query_starts, *query_lens;  // [R]
  const float *sinks;     // [N] logits that take part in the softmax without a value, or null
  float *out;             // [T, N, out_width]
  int num_heads, num_kv_heads, width, value_width, page_size, table_width, is_bf16;
  // Latents, [P, 1, H, p], lie where keys do, and their first features are the values. All heads share them: a key/value
  // head is then any group of query heads.
  int is_latent;
  float scale, soft_cap;  // soft_cap 0: none
  int window;             // 0: none
  // Of devices that share the tokens of contexts, each has every parts-th position in its pools, from position `part` on,
  // and returns partial attention: weighted sums of values, then the sum of the weights and the largest score. Lengths
  // and the window are those of whole contexts. 0: the pools have everything.
  int parts, part;
} Attention;

// Tokens in the pools that come before a position of a context.
static inline int tokens_before(const Attention *a, int position) {
  if (!a->parts) return position;
  return position > a->part ? (position - a->part + a->parts - 1) / a->parts : 0;
}
static inline int out_width(const Attention *a) { return a->value_width + (a->parts ? 2 : 0); }

// Query tokens first to first + count - 1 of a row, with the query heads of one key/value head; or, where `shared` is not
// 0, the only tokens of rows row to row + count - 1 over that many context tokens, which all of these rows begin with.
typedef struct {
  int row, head, first, count, shared;
} Tile;

// A tile over one chunk of the context: what comes after the first `done` tokens of the chunk.
typedef struct {
  Tile tile;
  int chunk, done;
} Piece;

// The softmax of a piece: for each query row (token, then head of the group) its maximum, sum and values.
typedef struct {
  float *maximum, *total, *values;  // [rows], [rows], [rows, padded width]
} Partial;

// The functions that exist once for each instruction set.
typedef struct {
  const char *name;
  int lanes;
  int (*tile_tokens)(int group);                       // query tokens of a tile
  int (*padded_width)(int width);                      // of a row of a partial
  // Computes a piece's softmax, which goes on from what the partial holds where `done` is not 0, and prefetches the
  // keys and values that the piece after it begins with; of no tokens: there is none. Latents need room for the values of
  // a block, [BLOCK][value width].
  void (*attend)(const Attention *, Piece, Piece after, Partial, float *values);
  void (*merge)(Partial into, Partial from, int rows, int padded);
  void (*finish)(const Attention *, Tile, Partial);
} Kernels;

extern const Kernels amx_kernels, avx512_kernels, avx2_kernels;
