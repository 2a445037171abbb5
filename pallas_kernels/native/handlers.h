// What the handlers share: checks of operands, the choice of an instruction set, and memory that a thread keeps.
#pragma once
#include <stdatomic.h>
#include <stdlib.h>

#include "attention.h"
#include "ffi.h"
#include "threads.h"

#define EXPORT __attribute__((visibility("default")))

// Those of `jaxserve_instructions` that are not above the limit.
int instructions_in_use(void);

// What can attend over pools of such pages: a vector of tokens must lie in one. The choice follows the CPU, the limit and
// sizes, never a timing.
const Kernels *choose_kernels(int page_size, int width, int is_bf16);

// Buffers of a thread, kept for its next call: of a caller, of one that splits tiles, of one whose rows share their
// beginning, of whoever computes a piece.
typedef enum { OF_CALL, OF_SPLIT, OF_SHARED, OF_JOB, NUM_BUFFERS } OwnBuffer;

// A thread's buffer with at least this size, on a cache line; null where there is no memory.
void *reserve(OwnBuffer which, size_t size);

static inline size_t whole_lines(size_t size) { return (size + 63) & ~(size_t)63; }

int64_t elements(const FfiBuffer *buffer);
int is_s32(const FfiBuffer *buffer, int64_t rank, int64_t first);

// Two pools of pages that hold num_kv_heads * width * page_size numbers each.
int are_pools(const FfiBuffer *keys, const FfiBuffer *values, int64_t heads, int64_t width, int64_t page_size);
