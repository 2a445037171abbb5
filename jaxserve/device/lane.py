"""The host's part of a lane: the state of its slots, from which each step's inputs are made."""

import numpy as np

from jaxserve.device.batch import BatchBuilder
from jaxserve.device.buckets import Buckets
from jaxserve.device.masks import MaskedRow, TokenMasks
from jaxserve.device.program import ModelProgram
from jaxserve.scheduling.plan import SlotSetup, StepPlan


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
        self._masks = TokenMasks(program.config.vocab_size)
        self._biased_slots: set[int] = set()

    @property
    def has_static_masks(self) -> bool:
        """Whether any slot has a static mask."""
        return self._masks.has_static_masks

    def apply(self, plan: StepPlan) -> list[SlotSetup]:
        """Apply a plan's slot changes; return the assigned slots whose tables must be written on the device."""
        self.builder.apply(plan)
        self._masks.apply(plan.setups)
        return [setup for setup in plan.setups if self._needs_row(setup)]

    def masked_rows(self, plan: StepPlan) -> list[MaskedRow]:
        """Return the sampling rows of a plan that may not sample every token."""
        return self._masks.rows(plan, self.builder.starts)

    def mask(self, rows: list[MaskedRow], num_rows: int) -> np.ndarray:
        """Return the masks of all rows of a step: int32 [num_rows, V / 32]."""
        return self._masks.array(rows, num_rows)

    def _needs_row(self, setup: SlotSetup) -> bool:
        """Whether a slot's tables must be written: its request uses them, or the previous one left a bias there."""
        slot, sampling = setup.slot, setup.sampling
        was_biased = slot in self._biased_slots
        if sampling.logit_bias:
            self._biased_slots.add(slot)
        elif was_biased:
            self._biased_slots.remove(slot)
        return was_biased or bool(sampling.logit_bias or sampling.tracked_ids) or sampling.has_penalties
