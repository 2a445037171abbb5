// The library's version, its choice of an instruction set, and what all handlers share.
#include "handlers.h"

#include <cpuid.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

// Python refuses a library of another version, and puts the number into the names of its targets: programs that were
// compiled for older handlers must not find these. Raise it when handlers, arguments, attributes or layouts change.
enum { VERSION = 24 };
EXPORT int jaxserve_version(void) { return VERSION; }

// Whether the CPU multiplies bfloat16 on tiles, and the system lets this process.
static int has_amx(void) {
  enum { LEAF = 7, BF16 = 1 << 22, TILE = 1 << 24, ASK_FOR_STATE = 0x1023, TILE_DATA = 18 };
  unsigned a, b, c, d;
  if (!__get_cpuid_count(LEAF, 0, &a, &b, &c, &d) || !(d & BF16) || !(d & TILE)) return 0;
  return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}

int has_amx_int8(void) {
  enum { LEAF = 7, INT8 = 1 << 25 };
  static _Atomic int found = -1;
  unsigned a, b, c, d;
  if (found < 0) found = __get_cpuid_count(LEAF, 0, &a, &b, &c, &d) && (d & INT8);
  return found;
}

// Whether products of bfloat16 are faster than widening it: AMD's do twice the work of a product of floats, Intel's half.
static int has_fast_bf16(void) { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd"); }

// The latest of the sets of instructions, HAS_NONE if nothing here runs.
EXPORT int jaxserve_instructions(void) {
  static _Atomic int found = -1;
  if (found >= 0) return found;
  __builtin_cpu_init();
  const int has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const int has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  if (has_vnni && __builtin_cpu_supports("avx512bf16") && has_amx()) found = HAS_AMX;
  else if (has_vnni) found = has_fast_bf16() ? HAS_AVX512BF16 : HAS_AVX512VNNI;
  else if (has_avx512) found = HAS_AVX512;
  else found = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? HAS_AVX2 : HAS_NONE;
  return found;
}
EXPORT void jaxserve_set_threads(int count) { set_num_threads(count); }
EXPORT int jaxserve_threads(void) { return num_threads(); }

// Machines with newer instructions and without them give the same bits if both are limited to those they share.
static _Atomic int most_instructions = HAS_AMX;
EXPORT void jaxserve_limit_instructions(int most) { most_instructions = most; }

int instructions_in_use(void) {
  const int found = jaxserve_instructions(), most = most_instructions;
  return found < most ? found : most;
}

const Kernels *choose_kernels(int page_size, int width, int is_bf16) {
  if (instructions_in_use() < HAS_AVX512 || page_size % avx512_kernels.lanes != 0) return &avx2_kernels;
  return instructions_in_use() >= HAS_AMX && is_bf16 && width % 32 == 0 ? &amx_kernels : &avx512_kernels;
}

typedef struct {
  char *memory;
  size_t size;
} Buffer;

static _Thread_local struct {
  Buffer buffers[NUM_BUFFERS];
  int is_known;
} own;
static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static void free_own(void *unused) {
  (void)unused;
  for (int i = 0; i < NUM_BUFFERS; i++) free(own.buffers[i].memory);
}
static void make_own_key(void) { pthread_key_create(&own_key, free_own); }

void *reserve(OwnBuffer which, size_t size) {
  if (!own.is_known) {
    pthread_once(&own_once, make_own_key);
    pthread_setspecific(own_key, &own);
    own.is_known = 1;
  }
  Buffer *buffer = &own.buffers[which];
  if (buffer->size < size) {
    free(buffer->memory);
    size = (size + 4095) & ~(size_t)4095;
    buffer->memory = aligned_alloc(64, size);
    buffer->size = buffer->memory ? size : 0;
  }
  return buffer->memory;
}

int64_t elements(const FfiBuffer *buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer->rank; i++) count *= buffer->dims[i];
  return count;
}

int are_pools(const FfiBuffer *keys, const FfiBuffer *values, int64_t heads, int64_t width, int64_t page_size) {
  return (keys->dtype == FFI_F32 || keys->dtype == FFI_BF16) && values->dtype == keys->dtype && keys->rank >= 1 &&
         values->rank >= 1 && keys->dims[0] == values->dims[0] && page_size > 0 && page_size % avx2_kernels.lanes == 0 &&
         (keys->dtype == FFI_F32 || width % 2 == 0) &&
         elements(keys) == keys->dims[0] * heads * width * page_size && elements(values) == elements(keys);
}

int is_latent_pool(const FfiBuffer *pool, int64_t width, int64_t page_size) {
  return are_pools(pool, pool, 1, width, page_size) && width <= MOST_LATENT;
}

int is_s32(const FfiBuffer *buffer, int64_t rank, int64_t first) {
  return buffer->dtype == FFI_S32 && buffer->rank == rank && (rank == 0 || buffer->dims[0] == first);
}
