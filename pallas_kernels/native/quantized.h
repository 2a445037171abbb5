// What a packed quantized weight holds, and where.
//
// It is panels of 32 outputs, [panels][blocks][bytes]. A block is the features that share factors of scales, or a group
// where there are none: the factors of scales, those of biases, then its groups. A group is the features that share a
// scale: codes, scales, zeros, biases, each of 32 outputs, in the types that the form has. A gated weight's panel has 16
// gates and then the 16 outputs that they multiply.
//
// Codes of a byte lie as [features / 4][32][4], those of half a byte as [features / 8][32][8], the lower half first, and
// 8-bit floats as [features][32]: the first two are words of one output each. int8 is stored as its value plus 128.
//
// Codes of six bits, stored as their value plus 32, lie as [features / 16][3][32]: two words of an output with the lower
// halves of eight codes each, and one with the upper two bits of all. Byte b of that has, from its lowest bits on, those
// of code 2b of the first word, of code 2b + 1, and the same of the second word.
#pragma once
#include <stdint.h>

enum { CODES_INT8 = 1, CODES_UINT8, CODES_UINT4, CODES_INT6, CODES_E4M3, CODES_E5M2 };
// Activations as they are, or in bfloat16 where tiles multiply that, or int8 with a scale for each.
enum { FLOAT_ROWS = 0, BF16_ROWS, ROUNDED_ROWS, ROUNDED_GROUPS };
enum { NO_NUMBERS = 0, NUMBERS_F32, NUMBERS_F16, NUMBERS_BF16, NUMBERS_E8M0, NUMBERS_E4M3, NUMBERS_E5M2, NUMBERS_U8,
       NUMBERS_S8 };

// A form as Python gives it; groups are of the features of the matrix at hand.
typedef struct {
  int32_t values, span, group, factor_group, zero, activations, scales, zeros, biases, factors;
  int32_t divides;  // factors divide the scales, in place of multiplying them
} Form;

typedef struct {
  Form form;
  int64_t num_in, num_groups, padded_group;  // features of a group as they are packed
  int64_t block_groups;                      // groups of a block
  int64_t scale_at, zero_at, bias_at;        // in a group
  int64_t group_bytes, groups_at, block_bytes, num_blocks;
  // A code's value less the zeros of its form and of its group is what kernels make of a code less its group's zero,
  // if there is one, and the offset.
  float offset;
  int has_offset;
  int center;       // subtracted from codes before they are multiplied with rounded rows
  float table[16];  // of codes of half a byte: what kernels multiply with rows that are not rounded
  int is_exact_in_bf16;  // all that codes stand for
} Quantized;

static inline int64_t number_bytes(int32_t kind) {
  return kind == NO_NUMBERS ? 0 : kind == NUMBERS_F32 ? 4 : kind == NUMBERS_F16 || kind == NUMBERS_BF16 ? 2 : 1;
}

// Features that words of codes hold; groups are filled up with zeros to a multiple of them.
static inline int64_t code_unit(const Form *form) {
  return form->values == CODES_INT6 ? 16 : form->values == CODES_UINT4 ? 8 : form->values <= CODES_UINT8 ? 4 : 1;
}

static inline int64_t padded_in(const Quantized *q) { return q->num_groups * q->padded_group; }
static inline int64_t panel_bytes(const Quantized *q) { return q->num_blocks * q->block_bytes; }

static inline const char *block_of(const Quantized *q, const char *panel, int64_t group) {
  return panel + group / q->block_groups * q->block_bytes;
}
static inline const char *group_of(const Quantized *q, const char *panel, int64_t group) {
  return block_of(q, panel, group) + q->groups_at + group % q->block_groups * q->group_bytes;
}

// Fills in the layout of a matrix; returns 0 if there is none for such a form. `table` has the values of 16 codes.
int describe(Quantized *q, const Form *form, int64_t num_in, const float *table);
