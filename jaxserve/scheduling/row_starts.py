"""The positions of a plan's rows; apart from ``plan``, so that the scheduler does not import NumPy."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxserve.scheduling.plan import ON_DEVICE, StepPlan


def as_array(column: Sequence[int]) -> Int[np.ndarray, " R"]:
    """Return a column of a plan as an int32 array, without a copy."""
    return np.asarray(column, np.int32)


class RowStarts:
    """Tracks the positions of slots from plan to plan, for rows that start ``ON_DEVICE``.

    Args:
        num_slots: Number of slots.
    """

    def __init__(self, num_slots: int):
        self._next = np.zeros(num_slots, np.int32)

    def of(self, plan: StepPlan) -> Int[np.ndarray, " R"]:
        """Return the position of each row's first token, or its lower bound if drafts are in flight."""
        starts = as_array(plan.starts)
        return np.where(starts == ON_DEVICE, self._next[as_array(plan.slots)], starts)

    def advance(self, plan: StepPlan) -> Int[np.ndarray, " R"]:
        """Return the same as ``of`` and advance past the plan; call once per plan, in order."""
        starts = self.of(plan)
        num_drafts = np.maximum(as_array(plan.num_samples) - 1, 0)
        self._next[as_array(plan.slots)] = starts + as_array(plan.lengths) - num_drafts
        return starts
