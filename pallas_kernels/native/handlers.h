// What the handlers share: checks of operands, the choice of an instruction set, and memory that a thread keeps.
#pragma once
#include <stdatomic.h>
#include <stdlib.h>

#include "attention.h"
#include "ffi.h"
#include "threads.h"

#define EXPORT __attribute__((visibility("default")))

// Sets of instructions; each includes those before it, on the CPUs where it is used.
enum { HAS_NONE, HAS_AVX2, HAS_AVX512, HAS_AVX512VNNI, HAS_AVX512BF16, HAS_AMX };

// The latest of the CPU's that is not above the limit.
int instructions_in_use(void);

// Whether tiles multiply int8 too.
int has_amx_int8(void);

// What can attend over pools of such pages: a vector of tokens must lie in one. The choice follows the CPU, the limit and
// sizes, never a timing.
const Kernels *choose_kernels(int page_size, int width, int is_bf16);

// Buffers of a thread, kept for its next call: of a caller, of one that splits tiles, of one whose rows share their
// beginning, of one that multiplies by several experts, for any thread that computes a piece, and for the values that it
// makes of latents.
typedef enum { OF_CALL, OF_SPLIT, OF_SHARED, OF_EXPERTS, OF_JOB, OF_VALUES, NUM_BUFFERS } OwnBuffer;

// A thread's buffer with at least this size, on a cache line; null where there is no memory.
void *reserve(OwnBuffer which, size_t size);

static inline size_t whole_lines(size_t size) { return (size + 63) & ~(size_t)63; }

int64_t elements(const FfiBuffer *buffer);
int is_s32(const FfiBuffer *buffer, int64_t rank, int64_t first);

// Bytes of a page in one pool, and where the pages of a layer begin in it: at page `first`.
static inline size_t page_bytes(const FfiBuffer *pool) {
  return (size_t)(elements(pool) / pool->dims[0]) * (pool->dtype == FFI_BF16 ? 2 : 4);
}
static inline void *pages_from(const FfiBuffer *pool, const FfiBuffer *first) {
  return (char *)pool->data + page_bytes(pool) * *(const int32_t *)first->data;
}

// Whether a scalar names a page of both pools.
static inline int is_first_page(const FfiBuffer *first, const FfiBuffer *pool) {
  return is_s32(first, 0, 0) && *(const int32_t *)first->data >= 0 && *(const int32_t *)first->data < pool->dims[0];
}

// A pool of pages that hold width * page_size numbers each.
int is_latent_pool(const FfiBuffer *pool, int64_t width, int64_t page_size);

// Two pools of pages that hold num_kv_heads * width * page_size numbers each.
int are_pools(const FfiBuffer *keys, const FfiBuffer *values, int64_t heads, int64_t width, int64_t page_size);
