"""Selects the sequences that run next and their pages: iteration-level continuous batching (Orca, OSDI '22)."""

import bisect
from collections import deque

from jaxserve.outputs import FinishReason
from jaxserve.scheduling.context_pages import ContextPages
from jaxserve.scheduling.drafts import DraftProposer, add_drafts, drop_rejected
from jaxserve.scheduling.endings import find_ending
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import ON_DEVICE, Row, SchedulerLimits, StepPlan
from jaxserve.scheduling.plan_draft import Completion, Flight, PlanDraft
from jaxserve.scheduling.sequence import Sequence


class SequenceQueues:
    """Sequences that wait for a slot and sequences that have one, each in order of priority, then of arrival.

    Attributes:
        waiting: Sequences without a slot, in order.
        running: Sequences with a slot, in order.

    Args:
        num_slots: Sequences that can run at once.
    """

    def __init__(self, num_slots: int):
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._num_arrivals = 0

    @property
    def has_free_slot(self) -> bool:
        """Whether one more sequence can run."""
        return bool(self._free_slots)

    def number(self, sequence: Sequence) -> None:
        """Note that a new sequence, or a follower of one, arrives after all others."""
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1

    def wait(self, *sequences: Sequence) -> None:
        """Put sequences in their places among those that wait."""
        for sequence in sequences:
            bisect.insort(self.waiting, sequence, key=_rank)

    def run_first(self) -> None:
        """Give the first sequence that waits a slot; one must be free."""
        sequence = self.waiting.popleft()
        sequence.slot = self._free_slots.pop()
        bisect.insort(self.running, sequence, key=_rank)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue, and its slot from it; a follower that has not been added is in none."""
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        elif sequence in self.waiting:
            self.waiting.remove(sequence)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival


class Scheduler:
    """Owner of every sequence's state.

    Attributes:
        waiting: Sequences without a slot, in order.
        running: Sequences with a slot, in order.
        admitted: The sequences that the latest plan set up, in the order of its setups.
        pages: Moves pages between the allocator and sequences; counts hits of the prefix cache.
        num_preemptions: How often a sequence lost its pages.
        num_decode_rows: Rows planned that continue a completion.
    """

    def __init__(self, limits: SchedulerLimits, allocator: PageAllocator, proposer: DraftProposer | None = None):
        self.limits = limits
        self.allocator = allocator
        self.pages = ContextPages(allocator, limits.windows)
        self._queues = SequenceQueues(limits.max_num_seqs)
        self.waiting, self.running = self._queues.waiting, self._queues.running
        self.admitted: list[Sequence] = []
        self.num_preemptions = 0
        self.num_decode_rows = 0
        self._proposer = proposer
        self._decode_rows = [Row(slot, ON_DEVICE, [ON_DEVICE], 1) for slot in range(limits.max_num_seqs)]
        self._in_flight: deque[Flight] = deque()
        self._latest_plan: StepPlan | None = None

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence and its followers; its pages at ``max_length`` must fit the pool."""
        for one in (sequence, *sequence.followers):
            assert self.pages.most_pages(one.max_length) <= self.allocator.num_pages, "too long for the pool"
            self._queues.number(one)
        self._queues.wait(sequence)

    def schedule(self) -> StepPlan | None:
        """Plans the next step, or None where nothing can run before pending tokens are known."""
        self.allocator.cache.settle()
        draft = PlanDraft()
        self._schedule_decodes(draft)
        self.num_decode_rows += (num_decodes := len(draft.rows))
        budget = self.limits.max_num_batched_tokens - num_decodes
        for sequence in draft.half_prompts:
            budget -= self._schedule_chunk(sequence, budget, draft) if budget > 0 else 0
        while draft.half_prompts and not draft.rows and not self._in_flight:  # each waits for pages of the others
            self._preempt_last(draft)
            budget -= self._schedule_chunk(self.running[0], budget, draft)
        self.admitted = []
        if not draft.preempts:
            self._admit(budget, draft)
            if self._proposer is not None:
                add_drafts(draft, num_decodes, self._proposer, self.limits, self.pages)
        if not draft.rows:
            return None
        self._latest_plan = plan = draft.build(self._latest_plan)
        self._in_flight.append(Flight(plan.number, draft.sequences))
        return plan

    def complete(self, plan: StepPlan, tokens: list[list[int]]) -> Completion:
        """Append the tokens that a step sampled; steps complete in their order. Finished sequences free their pages.

        Args:
            plan: The step.
            tokens: The tokens of each row; none for a row that does not sample, or whose logits leave no token.
        """
        flight = self._in_flight.popleft()
        assert flight.number == plan.number, f"step {plan.number} completed, step {flight.number} expected"
        sampled: list[tuple[Sequence, int, list[int]]] = []
        rows, has_drafts = plan.rows, plan.columns.has_drafts
        completion = Completion(sampled, [], flight.scored(plan), self._end_pooled(flight.pooled(plan)), has_drafts)
        if has_drafts:
            drop_rejected(plan, flight, tokens, self.pages)
            rows = dict(zip(plan.first_samples, plan.rows, strict=True))
        for first, sequence, new in zip(plan.first_samples, flight.sequences, tokens, strict=True):
            if len(new) == 1 and sequence.finish_reason is None:
                token, token_ids = new[0], sequence.token_ids
                if len(token_ids) + 1 < sequence.next_check and token not in sequence.stop_ids:  # nearly always
                    sequence.num_pending -= 1
                    token_ids.append(token)
                    sampled.append((sequence, first, new))
                    continue
            if not rows[first].num_samples or sequence.finish_reason is not None:
                continue
            sequence.num_pending -= len(new) or 1
            if new:
                sampled.append((sequence, first, self._append(sequence, new)))
            else:
                completion.failed.append(sequence)
        for sequence in completion.failed:
            self.finish(sequence, "error")
        return completion

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None, *, replaces: bool = False
    ) -> None:
        """Finish a sequence, waiting or running, and free what it holds.

        A sequence that has finished keeps its first reason unless this one ``replaces`` it: its last token may have
        reached ``max_length`` and completed a stop string. What it computed stays in the prefix cache, except for the
        reason "error" (then also if it finished before).
        """
        if reason == "error":
            self.pages.cache.forget(sequence)
        is_first = sequence.finish_reason is None
        if is_first or replaces:
            sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if not is_first:
            return
        self.pages.release(sequence)
        self._queues.leave(sequence)
        self._queues.wait(*sequence.release_followers())

    def rollback(self, sequence: Sequence, length: int) -> None:
        """Shrink a context to its first ``length`` tokens; steps in flight add nothing to it.

        An unfinished sequence gives its pages back, waits as a preempted one does, and samples its next token after
        those ``length``, which are the prompt at least. It has no constraint: that would have to go back too.
        """
        assert sequence.num_prompt_tokens <= length <= len(sequence.token_ids) and sequence.constraint is None
        for flight in self._in_flight:
            flight.drop(sequence)
        self.pages.cut(sequence, length)
        sequence.num_pending = 0
        if sequence.slot >= 0:
            self._requeue(sequence)

    def _end_pooled(self, pooled: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Ends sequences whose hidden states are summed up; returns those that had not ended before, and their rows."""
        found = [one for one in pooled if one[0].finish_reason is None]
        for sequence, _ in pooled:
            sequence.num_pending -= 1
            self.finish(sequence, "stop")
        return found

    def _append(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """Append tokens that may have consequences; return those up to the one that finishes the sequence."""
        token_ids, stop_ids, cache = sequence.token_ids, sequence.stop_ids, self.pages.cache
        num_kept = len(tokens)
        for count, token in enumerate(tokens, 1):
            token_ids.append(token)
            if len(token_ids) < sequence.next_check and token not in stop_ids:
                continue
            ending = find_ending(sequence, token)
            if ending is not None:
                sequence.error = ending.error
                self.finish(sequence, ending.reason, ending.stop_reason)
                num_kept = count
                break
            if sequence.slot >= 0:
                cache.register(sequence, len(token_ids) - 1)
            if sequence.constraint is None and sequence.repetition is None:
                sequence.next_check = min(sequence.max_length, cache.page_end(sequence) + 1)
        self._queues.wait(*sequence.release_followers())
        return tokens[:num_kept]

    def _schedule_decodes(self, draft: PlanDraft) -> None:
        """Add a row for each sequence that decodes, in order."""
        rows, sequences, decode_rows = draft.rows, draft.sequences, self._decode_rows
        for sequence in self.running:  # loses sequences at its end only
            position = sequence.num_computed
            is_plain = position < sequence.decodes_until and sequence.constraint is None
            if not is_plain and not self._prepare_decode(sequence, draft):
                continue
            slot = sequence.slot
            is_known = not sequence.num_pending
            rows.append(Row(slot, position, [sequence.token_ids[position]], 1) if is_known else decode_rows[slot])
            sequences.append(sequence)
            sequence.num_computed = position + 1
            sequence.num_pending += 1

    def _prepare_decode(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Whether a sequence can decode; it gets a page if it needs one, and its mask if it is constrained."""
        if not sequence.decodes_until:
            if not sequence.num_pending:  # else its vector is in flight
                draft.half_prompts.append(sequence)
            return False
        constraint = sequence.constraint
        if sequence.num_computed + 1 >= sequence.max_length or (constraint is not None and sequence.num_pending):
            return False
        if sequence.num_computed >= sequence.decodes_until and not self._grow(sequence, draft):
            return False
        sequence.error = draft.add_mask(sequence)
        return True

    def _grow(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """One more page; the last running sequences give theirs up for it. False where this one had to."""
        while not self.pages.grow(sequence):
            if self._preempt_last(draft) is sequence:
                return False
        draft.add_grants(self.pages.grants(sequence))
        return True

    def _schedule_chunk(self, sequence: Sequence, budget: int, draft: PlanDraft) -> int:
        """The next chunk of a sequence's known tokens, at most ``budget``; returns its length (0: no page is free)."""
        start = sequence.num_computed
        end = min(len(sequence.token_ids), start + min(budget, self.limits.long_prefill_token_threshold or budget))
        end = self.pages.reach(sequence, end)
        draft.add_grants(self.pages.grants(sequence))
        if end <= start:
            return 0
        samples = draft.add_chunk(sequence, end)
        sequence.num_computed = end
        self.pages.cache.register(sequence, end, with_last=samples)
        if samples:
            self.pages.note_room(sequence)
            sequence.error = draft.add_mask(sequence)
        if end == len(sequence.token_ids):
            sequence.num_pending += 1
        return end - start

    def _admit(self, budget: int, draft: PlanDraft) -> None:
        """Waiting sequences in order, while slots, tokens and pages last."""
        while self.waiting and budget > 0 and self._queues.has_free_slot:
            sequence = self.waiting[0]
            copies = None if sequence.num_pending else self.pages.take(sequence)
            if copies is None:
                return
            self._queues.run_first()
            self.admitted.append(sequence)
            draft.add_setup(sequence, copies)
            budget -= self._schedule_chunk(sequence, budget, draft)

    def _preempt_last(self, draft: PlanDraft) -> Sequence:
        """Preempt the last running sequence, and return it."""
        draft.preempts, victim = True, self.running[-1]
        self._requeue(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        return victim

    def _requeue(self, sequence: Sequence) -> None:
        """Take slot and pages of a running sequence; it waits in its place to be computed again."""
        self.pages.release(sequence)
        self._queues.leave(sequence)
        self._queues.wait(sequence)
