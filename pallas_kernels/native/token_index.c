// An index of where runs of tokens occurred, and drafts of the tokens that follow them; called through ctypes by
// jaxserve/scheduling/proposers, where token_index.py and suffix_search.py are the same in Python.
#include <string.h>

#include "handlers.h"

enum { NUM_SIZES = 3, MOST_VISITS = 32, MOST_PLACES = 16, LONGEST_MATCH = 256 };
static const int SIZES[NUM_SIZES] = {16, 6, 2};  // lengths of the runs that are indexed

// A ring of tokens; 0: none. The arrays are the caller's. A place is the slot after a run.
typedef struct {
  int64_t num_slots;            // a power of two
  int64_t end;                  // slot after the last token written
  int64_t cursor;               // of a text: the place in the past that it goes on from, or 0; see `jaxserve_propose`
  int64_t *tokens;              // [num_slots]
  int32_t *earlier[NUM_SIZES];  // of a run's last slot: the place of the run before it in its bucket, or 0
  int32_t *latest[NUM_SIZES];   // of a bucket: the place of its latest run, or 0
} Index;

typedef struct {
  int64_t depth;           // longest match that counts
  double least;            // the share of all occurrences that must go on with a token
  const int32_t *lengths;  // most drafts after a match of each length, [depth + 1]
} Rules;

// A text: its index, what its tokens are raised by there, the tokens that are new, those that steps in flight sample.
// The number of its drafts takes the place of the number of its new tokens.
typedef struct {
  Index *own;
  int64_t offset, num_new, num_in_flight;
} Row;

// Where a run occurred: the latest place first, and the number of tokens that match.
typedef struct {
  int count;
  int64_t match;
  int32_t places[MOST_PLACES];
} Found;

static uint64_t bucket(const Index *index, const int64_t *run, int size) {
  uint64_t hash = 0;
  for (int i = 0; i < size; i++) hash = (hash + (uint64_t)run[i]) * 0x9E3779B97F4A7C15u;
  return hash >> (64 - __builtin_ctzll((uint64_t)index->num_slots));
}

// Writes tokens from a slot on, which end before the ring does, and 0 after them; links the runs that they complete.
static void write_tokens(Index *index, int64_t start, const int32_t *tokens, int64_t count, int64_t offset) {
  const int64_t end = start + count;
  for (int64_t i = 0; i < count; i++) index->tokens[start + i] = tokens[i] + offset;
  index->tokens[end] = 0;
  index->end = end;
  for (int64_t place = start + 1; place <= end; place++) {
    for (int s = 0; s < NUM_SIZES; s++) {
      if (place < SIZES[s]) continue;
      int32_t *latest = &index->latest[s][bucket(index, index->tokens + place - SIZES[s], SIZES[s])];
      index->earlier[s][place - 1] = *latest;
      *latest = (int32_t)place;
    }
  }
}

EXPORT void jaxserve_index_write(Index *index, int64_t start, const int32_t *tokens, int64_t count, int64_t offset) {
  write_tokens(index, start, tokens, count, offset);
}

static int is_here(const Index *index, int64_t place, const int64_t *run, int size) {
  return place != index->end && place >= size && !memcmp(index->tokens + place - size, run, (size_t)size * sizeof *run);
}

// Finds the places of a run: the cursor if it is one, then those in its bucket, without the end of the ring.
static void visit(const Index *index, int s, const int64_t *run, int64_t cursor, Found *found) {
  const int size = SIZES[s];
  int64_t place = index->latest[s][bucket(index, run, size)], age = -1;
  found->count = 0;
  if (is_here(index, cursor, run, size)) found->places[found->count++] = (int32_t)cursor;
  for (int visits = 0; visits < MOST_VISITS && place && found->count < MOST_PLACES; visits++) {
    const int64_t previous_age = age;
    age = (index->end - place) & (index->num_slots - 1);
    if (age <= previous_age) return;  // a place that has been overwritten leads anywhere
    if (place != cursor && is_here(index, place, run, size)) found->places[found->count++] = (int32_t)place;
    place = index->earlier[s][place - 1];
  }
}

// The number of tokens, at most `most`, that are the same before two slots.
static int64_t num_same(const int64_t *one, const int64_t *other, int64_t most) {
  enum { BLOCK = 32 };
  int64_t count = 0;
  while (count + BLOCK <= most && !memcmp(one - count - BLOCK, other - count - BLOCK, BLOCK * sizeof *one)) count += BLOCK;
  while (count < most && one[-count - 1] == other[-count - 1]) count++;
  return count;
}

// Finds where the longest known end of a text occurred: `end` is after its last token.
static Found look_up(const Index *index, const int64_t *end, int64_t length, int64_t cursor) {
  Found found = {0};
  for (int s = 0; s < NUM_SIZES && !found.count; s++)
    if (length >= SIZES[s]) visit(index, s, end - SIZES[s], cursor, &found);
  int count = 0;
  for (int i = 0; i < found.count; i++) {
    const int64_t place = found.places[i], match = num_same(index->tokens + place, end, place < length ? place : length);
    if (match > found.match) count = 0, found.match = match;
    if (match == found.match) found.places[count++] = (int32_t)place;
  }
  found.count = count;
  return found;
}

// The token that most places go on with after some drafts, the first of them among equals; keeps these places. A text of
// its own goes on with the drafts where it ends.
static int64_t most_frequent(const Index *index, Found *found, const Row *row, const int32_t *drafts, int64_t after) {
  int64_t options[MOST_PLACES], best = 0;
  int most = 0;
  for (int i = 0; i < found->count; i++) {
    const int64_t slot = found->places[i] + after, beyond = slot - index->end;
    options[i] = index == row->own && beyond >= 0 ? drafts[beyond] + row->offset : index->tokens[slot];
  }
  for (int i = 0; i < found->count && most < found->count - i; i++) {
    int count = 0;
    for (int j = i; j < found->count; j++) count += options[j] == options[i];
    if (count > most) most = count, best = options[i];
  }
  int kept = 0;
  for (int i = 0; i < found->count; i++)
    if (options[i] == best) found->places[kept++] = found->places[i];
  found->count = kept;
  return best;
}

// Writes the most frequent continuation, and returns its length; its score is the expected number of right drafts.
static int64_t follow(const Rules *rules, const Index *index, Found found, const Row *row, int32_t *drafts, double *score) {
  const int64_t num_drafts = rules->lengths[found.match < rules->depth ? found.match : rules->depth];
  const int64_t most = num_drafts + row->num_in_flight;
  const int total = found.count;
  int64_t length = 0, right = 0;
  *score = 0;
  if (!num_drafts) return 0;
  for (; length < most; length++) {
    const int64_t token = most_frequent(index, &found, row, drafts, length);
    if (!token || (double)found.count / total < rules->least) break;
    drafts[length] = (int32_t)(token - row->offset);
    if (length >= row->num_in_flight) right += found.count;
  }
  *score = (double)right / total;
  return length;
}

// Follows a text's new tokens in the past from its cursor on, as far as they go on alike.
static int64_t advance(const Index *past, int64_t cursor, const int64_t *tokens, int64_t count) {
  for (int64_t i = 0; i < count && cursor; i++) cursor = past->tokens[cursor] == tokens[i] ? cursor + 1 : 0;
  return cursor;
}

// Writes the new tokens of each row, looks its end up in its own tokens and in the past's, and writes the drafts of all
// rows one after the other. They have room for twice the most that each row can have, beyond those in flight.
// Longer matches than count are told apart; one that a text keeps to is found where more than are visited look alike.
EXPORT void jaxserve_propose(const Rules *rules, const Index *past, Row *rows, int64_t num_rows, const int32_t *tokens,
                             int32_t *drafts) {
  const int64_t longest = rules->depth > LONGEST_MATCH ? rules->depth : LONGEST_MATCH;
  for (Row *row = rows; row < rows + num_rows; row++) {
    Index *own = row->own;
    const int64_t count = row->num_new;
    write_tokens(own, own->end, tokens, count, row->offset);
    own->cursor = advance(past, own->cursor, own->tokens + own->end - count, count);
    tokens += count;
    row->num_new = 0;
    const Index *const indexes[2] = {own, past};
    const int64_t length = own->end < longest ? own->end : longest;
    double best = 0;
    int64_t best_match = 0;
    for (int i = 0; i < 2; i++) {
      const Found found = look_up(indexes[i], own->tokens + own->end, length, i ? own->cursor : 0);
      if (i) own->cursor = found.count ? found.places[0] : 0;
      if (!found.count) continue;
      double score;
      int32_t *const continuation = drafts + row->num_new;
      const int64_t num_drafts = follow(rules, indexes[i], found, row, continuation, &score);
      if (score < best || (score == best && found.match < best_match)) continue;
      memmove(drafts, continuation, (size_t)num_drafts * sizeof *drafts);
      row->num_new = num_drafts;
      best = score;
      best_match = found.match;
    }
    drafts += row->num_new;
  }
}
