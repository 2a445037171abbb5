// Decodes quantized weights with the newest instructions in use; called through ctypes, from as many threads as wanted.
#include "dequantize.h"
#include "handlers.h"

EXPORT void jaxserve_dequantize(const Dequantize *job) {
  (instructions_in_use() >= HAS_AVX512 ? avx512_dequantize : avx2_dequantize)(job);
}
