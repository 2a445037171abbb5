// Packs rows of records into the panels of quantized.h, restores them, and decodes single rows.
#include "quantized.h"

#include "handlers.h"
#include "linear_job.h"

#define INLINE static inline __attribute__((always_inline))  // vectors.h needs other instructions

static int is_number(int32_t kind) { return kind >= NO_NUMBERS && kind <= NUMBERS_S8; }

// Blocks begin on a cache line where that costs less than a fiftieth.
static int64_t filled_up(int64_t bytes) {
  const int64_t lines = (bytes + 63) & ~(int64_t)63;
  return (lines - bytes) * 50 < bytes ? lines : bytes;
}

int describe(Quantized *q, const Form *form, int64_t num_in, const float *table) {
  const Form f = *form;
  if (f.values < CODES_INT8 || f.values > CODES_E5M2 || f.span <= 0 || f.group <= 0 || f.factor_group <= 0) return 0;
  if (f.group % f.span || f.factor_group % f.group || num_in % f.factor_group) return 0;
  if (!f.factors && f.factor_group != f.group) return 0;
  if (!f.scales || !is_number(f.scales) || !is_number(f.zeros) || !is_number(f.biases) || !is_number(f.factors)) return 0;
  if (f.activations < FLOAT_ROWS || f.activations > ROUNDED_GROUPS) return 0;
  const int is_rounded = f.activations >= ROUNDED_ROWS;
  if (is_rounded && f.values > CODES_UINT4) return 0;
  *q = (Quantized){.form = f, .num_in = num_in, .num_groups = num_in / f.group};
  const int64_t unit = code_unit(form);
  q->padded_group = (f.group + unit - 1) / unit * unit;
  q->block_groups = f.factor_group / f.group;
  q->scale_at = q->padded_group * PANEL / (f.values == CODES_UINT4 ? 2 : 1);
  q->zero_at = q->scale_at + PANEL * number_bytes(f.scales);
  q->bias_at = q->zero_at + PANEL * number_bytes(f.zeros);
  q->group_bytes = q->bias_at + PANEL * number_bytes(f.biases);
  q->groups_at = PANEL * number_bytes(f.factors) * (f.biases ? 2 : 1);
  q->block_bytes = filled_up(q->groups_at + q->block_groups * q->group_bytes);
  q->num_blocks = q->num_groups / q->block_groups;
  int is_plain = 1;
  for (int i = 0; i < 16; i++) is_plain &= table[i] == (float)i;
  // Zeros of groups are most often near the middle of the codes, and rows are multiplied with what is left.
  if (f.values == CODES_UINT4) {
    q->center = f.zeros && is_plain ? 8 : f.zero;
    q->offset = (float)(f.zero - q->center);
  } else if (is_rounded) {
    q->center = f.values == CODES_INT8 ? 128 + f.zero : f.zeros ? 128 : f.zero;
    q->offset = f.values == CODES_INT8 ? 0 : (float)(f.zero - q->center);
  } else {
    q->offset = (float)(f.values == CODES_UINT8 ? f.zero - 128 : f.zero);
  }
  q->has_offset = f.zeros != NO_NUMBERS || q->offset != 0;
  q->is_exact_in_bf16 = 1;
  for (int i = 0; i < 16; i++) {
    uint32_t bits;
    q->table[i] = table[i] - (float)q->center;
    memcpy(&bits, q->table + i, sizeof bits);
    q->is_exact_in_bf16 &= !(bits & 0xffff);
  }
  return !(f.values == CODES_UINT4 && is_rounded && (!is_plain || f.zero < 0 || f.zero > 15));
}

typedef struct {
  const Quantized *q;
  char *records, *packed;
  int64_t num_out;
  int is_gated, is_inverse;
  _Alignas(64) atomic_llong next;
} PackJob;

static int64_t code_bytes(const Form *f) { return f->values == CODES_UINT4 ? f->span / 2 : f->span; }
static int64_t record_bytes(const Form *f) {
  return code_bytes(f) + number_bytes(f->scales) + number_bytes(f->zeros) + number_bytes(f->biases) +
         number_bytes(f->factors) * (f->biases ? 2 : 1);
}

// Moves a word of each row's record to a panel or back; the words of a panel follow one another.
INLINE void move_words(char *const *rows, int64_t at, char *words, uint32_t flip, const int is_inverse) {
  for (int r = 0; r < PANEL; r++) {
    if (!rows[r]) continue;
    char *of_row = rows[r] + at, *of_panel = words + 4 * r;
    uint32_t word;
    memcpy(&word, is_inverse ? of_panel : of_row, 4);
    word ^= flip;
    memcpy(is_inverse ? of_row : of_panel, &word, 4);
  }
}

// Moves the codes of a record of each row, which begins at a feature of its group.
INLINE void move_codes(const Form *f, char *const *rows, char *group, int64_t feature, const int is_inverse) {
  const uint32_t flip = f->values == CODES_INT8 ? 0x80808080u : 0;
  const int64_t unit = code_unit(f), count = code_bytes(f);
  if (unit > 1 && f->span % unit == 0) {
    for (int64_t i = 0; i < count; i += 4)
      move_words(rows, i, group + (feature / unit + i / 4) * PANEL * 4, flip, is_inverse);
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = feature / (f->values == CODES_UINT4 ? 2 : 1) + i;  // the byte among those of the output
    for (int r = 0; r < PANEL; r++) {
      if (!rows[r]) continue;
      char *byte = unit == 1 ? group + at * PANEL + r : group + (at / 4 * PANEL + r) * 4 + at % 4;
      if (is_inverse) rows[r][i] = (char)(*byte ^ (char)flip);
      else *byte = (char)(rows[r][i] ^ (char)flip);
    }
  }
}

// Moves a number of each row's record.
INLINE void move_numbers(char *const *rows, int64_t at, char *numbers, const size_t size, const int is_inverse) {
  for (int r = 0; r < PANEL; r++)
    if (rows[r]) memcpy(is_inverse ? rows[r] + at : numbers + r * size, is_inverse ? numbers + r * size : rows[r] + at, size);
}

// Moves record `index` of each row; numbers are packed once for those that share them.
INLINE void move_records(const Quantized *q, char *const *rows, char *panel, int64_t index, const int is_inverse) {
  const Form *f = &q->form;
  const int64_t feature = index * f->span, group = feature / f->group;
  char *of_group = (char *)group_of(q, panel, group), *of_block = (char *)block_of(q, panel, group);
  move_codes(f, rows, of_group, feature % f->group, is_inverse);
  const struct {
    int64_t size;
    char *numbers;
    int is_needed;
  } fields[5] = {
      {number_bytes(f->scales), of_group + q->scale_at, is_inverse || feature % f->group == 0},
      {number_bytes(f->zeros), of_group + q->zero_at, is_inverse || feature % f->group == 0},
      {number_bytes(f->biases), of_group + q->bias_at, is_inverse || feature % f->group == 0},
      {number_bytes(f->factors), of_block, is_inverse || feature % f->factor_group == 0},
      {f->biases ? number_bytes(f->factors) : 0, of_block + PANEL * number_bytes(f->factors),
       is_inverse || feature % f->factor_group == 0},
  };
  int64_t at = code_bytes(f);
  for (int i = 0; i < 5; at += fields[i++].size) {
    if (!fields[i].is_needed) continue;
    switch (fields[i].size) {
      case 1: move_numbers(rows, at, fields[i].numbers, 1, is_inverse); break;
      case 2: move_numbers(rows, at, fields[i].numbers, 2, is_inverse); break;
      case 4: move_numbers(rows, at, fields[i].numbers, 4, is_inverse); break;
      default: break;
    }
  }
}

INLINE void move_panel(const PackJob *job, int64_t panel, const int is_inverse) {
  const Quantized *q = job->q;
  const int64_t records = q->num_in / q->form.span, size = record_bytes(&q->form);
  char *packed = job->packed + panel * panel_bytes(q), *rows[PANEL];
  if (!is_inverse) memset(packed, 0, (size_t)panel_bytes(q));
  for (int r = 0; r < PANEL; r++) {
    const int64_t row = row_of_panel(job->num_out, job->is_gated, panel, r);
    rows[r] = row < 0 ? 0 : job->records + row * records * size;
  }
  for (int64_t i = 0; i < records; i++) {
    move_records(q, rows, packed, i, is_inverse);
    for (int r = 0; r < PANEL; r++) rows[r] = rows[r] ? rows[r] + size : 0;
  }
}

static void pack_job(void *context) {
  PackJob *job = context;
  const int64_t panels = num_panels(job->num_out, job->is_gated);
  for (int64_t panel; (panel = atomic_fetch_add(&job->next, 1)) < panels;)
    if (job->is_inverse) move_panel(job, panel, 1);
    else move_panel(job, panel, 0);
}

// Packs rows of records [num_out, ...], or restores them; returns the bytes of a panel's block, 0 if the form has no layout.
EXPORT int64_t jaxserve_quantized_pack(void *records, void *packed, const int32_t *form, int64_t num_out, int64_t num_in,
                                       int is_gated, int is_inverse) {
  static const float plain[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Quantized q;
  if (!describe(&q, (const Form *)form, num_in, plain)) return 0;
  PackJob job = {&q, records, packed, num_out, is_gated, is_inverse, 0};
  if (packed) run_job(pack_job, &job);
  return q.block_bytes;
}
