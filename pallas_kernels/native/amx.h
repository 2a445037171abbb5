// The tiles of AMX: 16 rows of 64 bytes at most.
#pragma once
#include <immintrin.h>
#include <stdint.h>

enum { TILE_ROWS = 16, TILE_DEPTH = 32, TILE_BYTES = 1024 };  // rows, numbers of a row in bfloat16

// Sets how many rows each of eight tiles has, and the bytes of one; no rows: it is not used.
static inline void configure_tiles_of(const uint8_t rows[8], const uint8_t row_bytes[8]) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } tiles = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    tiles.bytes[i] = rows[i] ? row_bytes[i] : 0;
    tiles.rows[i] = rows[i];
  }
  _tile_loadconfig(&tiles);
}
static inline void configure_tiles(const uint8_t rows[8]) {
  configure_tiles_of(rows, (const uint8_t[8]){64, 64, 64, 64, 64, 64, 64, 64});
}
