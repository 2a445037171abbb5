"""The rows of a plan as NumPy arrays; apart from ``plan``, so that the scheduler does not import NumPy."""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxserve.scheduling.plan import ON_DEVICE, RowColumns, StepPlan


class RowArrays(NamedTuple):
    """Fields of the rows as int32 arrays (see ``Row``), with the numbers of tokens and of drafts."""

    slots: Int[np.ndarray, " R"]
    starts: Int[np.ndarray, " R"]
    lengths: Int[np.ndarray, " R"]
    num_samples: Int[np.ndarray, " R"]
    num_drafts: Int[np.ndarray, " R"]


@functools.lru_cache(maxsize=8)
def row_arrays(columns: RowColumns) -> RowArrays:
    """Convert columns to arrays, once for all plans that share them."""
    fields = (columns.slots, columns.starts, columns.lengths, columns.num_samples)
    slots, starts, lengths, num_samples = (np.array(field, np.int32) for field in fields)
    return RowArrays(slots, starts, lengths, num_samples, np.maximum(num_samples - 1, 0))


class RowStarts:
    """Tracks the positions of slots from plan to plan, for rows that start ``ON_DEVICE``.

    Args:
        num_slots: Number of slots.
    """

    def __init__(self, num_slots: int):
        self._next = np.zeros(num_slots, np.int32)

    def of(self, plan: StepPlan) -> Int[np.ndarray, " R"]:
        """Return the position of each row's first token, or its lower bound if drafts are in flight."""
        rows = row_arrays(plan.columns)
        return np.where(rows.starts == ON_DEVICE, self._next[rows.slots], rows.starts)

    def advance(self, plan: StepPlan) -> Int[np.ndarray, " R"]:
        """Return the same as ``of`` and advance past the plan; call once per plan, in order."""
        starts = self.of(plan)
        rows = row_arrays(plan.columns)
        self._next[rows.slots] = starts + rows.lengths - rows.num_drafts
        return starts
