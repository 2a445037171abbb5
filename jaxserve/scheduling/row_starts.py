"""The positions of rows as far as the host knows them.

A position that the host leaves to the device is exact as long as the slot's rows carry no drafts. After that it is the
least it can be: each row with drafts moves the next by one token or more.
"""

import numpy as np
from jaxtyping import Int

from jaxserve.scheduling.plan import ON_DEVICE, StepPlan
from jaxserve.scheduling.row_arrays import row_arrays


class RowStarts:
    """Follows the positions of slots from plan to plan, since a row may leave its start to the device.

    Args:
        num_slots: Sequences that can run at once.
    """

    def __init__(self, num_slots: int):
        self._next = np.zeros(num_slots, np.int32)

    def of(self, plan: StepPlan) -> Int[np.ndarray, " R"]:
        """Return the least position of the first token of each row."""
        rows = row_arrays(plan.columns)
        return np.where(rows.starts == ON_DEVICE, self._next[rows.slots], rows.starts)

    def advance(self, plan: StepPlan) -> Int[np.ndarray, " R"]:
        """Return the same, and note where the next rows start; called once for each plan, in order."""
        starts = self.of(plan)
        rows = row_arrays(plan.columns)
        self._next[rows.slots] = starts + rows.lengths - rows.num_drafts
        return starts
