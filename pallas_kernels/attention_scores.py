"""Constants of the scores of all attention kernels, independent of any backend."""

LOG2_E = 1.4426950408889634  # converts exponents of e to exponents of 2, which processors have an instruction for
MASKED = -1e30  # score of masked tokens: finite, because differences of infinities are NaN
