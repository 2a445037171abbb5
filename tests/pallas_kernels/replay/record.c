// A library that stands before that of the kernels: every call of a handler is written to a file, then made.
//
// JAXSERVE_CALLS names the file, JAXSERVE_INSTRUCTIONS the newest instructions that are in use, as a number.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "calls.h"

typedef FfiError *(*Handler)(FfiFrame *);

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static FILE *calls;

static void fail(const char *why) {
  fprintf(stderr, "record.c: %s\n", why);
  abort();
}

static void put(const void *data, size_t bytes) {
  if (bytes && fwrite(data, bytes, 1, calls) != 1) fail("the file of calls cannot be written");
}

static void put_buffer(const FfiBuffer *buffer, int64_t same_as) {
  SavedBuffer saved = {buffer->dtype, (int32_t)buffer->rank, {0}, same_as};
  if (buffer->rank > MOST_RANK || !item_bytes(buffer->dtype)) fail("a buffer has too many axes or another dtype");
  memcpy(saved.dims, buffer->dims, sizeof(int64_t) * (size_t)buffer->rank);
  put(&saved, sizeof saved);
}

static void put_attribute(FfiFrame *frame, int i) {
  const FfiText *name = frame->attributes.names[i];
  const int type = frame->attributes.types[i];
  SavedAttribute saved = {.type = type, .count = 1};
  if (name->length >= LONGEST_NAME) fail("a name is too long");
  memcpy(saved.name, name->text, name->length);
  const void *values;
  if (type == ATTRIBUTE_ARRAY) {
    const FfiArray *array = frame->attributes.items[i];
    saved.dtype = array->dtype, saved.count = (int64_t)array->size, values = array->values;
  } else if (type == ATTRIBUTE_SCALAR) {
    const FfiScalar *scalar = frame->attributes.items[i];
    saved.dtype = scalar->dtype, values = scalar->value;
  } else {
    fail("an attribute is neither a number nor an array");
    return;
  }
  put(&saved, sizeof saved);
  put(values, item_bytes(saved.dtype) * (size_t)saved.count);
}

static void put_call(const char *name, FfiFrame *frame) {
  SavedCall call = {.num_arguments = (int32_t)frame->arguments.size, .num_results = (int32_t)frame->results.size};
  call.num_attributes = (int32_t)frame->attributes.size;
  call.most_instructions = atoi(getenv("JAXSERVE_INSTRUCTIONS"));
  snprintf(call.handler, LONGEST_NAME, "%s", name);
  put(&call, sizeof call);
  for (int i = 0; i < call.num_arguments; i++) put_buffer(ffi_argument(frame, i), -1);
  for (int i = 0; i < call.num_results; i++) {
    int64_t same_as = -1;
    for (int j = 0; j < call.num_arguments; j++)
      if (ffi_argument(frame, j)->data == ffi_result(frame, i)->data) same_as = j;
    put_buffer(ffi_result(frame, i), same_as);
  }
  for (int i = 0; i < call.num_attributes; i++) put_attribute(frame, i);
  for (int i = 0; i < call.num_arguments; i++) {
    const FfiBuffer *buffer = ffi_argument(frame, i);
    size_t bytes = item_bytes(buffer->dtype);
    for (int j = 0; j < buffer->rank; j++) bytes *= (size_t)buffer->dims[j];
    put(buffer->data, bytes);
  }
}

static FfiError *record(const char *name, FfiFrame *frame) {
  char symbol[LONGEST_NAME + 16];
  snprintf(symbol, sizeof symbol, "jaxserve_%s", name);
  Handler next = (Handler)dlsym(RTLD_NEXT, symbol);
  if (!next) fail("the library of kernels lacks a handler");
  if (!frame->extensions && frame->stage == STAGE_EXECUTE) {
    pthread_mutex_lock(&one_at_a_time);
    if (!calls) calls = fopen(getenv("JAXSERVE_CALLS"), "ab");
    if (!calls) fail("the file of calls cannot be opened");
    put_call(name, frame);
    fflush(calls);
    pthread_mutex_unlock(&one_at_a_time);
  }
  return next(frame);
}

#define DEFINE(name)                                                                     \
  __attribute__((visibility("default"))) FfiError *jaxserve_##name(FfiFrame *frame) { \
    return record(#name, frame);                                                          \
  }
HANDLERS(DEFINE)
