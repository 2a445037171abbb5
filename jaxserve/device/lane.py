"""The host's part of a lane: the state of its slots, from which each step's inputs are made."""

import numpy as np

from jaxserve.device.batch import BatchBuilder
from jaxserve.device.buckets import Buckets
from jaxserve.device.compiled_steps import slot_row
from jaxserve.device.masks import MaskedRow, TokenMasks
from jaxserve.device.program import ModelProgram
from jaxserve.device.runner_interface import RowError
from jaxserve.scheduling.plan import Sampling, SlotSetup, StepPlan


class Lane:
    """Keeps what the host knows of the slots of one lane.

    Attributes:
        builder: Builds the lane's buffer of each step.

    Args:
        program: The model.
        buckets: Batch shapes.
    """

    def __init__(self, program: ModelProgram, buckets: Buckets):
        self.builder = BatchBuilder(
            program.num_slots,
            buckets.table_pages,
            program.page_size,
            program.num_pages,
            tuple(program.arguments.values()),
            buckets.num_tables,
        )
        self._vocab_size = program.config.vocab_size
        self._masks = TokenMasks(self._vocab_size)
        self._biased_slots: set[int] = set()

    @property
    def has_static_masks(self) -> bool:
        """Whether any slot has a static mask."""
        return self._masks.has_static_masks

    def apply(self, plan: StepPlan) -> list[np.ndarray]:
        """Apply a plan's slot changes; return the rows of slots (see ``slot_row``) to write on the device.

        A slot that cannot be set up as planned gets neutral parameters, and its rows fail; see ``errors``.
        """
        rows: list[np.ndarray] = []
        for setup in plan.setups:
            self.builder.failed.pop(setup.slot, None)
            try:
                row = self._set_up(setup)
            except Exception as error:
                row = self._set_up(SlotSetup(setup.slot, Sampling(), setup.final_length), is_stale=True)
                self.builder.failed[setup.slot] = error
            if row is not None:
                rows.append(row)
        self.builder.grant(plan.grants)
        return rows

    def errors(self, plan: StepPlan) -> tuple[RowError, ...]:
        """Return the rows of a plan whose inputs could not be built."""
        failed = self.builder.failed
        if not failed:
            return ()
        return tuple(RowError(i, failed[slot]) for i, slot in enumerate(plan.slots) if slot in failed)

    def masked_rows(self, plan: StepPlan) -> list[MaskedRow]:
        """Return the sampling rows of a plan that may not sample every token."""
        return self._masks.rows(plan, self.builder.starts, self.builder.failed)

    def mask(self, rows: list[MaskedRow], num_rows: int) -> np.ndarray:
        """Return the masks of all rows of a step: int32 [num_rows, V / 32]."""
        return self._masks.array(rows, num_rows)

    def _set_up(self, setup: SlotSetup, is_stale: bool = False) -> np.ndarray | None:
        """Assign a slot; return its row if it must be written: its request uses it, the previous one left a bias there,
        or ``is_stale``."""
        slot, sampling = setup.slot, setup.sampling
        self.builder.set_up(setup)
        self._masks.apply([setup])
        is_needed = is_stale or slot in self._biased_slots or bool(sampling.logit_bias or sampling.tracked_ids)
        row = slot_row(setup, self._vocab_size) if is_needed or sampling.has_penalties else None
        if sampling.logit_bias:
            self._biased_slots.add(slot)
        else:
            self._biased_slots.discard(slot)
        return row
