// Packs weights into the panels of linear.h, and unpacks them.
#include "handlers.h"
#include "linear_job.h"

typedef struct {
  const char *from;
  char *to;
  int64_t num_in, num_out, num_units;  // units of 4 bytes: a float, or a pair in bfloat16
  int item, is_gated, is_inverse;
  _Alignas(64) atomic_llong next;
} PackJob;

enum { UNITS_AT_ONCE = 16 };

int64_t row_of_panel(int64_t num_out, int is_gated, int64_t panel, int r) {
  if (!is_gated) return panel * PANEL + r < num_out ? panel * PANEL + r : -1;
  const int64_t half = num_out / 2, i = panel * GATES + r % GATES;
  return i >= half ? -1 : r < GATES ? i : half + i;
}

int64_t num_panels(int64_t num_out, int is_gated) {
  return is_gated ? (num_out / 2 + GATES - 1) / GATES : (num_out + PANEL - 1) / PANEL;
}

// A panel of whole rows: 16 units of each at a time, a cache line.
static void pack_whole(const uint32_t *const *rows, uint32_t *packed, int64_t num_units) {
  for (int64_t start = 0; start < num_units; start += UNITS_AT_ONCE) {
    const int64_t end = start + UNITS_AT_ONCE < num_units ? start + UNITS_AT_ONCE : num_units;
    for (int64_t unit = start; unit < end; unit++)
      for (int r = 0; r < PANEL; r++) packed[unit * PANEL + r] = rows[r][unit];
  }
}

static void pack_panel(const PackJob *job, int64_t panel) {
  const int64_t row_bytes = job->num_in * job->item, packed_row = job->num_units * 4;
  char *packed = (job->is_inverse ? (char *)job->from : job->to) + panel * packed_row * PANEL;
  char *plain = job->is_inverse ? job->to : (char *)job->from, *rows[PANEL];
  int is_whole = packed_row == row_bytes;
  for (int r = 0; r < PANEL; r++) {
    const int64_t row = row_of_panel(job->num_out, job->is_gated, panel, r);
    rows[r] = row < 0 ? 0 : plain + row * row_bytes;
    is_whole &= row >= 0;
  }
  if (!job->is_inverse && is_whole) {
    pack_whole((const uint32_t *const *)rows, (uint32_t *)packed, job->num_units);
    return;
  }
  if (!job->is_inverse) memset(packed, 0, (size_t)packed_row * PANEL);
  for (int r = 0; r < PANEL; r++)
    for (int64_t unit = 0; rows[r] && unit * 4 < row_bytes; unit++) {
      const size_t size = row_bytes - unit * 4 < 4 ? 2 : 4;
      char *of_row = rows[r] + unit * 4, *of_panel = packed + (unit * PANEL + r) * 4;
      if (job->is_inverse) memcpy(of_row, of_panel, size);
      else memcpy(of_panel, of_row, size);
    }
}

static void pack_job(void *context) {
  PackJob *job = context;
  const int64_t panels = num_panels(job->num_out, job->is_gated);
  for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < panels;) pack_panel(job, i);
}

// Packs a weight [num_out, num_in] of 2 or 4 bytes an item into panels of padded_in features, or restores it. The first
// half of a gated one's outputs are gates.
EXPORT void jaxserve_pack(const void *from, void *to, int64_t num_out, int64_t num_in, int64_t padded_in, int item,
                          int is_gated, int is_inverse) {
  PackJob job = {from, to, num_in, num_out, padded_in * item / 4, item, is_gated, is_inverse, 0};
  run_job(pack_job, &job);
}
