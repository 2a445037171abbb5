// Makes rows of records of a box of a quantized weight; called through ctypes, from as many threads as wanted.
#include "records.h"

#include "block_codes.h"
#include "handlers.h"

// Joins 32 codes, of which four bits count, to 16 bytes of two each.
INLINE __m128i join(__m256i codes) {
  const __m256i four = _mm256_and_si256(codes, _mm256_set1_epi8(15));
  const __m256i pairs = _mm256_maddubs_epi16(four, _mm256_set1_epi16(0x1001));  // first + 16 * second
  return _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

static void join_halves(const uint8_t *codes, int64_t count, uint8_t added, uint8_t *bytes) {
  const __m256i more = _mm256_set1_epi8((char)added);
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i each = _mm256_add_epi8(_mm256_loadu_si256((const __m256i *)(codes + i)), more);
    _mm_storeu_si128((__m128i *)(bytes + i / 2), join(each));
  }
  for (; i < count; i += 2)
    bytes[i / 2] = (uint8_t)(((codes[i] + added) & 15) | (codes[i + 1] + added) << 4);
}

// Whether blocks are runs of codes in the lower halves of bytes and as many in the upper ones, as `join_runs` reads them.
static int has_runs(const Records *job) {
  const Blocks *blocks = &job->blocks;
  return job->is_halves && blocks->num_codes && TILE_COLUMNS % blocks->num_codes == 0 && blocks->low.width == 4 &&
         (blocks->low.run == 16 || blocks->low.run % 32 == 0) && blocks->low.run && !blocks->high.width &&
         blocks->first % blocks->num_codes == 0 && job->num_columns % blocks->num_codes == 0 &&
         (job->added - blocks->zero) % 16 == 0;
}

static void join_runs(const Blocks *blocks, const uint8_t *block, int64_t count, uint8_t *bytes) {
  const int64_t run = blocks->low.run;
  for (int64_t i = 0; i < count; i += blocks->num_codes, block += blocks->num_bytes) {
    const uint8_t *from = block + blocks->low.offset;
    for (int64_t at = 0; at < blocks->num_codes; at += 2 * run, from += run) {
      uint8_t *to = bytes + (i + at) / 2;
      if (run == 16) {
        const __m128i halves = _mm_loadu_si128((const __m128i *)from);
        _mm_storeu_si128((__m128i *)to, join(_mm256_setr_m128i(halves, _mm_srli_epi16(halves, 4))));
        continue;
      }
      for (int64_t k = 0; k < run; k += 32) {
        const __m256i halves = _mm256_loadu_si256((const __m256i *)(from + k));
        _mm_storeu_si128((__m128i *)(to + k / 2), join(halves));
        _mm_storeu_si128((__m128i *)(to + (run + k) / 2), join(_mm256_srli_epi16(halves, 4)));
      }
    }
  }
}

static void add(const uint8_t *codes, int64_t count, uint8_t added, uint8_t *bytes) {
  for (int64_t i = 0; i < count; i++) bytes[i] = (uint8_t)(codes[i] + added);
}

// Copies runs of bytes into records.
INLINE void copy_runs(const uint8_t *bytes, int64_t count, size_t size, char *record, int64_t record_bytes) {
  for (int64_t i = 0; i < count; i++) memcpy(record + i * record_bytes, bytes + i * (int64_t)size, size);
}

static void write_codes(const Records *job, const uint8_t *bytes, int64_t count, char *record) {
  const int64_t size = job->is_halves ? job->span / 2 : job->span;
  switch (size) {
    case 32: return copy_runs(bytes, count, 32, record, job->record_bytes);
    case 16: return copy_runs(bytes, count, 16, record, job->record_bytes);
    default: return copy_runs(bytes, count, (size_t)size, record, job->record_bytes);
  }
}

// Whether rows have pairs of codes as records have them.
static int has_halves(const Records *job) {
  const Blocks *blocks = &job->blocks;
  return job->is_halves && !job->added && blocks->num_bytes == 1 && blocks->low.width == 4 && blocks->low.run == 1 &&
         !blocks->low.offset && blocks->first % 2 == 0 && !blocks->zero && !blocks->high.width;
}

// Writes codes in another order; columns that are filled up have code 0.
static void write_ordered_codes(const Records *job, const uint8_t *row, char *to) {
  uint8_t scratch[SCRATCH_BYTES], bytes[TILE_COLUMNS];
  for (int64_t first = 0; first < job->num_given; first += TILE_COLUMNS) {
    const int64_t left = job->num_given - first, count = left < TILE_COLUMNS ? left : TILE_COLUMNS;
    memcpy(job->whole + first, read_codes(&job->blocks, row, first, count, scratch), (size_t)count);
  }
  for (int64_t first = 0; first < job->num_columns; first += TILE_COLUMNS) {
    const int64_t left = job->num_columns - first, count = left < TILE_COLUMNS ? left : TILE_COLUMNS;
    const int32_t *columns = job->columns + first;
    for (int64_t i = 0; i < count; i++) bytes[i] = columns[i] < 0 ? 0 : job->whole[columns[i]];
    if (job->is_halves) join_halves(bytes, count, (uint8_t)job->added, scratch);
    else add(bytes, count, (uint8_t)job->added, scratch);
    write_codes(job, scratch, count / job->span, to + first / job->span * job->record_bytes);
  }
}

static void write_row_codes(const Records *job, const uint8_t *row, char *to) {
  if (has_halves(job)) return write_codes(job, row + job->blocks.first / 2, job->num_columns / job->span, to);
  const int is_in_runs = has_runs(job);
  uint8_t scratch[SCRATCH_BYTES], bytes[TILE_COLUMNS];
  for (int64_t first = 0; first < job->num_columns; first += TILE_COLUMNS) {
    const int64_t left = job->num_columns - first, count = left < TILE_COLUMNS ? left : TILE_COLUMNS;
    const uint8_t *found = bytes;
    if (is_in_runs) {
      const int64_t block = (job->blocks.first + first) / job->blocks.num_codes;
      join_runs(&job->blocks, row + block * job->blocks.num_bytes, count, bytes);
    } else {
      found = read_codes(&job->blocks, row, first, count, scratch);
      if (job->is_halves) join_halves(found, count, (uint8_t)job->added, bytes);
      else if (job->added) add(found, count, (uint8_t)job->added, bytes);
      if (job->is_halves || job->added) found = bytes;
    }
    write_codes(job, found, count / job->span, to + first / job->span * job->record_bytes);
  }
}

// Copies a number to each record of a row; counts and steps are kept in registers, since `to` might lie anywhere.
INLINE void write_numbers(const Records *job, const Numbers *from, int64_t row_group, size_t size, char *to) {
  const char *numbers = from->numbers + row_group * from->row;
  const int32_t *groups = job->record_groups;
  const int64_t count = job->num_columns / job->span, step = job->record_bytes, column = from->column;
  if (!groups)
    for (int64_t i = 0; i < count; i++) memcpy(to + i * step, numbers + i * column, size);
  else
    for (int64_t i = 0; i < count; i++) memcpy(to + i * step, numbers + groups[i] * column, size);
}

EXPORT void jaxserve_records(const Records *job) {
  const int64_t code_bytes = job->is_halves ? job->span / 2 : job->span;
  for (int64_t row = 0; row < job->num_rows; row++) {
    const int64_t group = job->row_groups ? job->row_groups[row] : row;
    char *to = job->result + row * job->result_row;
    if (job->columns) write_ordered_codes(job, job->codes + row * job->code_row, to);
    else write_row_codes(job, job->codes + row * job->code_row, to);
    to += code_bytes;
    for (int i = 0; i < 5 && job->numbers[i].size; to += job->numbers[i++].size)
      switch (job->numbers[i].size) {
        case 1: write_numbers(job, &job->numbers[i], group, 1, to); break;
        case 2: write_numbers(job, &job->numbers[i], group, 2, to); break;
        default: write_numbers(job, &job->numbers[i], group, 4, to); break;
      }
  }
}

// Turns the words that vectors have of each of four columns: each has those of one word then.
INLINE void turn_four(__m128i *v) {
  const __m128i a = _mm_unpacklo_epi32(v[0], v[1]), b = _mm_unpackhi_epi32(v[0], v[1]);
  const __m128i c = _mm_unpacklo_epi32(v[2], v[3]), d = _mm_unpackhi_epi32(v[2], v[3]);
  v[0] = _mm_unpacklo_epi64(a, c), v[1] = _mm_unpackhi_epi64(a, c);
  v[2] = _mm_unpacklo_epi64(b, d), v[3] = _mm_unpackhi_epi64(b, d);
}

// Writes bytes of four words of 16 pairs of columns, [4][16 pairs], to each word's rows of 16 bytes.
INLINE void write_pairs(const Turn *job, __m128i bytes[4][4], int64_t word, int64_t count, int first_code, char *to,
                        int64_t row_bytes, size_t size) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t w = 0; w < count; w++) {
    __m128i rows[4];
    for (int i = 0; i < 4; i++) rows[i] = _mm_shuffle_epi8(bytes[i][w], order);  // four pairs of each byte
    turn_four(rows);
    for (int i = 0; i < 4; i++) {
      char *row = to + (8 * (word + w) + job->place[first_code + 2 * i]) * row_bytes;
      if (size == 16) _mm_storeu_si128((__m128i *)row, rows[i]);
      else memcpy(row, &rows[i], size);
    }
  }
}

// Four words of a column, of which the box has `count`; columns after the last are zeros.
INLINE __m128i words_at(const Turn *job, int64_t column, int64_t word, int64_t count) {
  const char *from = job->words + column * job->word_row + word * 4;
  uint32_t some[4] = {0, 0, 0, 0};
  if (column >= job->num_columns) return _mm_setzero_si128();
  if (count >= 4) return _mm_loadu_si128((const __m128i *)from);
  memcpy(some, from, (size_t)count * 4);
  return _mm_loadu_si128((const __m128i *)some);
}

// Turns four words of 32 columns.
INLINE void turn_block(const Turn *job, int64_t column, int64_t word) {
  const __m128i low = _mm_set1_epi8(0x0f), high = _mm_set1_epi8((char)0xf0);
  const int64_t row_bytes = (job->num_columns + 1) / 2, left = row_bytes - column / 2;
  const int64_t more = job->num_words - word, count = more < 4 ? more : 4;
  __m128i even[4][4], odd[4][4];
  for (int i = 0; i < 4; i++) {
    for (int j = 0; j < 4; j++) {
      const int64_t at = column + 8 * i + 2 * j;
      const __m128i first = words_at(job, at, word, count), second = words_at(job, at + 1, word, count);
      const __m128i up = _mm_slli_epi32(_mm_and_si128(second, low), 4);
      even[i][j] = _mm_or_si128(_mm_and_si128(first, low), up);
      odd[i][j] = _mm_or_si128(_mm_and_si128(_mm_srli_epi32(first, 4), low), _mm_and_si128(second, high));
    }
    turn_four(even[i]);
    turn_four(odd[i]);
  }
  const size_t size = left < 16 ? (size_t)left : 16;
  write_pairs(job, even, word, count, 0, job->result + column / 2, row_bytes, size);
  write_pairs(job, odd, word, count, 1, job->result + column / 2, row_bytes, size);
}

EXPORT void jaxserve_turn(const Turn *job) {
  for (int64_t word = 0; word < job->num_words; word += 16)  // a cache line of each column
    for (int64_t column = 0; column < job->num_columns; column += 32)
      for (int64_t w = word; w < word + 16 && w < job->num_words; w += 4) turn_block(job, column, w);
}
