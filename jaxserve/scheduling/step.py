"""A step from the making of its plan to its completion."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.api.errors import own_failure
from jaxserve.scheduling.draft_lengths import Proposed
from jaxserve.scheduling.endings import constraint_failure
from jaxserve.scheduling.plan import ChunkPooling, ChunkTargets, PageCopy, SlotMask, SlotSetup, StepPlan
from jaxserve.scheduling.sequence import Constraint, Sequence


class ScoredChunk(NamedTuple):
    """A completed row with prompt logprobs.

    Attributes:
        sequence: The sequence.
        start: Position of the row's first token.
        first: Index of that token among the query tokens of the step.
        targets: The token after each token of the row (-1: none).
    """

    sequence: Sequence
    start: int
    first: int
    targets: list[int]


class SequenceError(NamedTuple):
    """A sequence whose row could not be built."""

    sequence: Sequence
    error: Exception


@dataclasses.dataclass(eq=False)
class Step:
    """A step of a scheduler: its plan in the making, in flight, and what it did once it has completed.

    What it did counts for the sequences that had not finished before.

    Attributes:
        plan: The plan.
        due: Running sequences that may have a decode row, in order.
        max_rows: Most rows.
        max_members: Most rows that sample or that admit a sequence.
        num_runnable: Number of running sequences with tokens left to plan that do not wait for the host.
        sequences: Sequence of each row.
        partial_prefills: Running sequences whose prompts are only partly computed.
        preempts: Whether a sequence was preempted.
        num_again: Tokens that decode rows compute again, as rejected drafts were in a state; see ``draft_states``.
        num_members: Number of rows that sample or that admit a sequence.
        is_ahead: Whether its decode rows follow tokens that steps in flight sample; set with a proposer of drafts only.
        waits: Whether the next plan should wait for its tokens, to have better drafts.
        proposed: What was proposed for each sequence, if any row has drafts.
        errors: Sequences whose row could not be built as planned; they fail once the step completes.
        completed_s: When it completed, in seconds of ``time.monotonic()``; 0 before.
        sampled: Sequences with new tokens.
        started: Those of them whose tokens are the first.
        previous_s: The time of the previous token of each of the others.
        num_new_tokens: Number of their new tokens.
        scored: Rows with prompt logprobs.
        pooled: Each sequence that finished because its pooling is complete, and the index of its row.
        finished: Other sequences that finished. The reason is "error" without an ``error`` if sampling failed.
    """

    plan: StepPlan
    due: list[Sequence]
    max_rows: int
    max_members: int
    num_runnable: int
    sequences: list[Sequence] = dataclasses.field(default_factory=list[Sequence])
    partial_prefills: list[Sequence] = dataclasses.field(default_factory=list[Sequence])
    preempts: bool = False
    num_again: int = 0
    num_members: int = 0
    is_ahead: bool = False
    waits: bool = False
    proposed: dict[Sequence, Proposed] = dataclasses.field(default_factory=dict[Sequence, Proposed])
    errors: list[SequenceError] = dataclasses.field(default_factory=list[SequenceError])
    completed_s: float = 0.0
    sampled: list[Sequence] = dataclasses.field(default_factory=list[Sequence])
    started: list[Sequence] = dataclasses.field(default_factory=list[Sequence])
    previous_s: list[float] = dataclasses.field(default_factory=list[float])
    num_new_tokens: int = 0
    scored: list[ScoredChunk] = dataclasses.field(default_factory=list[ScoredChunk])
    pooled: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list[tuple[Sequence, int]])
    finished: list[Sequence] = dataclasses.field(default_factory=list[Sequence])

    def has_room(self, is_member: bool) -> bool:
        """Whether one more row fits; ``is_member`` if it samples or admits a sequence."""
        return self.plan.num_rows < self.max_rows and (not is_member or self.num_members < self.max_members)

    def add_setup(self, sequence: Sequence, copies: list[PageCopy]) -> None:
        """Add the slot assignment and page copies of an admitted sequence."""
        known = tuple(sequence.token_ids) if sequence.sampling.has_penalties else ()
        self.plan.setups.append(
            SlotSetup(
                sequence.slot,
                sequence.sampling,
                sequence.max_length,
                known,
                sequence.num_prompt_tokens,
                sequence.state_page,
            )
        )
        self.plan.copies += copies
        if sequence.state_source not in (-1, sequence.state_page):
            self.plan.state_copies.append(PageCopy(sequence.state_source, sequence.state_page))

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        """Fail a sequence, but none of the others, once the step completes."""
        self.errors.append(SequenceError(sequence, own_failure(error)))

    def add_mask(self, slot: int, constraint: Constraint) -> Exception | None:
        """Add the token mask of a constrained sequence; return the exception if its constraint fails, else None."""
        try:
            words = constraint.mask()
        except BaseException as error:  # a failing constraint must not stop the other sequences
            return constraint_failure(error)
        if words is not None:
            self.plan.masks.append(SlotMask(slot, words))
        return None

    def add_draft_masks(self, slot: int, masks: Iterable[bytes | None]) -> None:
        """Add the token masks after each draft of a constrained sequence's row; None allows all."""
        self.plan.masks += [SlotMask(slot, words, index) for index, words in enumerate(masks, 1) if words is not None]

    def add_chunk(self, sequence: Sequence, end: int) -> bool:
        """Add a row of a sequence's known tokens up to position ``end``; return whether it samples."""
        start = sequence.num_computed
        samples = end == len(sequence.token_ids) and sequence.request.pooling is None
        row = self.plan.num_rows
        self.plan.add_row(sequence.slot, start, sequence.token_ids[start:end], int(samples))
        self.sequences.append(sequence)
        if sequence.request.pooling is not None or sequence.request.params.prompt_logprobs is not None:
            try:
                self.plan.targets += _targets(sequence, end, row)
                self.plan.pooling += _chunk_pooling(sequence, end, row)
            except BaseException as error:
                self.fail(sequence, error)
        return samples

    def scored_rows(self) -> list[ScoredChunk]:
        """Return the completed rows with prompt logprobs of sequences that have not finished."""
        return [
            ScoredChunk(self.sequences[row], self.plan.starts[row], sum(self.plan.lengths[:row]), targets)
            for row, targets in self.plan.targets
            if self.sequences[row].finish_reason is None
        ]

    def pooled_rows(self) -> list[tuple[Sequence, int]]:
        """Return each sequence whose pooling the step completes, and the index of its row."""
        return [(self.sequences[pooling.row], pooling.row) for pooling in self.plan.pooling if pooling.is_last]


def _targets(sequence: Sequence, end: int, row: int) -> list[ChunkTargets]:
    """Return the tokens whose logprobs a chunk up to position ``end`` computes, if any."""
    start = sequence.num_computed
    if sequence.request.params.prompt_logprobs is None or sequence.index or start >= sequence.num_prompt_tokens:
        return []
    following = sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt_tokens)]
    return [ChunkTargets(row, following + [-1] * (end - start - len(following)))]


def _chunk_pooling(sequence: Sequence, end: int, row: int) -> list[ChunkPooling]:
    """Return what a chunk up to position ``end`` adds to the sum, if anything: its last token or all tokens."""
    if sequence.request.pooling is None:
        return []
    start, is_last = sequence.num_computed, end == len(sequence.token_ids)
    if sequence.request.pooling.pooling == "last":
        return [ChunkPooling(row, 1, True, True)] if is_last else []
    return [ChunkPooling(row, end - start, start == 0, is_last)]
