// Paged attention of a tile of query tokens over keys and values in bfloat16, on the tiles of AMX; see attention.c.
//
// Query rows and the weights of a softmax are rounded to bfloat16; sums, maxima and the softmax are in float32. Keys and
// values are multiplied where they lie, see pages.h. The processor computes every row by itself, so that a query's result
// depends on its own context only.
#include "amx.h"
#include "attention_rows.h"

enum { ROWS = TILE_ROWS, ROW_BLOCKS = 4, DEPTH = TILE_DEPTH, STEPS = BLOCK / DEPTH, TILES_AT_ONCE = 4 };

static int tile_tokens(int group) { return group >= ROW_BLOCKS * ROWS ? 1 : ROW_BLOCKS * ROWS / group; }

// Tiles 0 to 3 are sums and tile 4 holds query rows, of which there may be fewer than 16; 5 holds keys or values.
static void configure(int some_rows) {
  const uint8_t some = (uint8_t)some_rows;
  configure_tiles((uint8_t[8]){some, some, some, some, some, DEPTH / 2});
}

static void round_row(const float *from, int count, float scale, char *tiles, int row) {
  for (int k = 0; k < count; k += DEPTH) {
    const Vec low = vec_mul(vec_load(from + k), vec_set(scale)), high = vec_mul(vec_load(from + k + LANES), vec_set(scale));
    _mm512_storeu_si512(tiles + k / DEPTH * TILE_BYTES + row * 64, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

// The index of a tile is a part of an instruction.
#define EACH_TILE(do_one) do_one(0) do_one(1) do_one(2) do_one(3)
#define ZERO_TILE(i) if (i < some) _tile_zero(i);
#define LOAD_TILE(i) if (i < some) _tile_loadd(i, to + i * LANES, stride * 4);
#define STORE_TILE(i) if (i < some) _tile_stored(i, to + i * LANES, stride * 4);
#define ADD_KEYS(i)                                      \
  if (i < some) {                                        \
    ask(ahead, TILE_BYTES);                              \
    _tile_loadd(5, keys[g + i] + k * TILE_BYTES, 64);    \
    _tile_dpbf16ps(i, 4, 5);                             \
  }
#define ADD_VALUES(i)                                    \
  if (i < some) {                                        \
    ask(ahead, TILE_BYTES);                              \
    _tile_loadd(5, from + i * 64, width * 4);            \
    _tile_dpbf16ps(i, 4, 5);                             \
  }

// Multiplies rows, in tiles, by groups of 16 context tokens: scores [row][BLOCK].
INLINE void multiply_keys(const char *rows, int width, const char *const *keys, int groups, float *scores,
                          Ahead *ahead) {
  const int64_t stride = BLOCK;
  for (int g = 0; g < groups; g += TILES_AT_ONCE) {
    const int some = groups - g < TILES_AT_ONCE ? groups - g : TILES_AT_ONCE;
    float *to = scores + g * LANES;
    EACH_TILE(ZERO_TILE)
    for (int k = 0; k < width / DEPTH; k++) {
      _tile_loadd(4, rows + k * TILE_BYTES, 64);
      EACH_TILE(ADD_KEYS)
    }
    EACH_TILE(STORE_TILE)
  }
}

// Adds weighted values of context tokens, 32 a step, to sums [row][width].
INLINE void add_values(const char *weights, int steps, const char *const *pairs, int width, float *sums,
                       Ahead *ahead) {
  const int64_t stride = width;
  for (int column = 0; column < width; column += TILES_AT_ONCE * LANES) {
    const int some = width - column < TILES_AT_ONCE * LANES ? (width - column) / LANES : TILES_AT_ONCE;
    float *to = sums + column;
    EACH_TILE(LOAD_TILE)
    for (int k = 0; k < steps; k++) {
      const char *from = pairs[k] + column * 4;
      _tile_loadd(4, weights + k * TILE_BYTES, 64);
      EACH_TILE(ADD_VALUES)
    }
    EACH_TILE(STORE_TILE)
  }
}

// Where the values of each 32 tokens lie: in their page, or, where they are of two pages or half of them are of none, in
// `copies`.
static void find_pairs(const Block *block, int steps, int width, int page_size, char *copies, const char **pairs) {
  const size_t half = (size_t)LANES / 2 * width * 4;
  for (int k = 0; k < steps; k++, copies += 2 * half) {
    pairs[k] = block->values[2 * k];
    if (page_size % DEPTH == 0) continue;
    memcpy(copies, block->values[2 * k], half);
    if (2 * k + 1 < block->groups) memcpy(copies + half, block->values[2 * k + 1], half);
    else memset(copies + half, 0, half);
    pairs[k] = copies;
  }
}

static void attend(const Attention *a, Piece piece, Piece after, Partial out, float *values) {
  (void)values;  // of latents, which other kernels compute
  const Tile tile = piece.tile;
  const int group = a->num_heads / a->num_kv_heads, width = a->width, rows = tile.count * group;
  const int prefix = context_before(a, tile), end = context_end(a, piece);
  if (!piece.done) clear_partial(out, rows, width);
  char query[ROW_BLOCKS][MOST_WIDTH / DEPTH * TILE_BYTES], weights[STEPS * TILE_BYTES];
  char copies[BLOCK * MOST_WIDTH * 2];
  float scores[ROWS * BLOCK];
  for (int r = 0; r < rows; r++) round_row(query_row(a, tile, r), width, a->scale, query[r / ROWS], r % ROWS);
  int configured = 0, at = context_begin(a, piece);
  for (Block block = locate(a, tile, at, end), next; at < end; at += BLOCK, block = next) {
    const int count = block.count, steps = (count + DEPTH - 1) / DEPTH;
    const char *pairs[STEPS];
    Ahead ahead;
    next = locate_next(a, piece, after, at, block.groups, &ahead);
    find_pairs(&block, steps, width, a->page_size, copies, pairs);
    for (int r0 = 0; r0 < rows; r0 += ROWS) {
      const int some = rows - r0 < ROWS ? rows - r0 : ROWS;
      if (sees_nothing(a, tile, prefix, r0, some, at, count)) continue;
      if (some != configured) configure(some);
      configured = some;
      multiply_keys(query[r0 / ROWS], width, block.keys, block.groups, scores, &ahead);
      if (block.groups % 2)
        for (int r = 0; r < some; r++) vec_store(scores + r * BLOCK + block.groups * LANES, vec_zero());
      weigh_rows(a, tile, prefix, r0, some, at, count, block.groups * LANES, scores, out);
      for (int r = 0; r < some; r++) round_row(scores + r * BLOCK, steps * DEPTH, 1, weights, r);
      add_values(weights, steps, pairs, width, out.values + (int64_t)r0 * width, &ahead);
    }
  }
  if (configured) _tile_release();
}

const Kernels amx_kernels = {"amx", LANES, tile_tokens, padded_width, attend, merge, finish};
