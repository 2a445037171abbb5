// Reads codes of quantized weights as bytes, from rows of blocks that hold them in bit fields.
#pragma once
#include <string.h>

#include "dequantize.h"
#include "vectors.h"

enum { TILE_COLUMNS = 256, MOST_CODES = 256, SCRATCH_BYTES = TILE_COLUMNS + 2 * MOST_CODES };  // of a tile's codes

// Adds a bit field of bytes to as many codes.
INLINE void read_field(const uint8_t *bytes, int64_t count, int shift, uint8_t mask, int up, uint8_t *codes) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m128i *from = (const __m128i *)(bytes + i);
    __m128i *to = (__m128i *)(codes + i);
    // Bytes are shifted in pairs; the mask takes away what comes from the other byte.
    const __m128i shifted = _mm_srl_epi16(_mm_loadu_si128(from), _mm_cvtsi32_si128(shift));
    const __m128i field = _mm_and_si128(shifted, _mm_set1_epi8((char)mask));
    _mm_storeu_si128(to, _mm_or_si128(_mm_loadu_si128(to), _mm_sll_epi16(field, _mm_cvtsi32_si128(up))));
  }
  for (; i < count; i++) codes[i] |= (uint8_t)((bytes[i] >> shift & mask) << up);
}

// Adds the bits of bytes to as many codes, the lowest bit first.
static void read_bits(const uint8_t *bytes, int64_t count, int up, uint8_t *codes) {
  const uint64_t each = 0x0101010101010101;
  for (int64_t i = 0; i < count; i += 8) {
    uint64_t eight;
    memcpy(&eight, codes + i, 8);
    const uint64_t bits = bytes[i / 8] * each & 0x8040201008040201;  // each in a byte of its own
    eight |= ((bits + 0x7f * each) >> 7 & each) << up;
    memcpy(codes + i, &eight, 8);
  }
}

// Adds the halves of bytes to twice as many codes, the lower one first.
static void read_nibbles(const uint8_t *bytes, int64_t count, int up, uint8_t *codes) {
  int64_t i = 0;
  const __m128i mask = _mm_set1_epi8(15);
  for (; i + 32 <= count && !up; i += 32) {
    const __m128i pairs = _mm_loadu_si128((const __m128i *)(bytes + i / 2));
    const __m128i low = _mm_and_si128(pairs, mask), high = _mm_and_si128(_mm_srli_epi16(pairs, 4), mask);
    _mm_storeu_si128((__m128i *)(codes + i), _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128((__m128i *)(codes + i + 16), _mm_unpackhi_epi8(low, high));
  }
  for (; i < count; i++) codes[i] |= (uint8_t)((bytes[i / 2] >> i % 2 * 4 & 15) << up);
}

// Reads eight codes that run from byte to byte.
static void read_eight(const uint8_t *bytes, int64_t width, uint8_t *codes) {
  uint64_t stream = 0;
  for (int64_t i = 0; i < width; i++) stream |= (uint64_t)bytes[i] << 8 * i;
  for (int i = 0; i < 8; i++, stream >>= width) codes[i] = stream & ((1u << width) - 1);
}

// Adds fields to the codes of a block, above the bits that these have.
static void read_fields(Fields fields, const uint8_t *block, int64_t num_codes, int up, uint8_t *codes) {
  const uint8_t mask = (uint8_t)((1 << fields.width) - 1);
  const uint8_t *bytes = block + fields.offset;
  if (!fields.run) return read_eight(bytes, fields.width, codes);
  if (fields.width == 1 && fields.run == 1) return read_bits(bytes, num_codes, up, codes);
  if (fields.width == 4 && fields.run == 1) return read_nibbles(bytes, num_codes, up, codes);
  for (int64_t i = 0; i < num_codes; bytes += fields.run)
    for (int shift = 0; shift < 8; shift += (int)fields.width, i += fields.run)
      read_field(bytes, fields.run, shift, mask, up, codes + i);
}

// Returns a tile's codes of a row, which are unpacked into `scratch` if they lie in blocks.
static const uint8_t *read_codes(const Blocks *blocks, const uint8_t *row, int64_t first, int64_t count, uint8_t *scratch) {
  if (!blocks->num_codes) return row + first;
  first += blocks->first;
  const int64_t begin = first / blocks->num_codes, end = (first + count + blocks->num_codes - 1) / blocks->num_codes;
  const int64_t num_codes = (end - begin) * blocks->num_codes;
  const int64_t step = blocks->num_bytes == 1 ? num_codes : blocks->num_codes;  // bytes of codes are one large block
  const uint8_t *bytes = row + begin * blocks->num_bytes;
  memset(scratch, 0, (size_t)num_codes);
  for (int64_t at = 0; at < num_codes; at += step, bytes += blocks->num_bytes) {
    read_fields(blocks->low, bytes, step, 0, scratch + at);
    if (blocks->high.width) read_fields(blocks->high, bytes, step, (int)blocks->low.width, scratch + at);
  }
  for (int64_t i = 0; blocks->zero && i < num_codes; i++) scratch[i] -= (uint8_t)blocks->zero;
  return scratch + (first - begin * blocks->num_codes);
}
