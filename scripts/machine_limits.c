// Measures what bounds a product on this machine: the bytes that threads read per second, and the clock while they compute.
//
//   cc -O2 -mavx2 -pthread machine_limits.c && ./a.out THREADS MEGABYTES
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS = 24, CHAIN = 64, MOST_STREAMS = 4, STREAM = 17 * 4096 };
static const int64_t STEPS = 300000;

typedef struct {
  const char *begin;
  int64_t bytes;
  int streams;  // stretches of STREAM bytes that are read side by side: several come faster, up to some number
  double seconds_of_clock;
  uint64_t found;  // so that nothing is left out
} Part;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *read_all(void *context) {
  Part *part = context;
  const int64_t stretch = (int64_t)part->streams * STREAM;
  __m256i sum = _mm256_setzero_si256(), other = sum;
  for (const char *from = part->begin; from + stretch <= part->begin + part->bytes; from += stretch)
    for (int64_t i = 0; i < STREAM; i += 64)
      for (int s = 0; s < part->streams; s++) {
        const char *at = from + s * STREAM + i;
        _mm_prefetch(at + 4096, _MM_HINT_T0);
        sum = _mm256_add_epi64(sum, _mm256_loadu_si256((const __m256i *)at));
        other = _mm256_add_epi64(other, _mm256_loadu_si256((const __m256i *)(at + 32)));
      }
  part->found += (uint64_t)_mm256_extract_epi64(_mm256_add_epi64(sum, other), 0);
  return 0;
}

// Each addition waits for the one before: one cycle.
static void *count_cycles(void *context) {
  Part *part = context;
  uint64_t value = part->found;
  const double start = now();
  for (int64_t i = 0; i < STEPS; i++)
    for (int j = 0; j < CHAIN; j++) __asm__ volatile("add $1, %0" : "+r"(value));
  part->seconds_of_clock = now() - start;
  part->found = value;
  return 0;
}

static double in_threads(void *(*work)(void *), Part *parts, int count) {
  pthread_t threads[64];
  const double start = now();
  for (int i = 1; i < count; i++) pthread_create(&threads[i], 0, work, &parts[i]);
  work(&parts[0]);
  for (int i = 1; i < count; i++) pthread_join(threads[i], 0);
  return now() - start;
}

int main(int argc, char **argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 1;
  const int64_t bytes = (argc > 2 ? atoll(argv[2]) : 512) << 20;
  if (count < 1 || count > 64 || bytes < 64 * count) return 1;
  char *memory = malloc((size_t)bytes + 8192);
  if (!memory) return 1;
  memset(memory, 1, (size_t)bytes + 8192);
  Part parts[64];
  for (int i = 0; i < count; i++) parts[i] = (Part){memory + bytes / count / 64 * 64 * i, bytes / count / 64 * 64, 1, 0, 0};
  double best = 1e9, clock = 1e9;
  for (int round = 0; round < ROUNDS; round++) {
    for (int i = 0; i < count; i++) parts[i].streams = 1 + round % MOST_STREAMS;
    const double taken = in_threads(read_all, parts, count);
    if (taken < best) best = taken;
    in_threads(count_cycles, parts, count);
    for (int i = 0; i < count; i++)
      if (parts[i].seconds_of_clock < clock) clock = parts[i].seconds_of_clock;
  }
  uint64_t found = 0;
  for (int i = 0; i < count; i++) found += parts[i].found;
  printf("{\"read_gb_s\": %.2f, \"clock_ghz\": %.3f, \"sum\": %d}\n", (double)bytes / best / 1e9,
         (double)(STEPS * CHAIN) / clock / 1e9, (int)(found & 1));
  free(memory);
  return 0;
}
