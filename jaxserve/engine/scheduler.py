"""Which sequences run next, and on which pages: iteration-level continuous batching (Orca, OSDI '22).

First come, first served. Every running sequence that decodes takes a row in each step; chunks of waiting prompts fill
what is left of the token budget (chunked prefill, arXiv:2308.16369). A sequence is admitted when pages for its whole
context are
free, so that only decoding ever needs more; when none is left, the sequence admitted last gives its pages up and is
computed
again later (preemption by recompute). The sequence admitted first is never the victim of another, and a pool always
holds the longest sequence it accepts: so there is always one that can go on.

Steps overlap: a plan is made before the tokens of the plan before are known. A sequence counts such tokens as
pending; its next input is then the slot's latest token, which is on the device already.
"""

import dataclasses
from collections import deque
from typing import NamedTuple

from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.plan import PageGrant, PrefillRow, SlotSetup, StepPlan
from jaxserve.engine.sequence import Sequence
from jaxserve.outputs import FinishReason


@dataclasses.dataclass(frozen=True)
class SchedulerLimits:
    """Most sequences in a step, and most query tokens in a step (at least one for each sequence)."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Completion(NamedTuple):
    """What a step turned out to be.

    Attributes:
        sampled: Each sequence that got a token and had not ended before, its row, and the token.
        scored: Each sequence a chunk of whose prompt was scored, the chunk, and the step's first query token of it.
    """

    sampled: list[tuple[Sequence, int, int]]
    scored: list[tuple[Sequence, PrefillRow, int]]


class _Flight(NamedTuple):
    """A launched step: its number, the sequences of its sampling rows, and those of its prefill rows, in order."""

    number: int
    sampled: list[Sequence]
    prefilled: list[Sequence]


class Scheduler:
    """Owner of the queues and of every sequence's state."""

    def __init__(self, limits: SchedulerLimits, allocator: PageAllocator):
        self.limits = limits
        self.allocator = allocator
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[_Flight] = deque()
        self._next_step = 0

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence; its pages at ``max_length`` must fit the pool."""
        needed = self.allocator.pages_for(sequence.max_length)
        assert needed <= self.allocator.num_pages, f"{needed} pages needed, the pool has {self.allocator.num_pages}"
        self.waiting.append(sequence)

    def schedule(self) -> StepPlan | None:
        """Plans the next step, or None where nothing can run before pending tokens are known."""
        plan = StepPlan(self._next_step, [], [], [], [], [], [])
        flight = _Flight(plan.number, [], [])
        preempted = self._schedule_decodes(plan, flight)
        budget = self.limits.max_num_batched_tokens - len(plan.decode_slots)
        for sequence in self.running:
            if budget > 0 and not sequence.is_decoding() and sequence.num_computed < len(sequence.token_ids):
                budget -= self._schedule_chunk(sequence, budget, plan, flight)
        if not preempted:
            self._admit(budget, plan, flight)
        if not plan.decode_slots and not plan.prefill:
            return None
        self._next_step += 1
        self._in_flight.append(flight)
        return plan

    def complete(self, plan: StepPlan, tokens: list[int]) -> Completion:
        """Learns the tokens a step sampled, in the order of the steps; sequences that a token ends give up their pages.

        Args:
            plan: The step.
            tokens: Its sampled token for each row; those of rows that do not sample are not looked at.
        """
        flight = self._in_flight.popleft()
        assert flight.number == plan.number, f"step {plan.number} completed, step {flight.number} expected"
        num_decode = first_token = len(plan.decode_slots)
        rows = [*range(num_decode), *(num_decode + i for i, chunk in enumerate(plan.prefill) if chunk.samples)]
        completion = Completion([], [])
        for sequence, chunk in zip(flight.prefilled, plan.prefill, strict=True):
            if chunk.targets is not None and sequence.finish_reason is None:
                completion.scored.append((sequence, chunk, first_token))
            first_token += len(chunk.token_ids)
        for sequence, row in zip(flight.sampled, rows, strict=True):
            sequence.num_pending -= 1
            if sequence.finish_reason is None:
                token = tokens[row]
                sequence.token_ids.append(token)
                self._check_end(sequence, token)
                completion.sampled.append((sequence, row, token))
        return completion

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence, running or waiting, and frees what it holds; ending it twice is without effect."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def _check_end(self, sequence: Sequence, token: int) -> None:
        length = len(sequence.token_ids)
        if token in sequence.stop_ids and length >= sequence.min_length:
            self.finish(sequence, "stop", sequence.stop_ids[token])
        elif length >= sequence.max_length:
            self.finish(sequence, "length")

    def _schedule_decodes(self, plan: StepPlan, flight: _Flight) -> bool:
        """A row for each sequence that decodes, oldest first; returns whether one lost its pages for it."""
        preempted = False
        page_size = self.allocator.page_size
        i = 0
        while i < len(self.running):
            sequence = self.running[i]
            i += 1
            position = sequence.num_computed
            if not sequence.is_decoding() or sequence.num_tokens >= sequence.max_length:
                continue
            if position >= len(sequence.pages) * page_size:
                while (pages := self.allocator.allocate(1)) is None:
                    preempted = True
                    if self._preempt_last() is sequence:
                        return True
                plan.grants.append(PageGrant(sequence.slot, len(sequence.pages), pages))
                sequence.pages += pages
            plan.decode_slots.append(sequence.slot)
            plan.decode_positions.append(position)
            plan.decode_tokens.append(-1 if sequence.num_pending else sequence.token_ids[position])
            sequence.num_computed = position + 1
            sequence.num_pending += 1
            flight.sampled.append(sequence)
        return preempted

    def _schedule_chunk(self, sequence: Sequence, budget: int, plan: StepPlan, flight: _Flight) -> int:
        """The next chunk of a sequence's known tokens, at most ``budget``; returns its length."""
        start = sequence.num_computed
        end = min(len(sequence.token_ids), start + budget)
        samples = end == len(sequence.token_ids)
        targets = None
        if sequence.wants_prompt_logprobs and start < sequence.num_prompt_tokens:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            targets = [prompt[i + 1] if i + 1 < len(prompt) else -1 for i in range(start, end)]
        plan.prefill.append(PrefillRow(sequence.slot, start, sequence.token_ids[start:end], samples, targets))
        flight.prefilled.append(sequence)
        sequence.num_computed = end
        if samples:
            sequence.num_pending += 1
            flight.sampled.append(sequence)
        return end - start

    def _admit(self, budget: int, plan: StepPlan, flight: _Flight) -> None:
        """Waiting sequences in order, while slots, tokens and pages last."""
        while self.waiting and budget > 0 and self._free_slots:
            sequence = self.waiting[0]
            if sequence.num_pending:
                return
            pages = self.allocator.allocate(self.allocator.pages_for(len(sequence.token_ids)))
            if pages is None:
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.slot = self._free_slots.pop()
            sequence.pages = pages
            plan.setups.append(SlotSetup(sequence.slot, sequence.sampling, sequence.max_length))
            plan.grants.append(PageGrant(sequence.slot, 0, pages))
            budget -= self._schedule_chunk(sequence, budget, plan, flight)

    def _preempt_last(self) -> Sequence:
        """Takes slot and pages of the sequence admitted last; it waits first in line to be computed again."""
        victim = self.running.pop()
        self._release(victim)
        victim.num_computed = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _release(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.pages = []
        sequence.slot = -1
