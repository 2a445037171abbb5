// The lowest score of a row that min-p, top-k and top-p keep.
#pragma once
#include <stdint.h>

typedef struct {
  int32_t top_k;       // 0: all
  float top_p, min_p;  // 1: all; 0: all
} Cuts;

enum { BINS = 4096 };

typedef struct {
  float score, weight;
} Candidate;

// The function exists once for each instruction set. Scratch: masses [BINS], candidates [count].
typedef float (*FindFloor)(const float *scores, int64_t count, Cuts cuts, double *masses, Candidate *candidates);

float avx512_floor(const float *scores, int64_t count, Cuts cuts, double *masses, Candidate *candidates);
float avx2_floor(const float *scores, int64_t count, Cuts cuts, double *masses, Candidate *candidates);
