// Updates of recurrent layers: rows of a step with state pages, a causal convolution, and a state per head.
//
// A head's state, a matrix [keys][values], lies as tiles of 16 values, [values / 16][keys][16], the last filled up with
// zeros: a tile stays in the L1 cache while the tokens of a block pass over it, and its lines share no cache sets, as rows
// of 128 values would.
//
// Tokens are computed one after the other, and no sum runs over tokens, lanes or threads in more than one order: results
// do not depend on the batch, the chunk, the threads or the instruction set.
#pragma once
#include <stdint.h>

enum { GROUP = 16, BLOCK_TOKENS = 32, LEAST_TAPS = 2, MOST_TAPS = 4 };

static inline int64_t whole_groups(int64_t count) { return (count + GROUP - 1) / GROUP * GROUP; }

// Rows of a step: as StateRows of recurrent_states.py has them, but for the page that takes a copy after each token of the
// step, or -1.
typedef struct {
  const int32_t *starts, *lens, *are_new, *pages;
  const int32_t *pages_after;
  int64_t count;
} StateRows;

// Consecutive tokens of a row that are computed together; a snapshot is taken at the end of a block only.
typedef struct {
  int64_t first, count;
  int64_t page, snapshot;  // snapshot: the page that takes a copy after the block, or -1
  int is_new;              // what the page holds does not count
} Block;

static inline Block block_after(const StateRows *rows, int64_t row, int64_t done) {
  const int64_t first = rows->starts[row] + done, left = rows->lens[row] - done;
  const int64_t most = left < BLOCK_TOKENS ? left : BLOCK_TOKENS;
  int64_t count = 1;
  while (count < most && rows->pages_after[first + count - 1] < 0) count++;
  return (Block){
      .first = first,
      .count = count,
      .page = rows->pages[row],
      .snapshot = rows->pages_after[first + count - 1],
      .is_new = done == 0 && rows->are_new[row],
  };
}

typedef struct {
  const float *weight, *bias;  // [taps][channels], [channels] or null
  float *tail;                 // [P][taps - 1][channels]
  int64_t channels;
  int taps;
} Convolution;

// Queries, keys, values, gates z, b and a: the columns of a projection. Each value head has one a and one decay, or, with
// has_key_decays, one per key; its gate is then a sigmoid.
typedef struct {
  StateRows rows;
  Convolution convolution;
  const float *projected;                // [T][width]
  const float *a_log, *dt_bias, *norm;   // [value heads], [decays], [value_dim]
  float *state;                          // [P][value heads][tiles][key_dim][16]
  float *out;                            // [T][value heads][value_dim]
  int64_t width, key_heads, value_heads, key_dim, value_dim;
  int has_key_decays;
  float eps;
} DeltaNet;

// Gates z, x, B, C and dt: the columns of a projection.
typedef struct {
  StateRows rows;
  Convolution convolution;
  const float *projected;                    // [T][width]
  const float *a_log, *dt_bias, *d, *norm;   // [heads] x 3, [heads * head_dim] or null: no norm
  float *state;                              // [P][heads][tiles][state_dim][16]
  float *shared;                             // [groups][T][2][whole groups of state_dim]: B and C after the convolution
  float *out;                                // [T][heads][head_dim]
  int64_t width, num_tokens, heads, head_dim, groups, state_dim, norm_groups;
  float eps, least, most;
  int is_before_gate, is_gated;
} Mamba2;

// B, C and x: the columns of a projection.
typedef struct {
  StateRows rows;
  Convolution convolution;
  const float *projected;  // [T][3 * channels]
  float *out;              // [T][channels]
} ShortConvolution;

// The functions that exist once for each instruction set.

// Computes a row of a key head and its value heads; scratch holds `delta_net_scratch` numbers.
typedef void (*ComputeDeltaNet)(const DeltaNet *, int64_t row, int64_t key_head, float *scratch);
void avx512_delta_net(const DeltaNet *, int64_t row, int64_t key_head, float *scratch);
void avx2_delta_net(const DeltaNet *, int64_t row, int64_t key_head, float *scratch);

typedef struct {
  // Convolves 16 channels of B or C for a row: the group is counted within [groups][2][padded state_dim / 16].
  void (*convolve_shared)(const Mamba2 *, int64_t row, int64_t group);
  // Computes a row of a head, after its B and C; scratch holds `mamba2_scratch` numbers.
  void (*compute_head)(const Mamba2 *, int64_t row, int64_t head, float *scratch);
  // Normalizes the results of tokens first to last - 1.
  void (*normalize)(const Mamba2 *, int64_t first, int64_t last);
} Mamba2Kernels;
extern const Mamba2Kernels avx512_mamba2, avx2_mamba2;

// Computes channels first to last - 1 of a row.
typedef void (*ComputeShortConvolution)(const ShortConvolution *, int64_t row, int64_t first, int64_t last);
void avx512_short_convolution(const ShortConvolution *, int64_t row, int64_t first, int64_t last);
void avx2_short_convolution(const ShortConvolution *, int64_t row, int64_t first, int64_t last);

static inline int64_t num_decays(const DeltaNet *d) { return d->value_heads * (d->has_key_decays ? d->key_dim : 1); }
static inline int64_t delta_net_scratch(const DeltaNet *d) {
  const int64_t keys = whole_groups(d->key_dim), values = whole_groups(d->value_dim);
  const int64_t decays = d->has_key_decays ? 2 * keys : 1;
  return BLOCK_TOKENS * (2 * keys + d->value_heads / d->key_heads * values + values + 1 + decays);
}
static inline int64_t mamba2_scratch(const Mamba2 *m) { return BLOCK_TOKENS * (2 * whole_groups(m->head_dim) + 2); }
