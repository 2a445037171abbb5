"""A plan while the scheduler makes it, what the scheduler keeps until the step completes, and the outcome."""

import itertools
from typing import NamedTuple

from jaxserve.scheduling.plan import ChunkPooling, PageCopy, PageGrant, Row, SlotMask, SlotSetup, StepPlan
from jaxserve.scheduling.sequence import Sequence


class Completion(NamedTuple):
    """The outcome of a step for the sequences that had not finished before.

    Attributes:
        sampled: Each sequence that got tokens, the index of the first in ``StepPlan.first_samples``, and the tokens.
        failed: Sequences that got no token, although they sampled; they have finished with the reason "error".
        scored: Each sequence with a row that has targets, that row, and its first query token in the step.
        pooled: Each sequence that finished because its hidden states are pooled, and its row.
        has_drafts: Whether a sequence may have got several tokens.
    """

    sampled: list[tuple[Sequence, int, list[int]]]
    failed: list[Sequence]
    scored: list[tuple[Sequence, Row, int]]
    pooled: list[tuple[Sequence, int]]
    has_drafts: bool


class Flight(NamedTuple):
    """A launched step: its number, and the sequence of each row."""

    number: int
    sequences: list[Sequence]

    def drop(self, sequence: Sequence) -> None:
        """Leave the outcome of the step for a sequence out."""
        for row, one in enumerate(self.sequences):
            if one is sequence:
                self.sequences[row] = _NOBODY

    def scored(self, plan: StepPlan) -> list[tuple[Sequence, Row, int]]:
        """Return unfinished sequences whose rows have targets, the rows, and their first query tokens in the step."""
        if not any(plan.columns.targets):
            return []
        starts = itertools.accumulate(plan.columns.lengths, initial=0)
        return [
            (sequence, row, start)
            for sequence, row, start in zip(self.sequences, plan.rows, starts, strict=False)
            if row.targets is not None and sequence.finish_reason is None
        ]

    def pooled(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Return the sequences whose pooling the step completes, and their rows."""
        pooling = plan.columns.pooling
        if not any(pooling):
            return []
        return [(self.sequences[row], row) for row, added in enumerate(pooling) if added is not None and added.is_last]


class PlanDraft:
    """Collects rows and what goes with them.

    Attributes:
        rows: See ``StepPlan``.
        sequences: The sequence of each row.
        half_prompts: Running sequences whose prompts are computed in part.
        preempts: Whether a sequence lost its pages to another.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.sequences: list[Sequence] = []
        self.half_prompts: list[Sequence] = []
        self.preempts = False
        self._setups: list[SlotSetup] = []
        self._grants: list[PageGrant] = []
        self._copies: list[PageCopy] = []
        self._masks: list[SlotMask] = []

    def add_setup(self, sequence: Sequence, copies: list[PageCopy]) -> None:
        """A sequence moves into its slot."""
        known = list(sequence.token_ids) if sequence.sampling.has_penalties else ()
        self._setups.append(
            SlotSetup(sequence.slot, sequence.sampling, sequence.max_length, known, sequence.num_prompt_tokens)
        )
        self._copies += copies

    def add_grants(self, grants: list[PageGrant]) -> None:
        """A sequence has new pages."""
        self._grants += grants

    def add_mask(self, sequence: Sequence) -> str | None:
        """Add the tokens that a sequence's constraint, if it has one, allows; return why the constraint failed."""
        if sequence.constraint is None:
            return None
        try:
            words = sequence.constraint.mask()
        except Exception as error:  # a constraint that fails ends its own sequence only
            return str(error)
        if words is not None:
            self._masks.append(SlotMask(sequence.slot, words))
        return None

    def add_chunk(self, sequence: Sequence, end: int) -> bool:
        """Add a row of a sequence's known tokens up to position ``end``; return whether it samples after them."""
        start = sequence.num_computed
        samples = end == len(sequence.token_ids) and sequence.pooling is None
        targets = None
        if sequence.wants_prompt_logprobs and start < sequence.num_prompt_tokens:
            behind = sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt_tokens)]
            targets = behind + [-1] * (end - start - len(behind))
        pooling = None if sequence.pooling is None else _chunk_pooling(sequence, end)
        token_ids = sequence.token_ids[start:end]
        self.rows.append(Row(sequence.slot, start, token_ids, int(samples), targets, pooling))
        self.sequences.append(sequence)
        return samples

    def build(self, previous: StepPlan | None) -> StepPlan:
        """Return the plan that follows the ``previous`` one."""
        number = 0 if previous is None else previous.number + 1
        plan = StepPlan(number, self._setups, self._grants, self.rows, self._copies, self._masks)
        if previous is not None and previous.rows == self.rows:
            plan.share_columns(previous)
        return plan


_NOBODY = Sequence("", [], 0, 0, finish_reason="abort")
"""Stands for a sequence that wants nothing of a step any more."""


def _chunk_pooling(sequence: Sequence, end: int) -> ChunkPooling | None:
    """What a pooled sequence's chunk up to position ``end`` adds to the sum: the last token alone, or all."""
    start, is_last = sequence.num_computed, end == len(sequence.token_ids)
    if sequence.pooling == "last":
        return ChunkPooling(1, True, True) if is_last else None
    return ChunkPooling(end - start, start == 0, is_last)
