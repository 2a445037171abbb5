"""A step's plan in the making, what the scheduler remembers of it until the step is done, and what it then was."""

from typing import NamedTuple

from jaxserve.engine.constraint import Constraint
from jaxserve.engine.plan import ChunkPooling, PageCopy, PageGrant, PrefillRow, SlotMask, SlotSetup, StepPlan
from jaxserve.engine.sequence import Sequence


class Completion(NamedTuple):
    """The outcome of a step for the sequences that had not finished before.

    Attributes:
        sampled: Each sequence that got tokens, its row, and the tokens.
        failed: Sequences that got no token, although they sampled; they have finished with the reason "error".
        scored: Each sequence a chunk of whose prompt was scored, the chunk, and the step's first query token of it.
        pooled: Each sequence that ended since its hidden states are summed up, and its row.
    """

    sampled: list[tuple[Sequence, int, list[int]]]
    failed: list[Sequence]
    scored: list[tuple[Sequence, PrefillRow, int]]
    pooled: list[tuple[Sequence, int]]


class Flight(NamedTuple):
    """A launched step: its number, the sequences of its sampling rows, and those of its prefill rows, in order."""

    number: int
    sampled: list[Sequence]
    prefilled: list[Sequence]

    def scored(self, plan: StepPlan) -> list[tuple[Sequence, PrefillRow, int]]:
        """Sequences not ended whose chunk has targets, the chunk, and the step's first query token of it."""
        found: list[tuple[Sequence, PrefillRow, int]] = []
        first_token = len(plan.decode_slots)
        for sequence, chunk in zip(self.prefilled, plan.prefill, strict=True):
            if chunk.targets is not None and sequence.finish_reason is None:
                found.append((sequence, chunk, first_token))
            first_token += len(chunk.token_ids)
        return found

    def pooled(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Sequences whose sum of hidden states the step completes, and their rows."""
        rows = enumerate(zip(self.prefilled, plan.prefill, strict=True), len(plan.decode_slots))
        return [(sequence, row) for row, (sequence, chunk) in rows if chunk.is_pooled]


class PlanDraft:
    """Collects rows and what goes with them; for the public lists see ``StepPlan`` and ``Flight``.

    Attributes:
        half_prompts: Running sequences whose prompts are computed in part.
        preempts: Whether a sequence lost its pages to another.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.positions: list[int] = []
        self.tokens: list[int] = []
        self.sampled: list[Sequence] = []
        self.half_prompts: list[Sequence] = []
        self.preempts = False
        self._setups: list[SlotSetup] = []
        self._grants: list[PageGrant] = []
        self._copies: list[PageCopy] = []
        self._masks: list[SlotMask] = []
        self._prefill: list[PrefillRow] = []
        self._prefilled: list[Sequence] = []

    @property
    def is_empty(self) -> bool:
        """Whether no row was added."""
        return not self.slots and not self._prefill

    def add_setup(self, sequence: Sequence, copies: list[PageCopy]) -> None:
        """A sequence moves into its slot with its pages."""
        known = list(sequence.token_ids) if sequence.sampling.has_penalties else ()
        self._setups.append(
            SlotSetup(sequence.slot, sequence.sampling, sequence.max_length, known, sequence.num_prompt_tokens)
        )
        self.add_grant(sequence, 0)
        self._copies += copies

    def add_grant(self, sequence: Sequence, first: int) -> None:
        """A sequence has new pages from index ``first`` on."""
        self._grants.append(PageGrant(sequence.slot, first, sequence.pages[first:]))

    def add_mask(self, slot: int, constraint: Constraint) -> str | None:
        """Add the tokens that a constraint allows the slot to sample; return the message of a constraint that fails."""
        try:
            words = constraint.mask()
        except Exception as error:  # a constraint that fails ends its own sequence only
            return str(error)
        if words is not None:
            self._masks.append(SlotMask(slot, words))
        return None

    def add_chunk(self, sequence: Sequence, end: int) -> bool:
        """A sequence's known tokens up to position ``end``; returns whether it samples behind them."""
        start = sequence.num_computed
        samples = end == len(sequence.token_ids) and sequence.pooling is None
        targets = None
        if sequence.wants_prompt_logprobs and start < sequence.num_prompt_tokens:
            behind = sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt_tokens)]
            targets = behind + [-1] * (end - start - len(behind))
        pooling = None if sequence.pooling is None else _chunk_pooling(sequence, end)
        self._prefill.append(PrefillRow(sequence.slot, start, sequence.token_ids[start:end], samples, targets, pooling))
        self._prefilled.append(sequence)
        if samples:
            self.sampled.append(sequence)
        return samples

    def build(self, number: int) -> tuple[StepPlan, Flight]:
        """The plan, as step ``number``, and its record."""
        rows = self.slots, self.positions, self.tokens, self._prefill
        plan = StepPlan(number, self._setups, self._grants, *rows, self._copies, self._masks)
        return plan, Flight(number, self.sampled, self._prefilled)


def _chunk_pooling(sequence: Sequence, end: int) -> ChunkPooling | None:
    """What a pooled sequence's chunk up to position ``end`` adds to the sum: the last token alone, or all."""
    start, is_last = sequence.num_computed, end == len(sequence.token_ids)
    if sequence.pooling == "last":
        return ChunkPooling(1, True, True) if is_last else None
    return ChunkPooling(end - start, start == 0, is_last)
