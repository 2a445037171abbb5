"""The numbers of a plan's rows as arrays."""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxserve.scheduling.plan import RowColumns


class RowArrays(NamedTuple):
    """See ``Row``; ``lengths`` has the number of tokens of each row, ``num_drafts`` that of its drafts."""

    slots: Int[np.ndarray, " R"]
    starts: Int[np.ndarray, " R"]
    lengths: Int[np.ndarray, " R"]
    num_samples: Int[np.ndarray, " R"]
    num_drafts: Int[np.ndarray, " R"]


@functools.lru_cache(maxsize=8)
def row_arrays(columns: RowColumns) -> RowArrays:
    """The rows' numbers, int32; made once for all plans that share their columns."""
    numbers = (columns.slots, columns.starts, columns.lengths, columns.num_samples)
    slots, starts, lengths, num_samples = (np.array(each, np.int32) for each in numbers)
    return RowArrays(slots, starts, lengths, num_samples, np.maximum(num_samples - 1, 0))
