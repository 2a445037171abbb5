// The lowest score that min-p, top-k and top-p keep; compiled once for AVX-512 and once for AVX2.
//
// Tokens are counted, or their weights added up, in bins by how far their score is below the largest. Only the bin in which
// the wanted mass is reached is sorted.
#include "truncation.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "argmax.h"
#include "vectors.h"

static const float BINS_PER_UNIT = 64;

typedef struct {
  const float *scores;
  int64_t count;
  float best, floor;  // scores below the floor do not count
  int is_weighted;
} Row;

// The bins of a vector of scores, -1 for those that do not count.
INLINE Vec bins_at(const Row *row, int64_t i, Vec *score) {
  const Mask some = vec_lanes(0, row->count - i < LANES ? (int)(row->count - i) : LANES);
  *score = vec_pick(some, vec_load_some(some, row->scores + i), vec_set(-__builtin_inff()));
  const Vec distance = vec_mul(vec_sub(vec_set(row->best), *score), vec_set(BINS_PER_UNIT));
  const Vec bin = vec_min(distance, vec_set(BINS - 1));
  return vec_pick(vec_below(*score, vec_set(row->floor)), vec_set(-1), bin);
}

INLINE Vec weights_of(const Row *row, Vec score) {
  return row->is_weighted ? vec_exp(vec_sub(score, vec_set(row->best))) : vec_set(1);
}

static int is_higher(const void *a, const void *b) {
  const float first = ((const Candidate *)a)->score, second = ((const Candidate *)b)->score;
  return (first < second) - (first > second);
}

// The score at which tokens, or weights, from the largest down reach `wanted`: a number of tokens, or a share of all weight.
// It is at least the floor.
static float raised(const Row *row, double wanted, double *masses, Candidate *candidates) {
  float bins[LANES], weights[LANES], scores[LANES];
  Vec score;
  memset(masses, 0, BINS * sizeof(double));
  for (int64_t i = 0; i < row->count; i += LANES) {
    vec_store(bins, bins_at(row, i, &score));
    vec_store(weights, weights_of(row, score));
    for (int j = 0; j < LANES; j++)
      if (bins[j] >= 0) masses[(int)bins[j]] += weights[j];
  }
  double total = 0, mass = 0;
  for (int b = 0; b < BINS; b++) total += masses[b];
  if (row->is_weighted) wanted *= total;
  if (!(wanted < total)) return row->floor;
  int bin = 0;
  while (bin < BINS - 1 && mass + masses[bin] < wanted) mass += masses[bin++];
  int64_t num_candidates = 0;
  for (int64_t i = 0; i < row->count; i += LANES) {
    const Vec found = bins_at(row, i, &score), begin = vec_set((float)bin), end = vec_set((float)bin + 1);
    if (!mask_any(mask_but(vec_below(found, end), vec_below(found, begin)))) continue;
    vec_store(bins, found);
    vec_store(scores, score);
    vec_store(weights, weights_of(row, score));
    for (int j = 0; j < LANES; j++)
      if ((int)bins[j] == bin) candidates[num_candidates++] = (Candidate){scores[j], weights[j]};
  }
  qsort(candidates, (size_t)num_candidates, sizeof(Candidate), is_higher);
  float found = row->floor;
  for (int64_t i = 0; i < num_candidates; i++) {
    found = candidates[i].score;
    mass += candidates[i].weight;
    if (mass >= wanted) break;
  }
  return found > row->floor ? found : row->floor;
}

static float find_floor(const float *scores, int64_t count, Cuts cuts, double *masses, Candidate *candidates,
                        FindLargest find_largest) {
  Row row = {.scores = scores, .count = count, .floor = -FLT_MAX};
  if (cuts.top_k <= 0 && !(cuts.top_p < 1) && !(cuts.min_p > 0)) return row.floor;
  row.best = find_largest(scores, count).largest;
  if (cuts.min_p > 0) row.floor = row.best + logf(cuts.min_p > 1e-30f ? cuts.min_p : 1e-30f);
  if (cuts.top_k > 0) row.floor = raised(&row, cuts.top_k, masses, candidates);
  row.is_weighted = 1;
  if (cuts.top_p < 1) row.floor = raised(&row, cuts.top_p, masses, candidates);
  return row.floor;
}

#ifdef __AVX512F__
float avx512_floor(const float *scores, int64_t count, Cuts cuts, double *masses, Candidate *candidates) {
  return find_floor(scores, count, cuts, masses, candidates, avx512_largest);
}
#else
float avx2_floor(const float *scores, int64_t count, Cuts cuts, double *masses, Candidate *candidates) {
  return find_floor(scores, count, cuts, masses, candidates, avx2_largest);
}
#endif
