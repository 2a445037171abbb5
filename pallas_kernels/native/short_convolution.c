// The gated short convolution; compiled once for AVX-512 and once for AVX2.
#include "recurrent_lanes.h"

static void compute_channels(const ShortConvolution *s, int64_t row, int64_t first, int64_t last) {
  const int64_t channels = s->convolution.channels;
  Block block;
  for (int64_t done = 0; done < s->rows.lens[row]; done += block.count) {
    block = block_after(&s->rows, row, done);
    for (int64_t c = first; c < last; c += GROUP) {
      const float *b = s->projected + block.first * 3 * channels + c;
      convolve(1, &s->convolution, block, last - c,
               (Channels){.x = b + 2 * channels, .factor = b, .gate = b + channels, .step = 3 * channels,
                          .y = s->out + block.first * channels + c, .y_step = channels, .channel = c});
    }
  }
}

#ifdef __AVX512F__
void avx512_short_convolution(const ShortConvolution *s, int64_t row, int64_t first, int64_t last) {
  compute_channels(s, row, first, last);
}
#else
void avx2_short_convolution(const ShortConvolution *s, int64_t row, int64_t first, int64_t last) {
  compute_channels(s, row, first, last);
}
#endif
