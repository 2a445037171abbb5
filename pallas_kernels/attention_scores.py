"""Numbers that all attention kernels count scores with; of no backend, so that each can import it."""

LOG2_E = 1.4426950408889634  # scores times it are powers of 2, which processors have an instruction for
MASKED = -1e30  # score of what a query does not see: minus infinity's differences are no numbers
