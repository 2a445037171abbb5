// Makes the calls of files again, with every buffer in memory of its own and exactly as long as it is: built with the
// kernels under sanitizers. With one thread and with several, results must have the same bits.
//
//   replay THREADS FILE ...
#include <stdio.h>
#include <stdlib.h>

#include "calls.h"

void jaxserve_set_threads(int count);
void jaxserve_limit_instructions(int most);
#define DECLARE(name) FfiError *jaxserve_##name(FfiFrame *frame);
HANDLERS(DECLARE)

enum { ALIGNMENT = 64, UNWRITTEN = 0xA5 };
typedef FfiError *(*Handler)(FfiFrame *);
static const struct {
  const char *name;
  Handler run;
} handlers[] = {
#define ROW(name) {#name, jaxserve_##name},
    HANDLERS(ROW)};

static void fail(const char *what, const char *why) {
  fprintf(stderr, "replay: %s: %s\n", what, why);
  exit(3);
}

static FfiError *create_error(FfiErrorArgs *args) {
  fail("a handler refuses its call", args->message);
  return 0;
}

static void get(FILE *file, void *data, size_t bytes) {
  if (bytes && fread(data, bytes, 1, file) != 1) fail("the file of calls", "ends early");
}

static void *own_memory(size_t bytes) {
  void *found = 0;
  if (posix_memalign(&found, ALIGNMENT, bytes ? bytes : 1)) fail("memory", "none left");
  return found;
}

typedef struct {
  SavedCall saved;
  SavedBuffer arguments[MOST_ITEMS], results[MOST_ITEMS];
  SavedAttribute attributes[MOST_ITEMS];
  void *values[MOST_ITEMS];  // of attributes
  void *data[MOST_ITEMS];    // of arguments
} Call;

static int read_call(FILE *file, Call *call) {
  if (fread(&call->saved, sizeof call->saved, 1, file) != 1) return 0;
  const SavedCall *saved = &call->saved;
  if (saved->num_arguments > MOST_ITEMS || saved->num_results > MOST_ITEMS || saved->num_attributes > MOST_ITEMS)
    fail(saved->handler, "has too many buffers or attributes");
  get(file, call->arguments, sizeof(SavedBuffer) * (size_t)saved->num_arguments);
  get(file, call->results, sizeof(SavedBuffer) * (size_t)saved->num_results);
  for (int i = 0; i < saved->num_attributes; i++) {
    get(file, &call->attributes[i], sizeof(SavedAttribute));
    const size_t bytes = item_bytes(call->attributes[i].dtype) * (size_t)call->attributes[i].count;
    get(file, call->values[i] = own_memory(bytes), bytes);
  }
  for (int i = 0; i < saved->num_arguments; i++) {
    const size_t bytes = saved_bytes(&call->arguments[i]);
    get(file, call->data[i] = own_memory(bytes), bytes);
  }
  return 1;
}

static void free_call(Call *call) {
  for (int i = 0; i < call->saved.num_attributes; i++) free(call->values[i]);
  for (int i = 0; i < call->saved.num_arguments; i++) free(call->data[i]);
}

// Makes a call with copies of its arguments; `found` gets the memory of every result, which its caller frees.
static void run_call(const Call *call, Handler run, int num_threads, void **found) {
  const int num_arguments = call->saved.num_arguments, num_results = call->saved.num_results;
  FfiBuffer buffers[2 * MOST_ITEMS];
  void *items[2 * MOST_ITEMS], *attributes[MOST_ITEMS], *copies[MOST_ITEMS];
  int is_result[MOST_ITEMS] = {0}, types[MOST_ITEMS];
  FfiText texts[MOST_ITEMS], *names[MOST_ITEMS];
  FfiScalar scalars[MOST_ITEMS];
  FfiArray arrays[MOST_ITEMS];
  for (int i = 0; i < num_arguments + num_results; i++) {
    const SavedBuffer *saved = i < num_arguments ? &call->arguments[i] : &call->results[i - num_arguments];
    const size_t bytes = saved_bytes(saved);
    void *memory;
    if (i < num_arguments) {
      memory = copies[i] = own_memory(bytes);
      memcpy(memory, call->data[i], bytes);
    } else if (saved->same_as >= 0) {
      memory = found[i - num_arguments] = copies[saved->same_as];
      is_result[saved->same_as] = 1;
    } else {
      memory = found[i - num_arguments] = own_memory(bytes);
      memset(memory, UNWRITTEN, bytes);
    }
    buffers[i] = (FfiBuffer){sizeof(FfiBuffer), 0, saved->dtype, memory, saved->rank, (int64_t *)saved->dims};
    items[i] = &buffers[i];
  }
  for (int i = 0; i < call->saved.num_attributes; i++) {
    const SavedAttribute *saved = &call->attributes[i];
    texts[i] = (FfiText){saved->name, strlen(saved->name)}, names[i] = &texts[i], types[i] = saved->type;
    scalars[i] = (FfiScalar){saved->dtype, call->values[i]};
    arrays[i] = (FfiArray){saved->dtype, (size_t)saved->count, call->values[i]};
    attributes[i] = saved->type == ATTRIBUTE_ARRAY ? (void *)&arrays[i] : (void *)&scalars[i];
  }
  const FfiApi api = {.struct_size = sizeof(FfiApi), .create_error = create_error};
  FfiFrame frame = {
      .struct_size = sizeof(FfiFrame),
      .api = &api,
      .stage = STAGE_EXECUTE,
      .arguments = {sizeof(FfiList), 0, num_arguments, 0, items},
      .results = {sizeof(FfiList), 0, num_results, 0, items + num_arguments},
      .attributes = {sizeof(FfiAttributes), 0, call->saved.num_attributes, types, names, attributes},
  };
  jaxserve_limit_instructions(call->saved.most_instructions);
  jaxserve_set_threads(num_threads);
  run(&frame);
  for (int i = 0; i < num_arguments; i++)
    if (!is_result[i]) free(copies[i]);
}

static void check_call(const Call *call, int num_threads) {
  Handler run = 0;
  for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++)
    if (!strcmp(handlers[i].name, call->saved.handler)) run = handlers[i].run;
  if (!run) fail(call->saved.handler, "is not a handler");
  void *alone[MOST_ITEMS], *together[MOST_ITEMS];
  run_call(call, run, 1, alone);
  run_call(call, run, num_threads, together);
  for (int i = 0; i < call->saved.num_results; i++) {
    if (memcmp(alone[i], together[i], saved_bytes(&call->results[i])))
      fail(call->saved.handler, "threads change its results");
    free(alone[i]);
    free(together[i]);
  }
}

int main(int count, char **words) {
  if (count < 3) fail("usage", "replay THREADS FILE ...");
  const int num_threads = atoi(words[1]);
  int num_calls[sizeof handlers / sizeof *handlers] = {0};
  static Call call;
  for (int i = 2; i < count; i++) {
    FILE *file = fopen(words[i], "rb");
    if (!file) fail(words[i], "cannot be opened");
    while (read_call(file, &call)) {
      check_call(&call, num_threads);
      for (size_t j = 0; j < sizeof handlers / sizeof *handlers; j++)
        num_calls[j] += !strcmp(handlers[j].name, call.saved.handler);
      free_call(&call);
    }
    fclose(file);
  }
  for (size_t j = 0; j < sizeof handlers / sizeof *handlers; j++) printf("%s %d\n", handlers[j].name, num_calls[j]);
  return 0;
}
