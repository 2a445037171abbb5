// A call of a handler in a file: the attributes, and every buffer with its bytes.
#pragma once
#include <stdint.h>

#include "../../../pallas_kernels/native/ffi.h"

// Attributes and stages of XLA's FFI (XLA_FFI_AttrType, XLA_FFI_ExecutionStage).
enum { ATTRIBUTE_ARRAY = 1, ATTRIBUTE_SCALAR = 3, STAGE_EXECUTE = 3, LONGEST_NAME = 64, MOST_ITEMS = 64, MOST_RANK = 8 };

#define HANDLERS(X)                                                                                          \
  X(attend) X(attend_latents) X(write_kv) X(write_latents) X(qkv_write) X(copy_pages) X(linear)              \
  X(grouped_matmul) X(argmax) X(truncation) X(quantized_linear) X(quantized_grouped_matmul) X(quantized_rows) \
  X(delta_net) X(mamba2) X(short_convolution)

typedef struct {
  int32_t dtype, rank;
  int64_t dims[MOST_RANK];
  int64_t same_as;  // of a result: the argument whose memory it has, or -1
} SavedBuffer;

typedef struct {
  char name[LONGEST_NAME];
  int32_t type, dtype;
  int64_t count;
} SavedAttribute;

typedef struct {
  char handler[LONGEST_NAME];
  int32_t most_instructions, num_arguments, num_results, num_attributes;
} SavedCall;

// Bytes of an element; 0 for a type that no handler takes.
static inline size_t item_bytes(int dtype) {
  switch (dtype) {
    case 1: case 2: case 6: return 1;   // PRED, S8, U8
    case 3: case 7: case 10: case 16: return 2;  // S16, U16, F16, BF16
    case 4: case 8: case 11: return 4;  // S32, U32, F32
    case 5: case 9: case 12: return 8;  // S64, U64, F64
    default: return 0;
  }
}

static inline size_t saved_bytes(const SavedBuffer *buffer) {
  size_t bytes = item_bytes(buffer->dtype);
  for (int i = 0; i < buffer->rank; i++) bytes *= (size_t)buffer->dims[i];
  return bytes;
}
