// The structs of XLA's FFI (xla/ffi/api/c_api.h, API 0.3) that handlers here read, so that building needs no jaxlib.
//
// Fields are only ever added at the end of a struct, and XLA accepts handlers of older minor versions: what is built with
// these runs on jaxlib 0.10.2 and newer.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { FFI_API_MAJOR = 0, FFI_API_MINOR = 3, FFI_EXTENSION_METADATA = 1, FFI_INVALID_ARGUMENT = 3 };
typedef enum { FFI_S32 = 4, FFI_S64 = 5, FFI_U8 = 6, FFI_F32 = 11, FFI_BF16 = 16 } FfiDtype;

typedef struct FfiExtension {
  size_t struct_size;
  int type;
  struct FfiExtension *next;
} FfiExtension;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  int major_version, minor_version;
} FfiVersion;

typedef struct {
  size_t struct_size;
  FfiVersion version;
  uint32_t traits;
} FfiMetadata;

typedef struct {
  FfiExtension base;
  FfiMetadata *metadata;
} FfiMetadataExtension;

typedef struct FfiError FfiError;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  const char *message;
  int code;
} FfiErrorArgs;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  FfiVersion version;
  const void *internal;
  FfiError *(*create_error)(FfiErrorArgs *);
} FfiApi;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  int dtype;
  void *data;
  int64_t rank;
  int64_t *dims;
} FfiBuffer;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  int64_t size;
  int *types;
  void **items;
} FfiList;

typedef struct {
  const char *text;
  size_t length;
} FfiText;

typedef struct {
  int dtype;
  void *value;
} FfiScalar;

typedef struct {
  int dtype;
  size_t size;
  void *values;
} FfiArray;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  int64_t size;
  int *types;
  FfiText **names;
  void **items;
} FfiAttributes;

typedef struct {
  size_t struct_size;
  FfiExtension *extensions;
  const FfiApi *api;
  void *context;
  int stage;
  FfiList arguments;
  FfiList results;
  FfiAttributes attributes;
} FfiFrame;

static inline FfiError *ffi_error(FfiFrame *frame, const char *message) {
  FfiErrorArgs args = {sizeof(FfiErrorArgs), 0, message, FFI_INVALID_ARGUMENT};
  return frame->api->create_error(&args);
}

// Handles XLA's version query when a handler is registered; returns whether the call was that query.
static inline int ffi_answered_metadata(FfiFrame *frame) {
  FfiExtension *extension = frame->extensions;
  if (!extension || extension->type != FFI_EXTENSION_METADATA) return 0;
  FfiMetadata *metadata = ((FfiMetadataExtension *)extension)->metadata;
  metadata->version.major_version = FFI_API_MAJOR;
  metadata->version.minor_version = FFI_API_MINOR;
  metadata->traits = 0;
  return 1;
}

static inline FfiBuffer *ffi_argument(FfiFrame *frame, int i) { return (FfiBuffer *)frame->arguments.items[i]; }
static inline FfiBuffer *ffi_result(FfiFrame *frame, int i) { return (FfiBuffer *)frame->results.items[i]; }

static inline const void *ffi_attribute(FfiFrame *frame, const char *name) {
  for (int64_t i = 0; i < frame->attributes.size; i++) {
    FfiText *found = frame->attributes.names[i];
    if (found->length == strlen(name) && !memcmp(found->text, name, found->length)) return frame->attributes.items[i];
  }
  return 0;
}
static inline const void *ffi_scalar(FfiFrame *frame, const char *name) {
  return ((const FfiScalar *)ffi_attribute(frame, name))->value;
}
static inline int32_t ffi_int(FfiFrame *frame, const char *name) { return *(const int32_t *)ffi_scalar(frame, name); }
static inline float ffi_float(FfiFrame *frame, const char *name) { return *(const float *)ffi_scalar(frame, name); }
static inline const FfiArray *ffi_array(FfiFrame *frame, const char *name) { return ffi_attribute(frame, name); }
