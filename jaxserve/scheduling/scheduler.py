"""Plan each step's sequences, tokens and pages: iteration-level continuous batching (Orca, OSDI '22)."""

import itertools
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items

from jaxserve.api.outputs import FinishReason
from jaxserve.scheduling.context_pages import ContextPages
from jaxserve.scheduling.context_states import context_states
from jaxserve.scheduling.draft_lengths import DraftLengths
from jaxserve.scheduling.drafts import DraftCounts, add_drafts, drop_rejected, finish_drafts, measure_step
from jaxserve.scheduling.endings import Ending, find_ending, find_stop_string
from jaxserve.scheduling.microbatches import Microbatches
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import SchedulerLimits, StepPlan
from jaxserve.scheduling.proposers.proposer import DraftProposer
from jaxserve.scheduling.queues import SequenceQueues
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step import Step


class Scheduler:
    """Plans steps, applies their results, and owns the state of every sequence.

    Attributes:
        waiting: Sequences without a slot, in order.
        running: Sequences with a slot, in order.
        pages: Allocates the pages of sequences; counts prefix cache hits.
        num_preemptions: Number of preemptions so far.
        num_decode_rows: Number of decode rows planned so far.
        draft_counts: Counts of the drafts so far.
        draft_lengths: Chooses the number of drafts of each row.
        num_runnable: Number of running sequences that had tokens left to plan, not waiting for the host, when
            ``schedule`` was last called, and of those it admitted.
        waits: Whether the next plan should wait for the tokens of the latest one, as its drafts are then right far more
            often than those that guess past tokens in flight.
        proposer: Proposes draft tokens; None without speculative decoding, and after the proposer has failed.
    """

    def __init__(self, limits: SchedulerLimits, allocator: PageAllocator, proposer: DraftProposer | None = None):
        self.limits, self.allocator = limits, allocator
        states = context_states(limits, allocator)
        self.pages = ContextPages(allocator, limits.windows, limits.shares_parts, limits.num_lookahead, states)
        self._queues = SequenceQueues(limits.max_num_seqs)
        self.waiting, self.running = self._queues.waiting, self._queues.running
        self.num_preemptions = self.num_decode_rows = 0
        self.draft_counts = DraftCounts()
        self.draft_lengths = DraftLengths.within(limits)
        self.num_runnable = 0
        self.waits = False
        self.proposer = proposer
        self._arrivals = itertools.count()
        self._in_flight: deque[Step] = deque()
        self._microbatches = Microbatches(limits.num_stages, limits.max_num_seqs)

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting sequences."""
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence and its followers; each must fit into the pages at its ``max_length``."""
        for added in (sequence, *sequence.followers):
            added.arrival = next(self._arrivals)
        self._queues.enqueue(sequence)

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Plan the next step; return None if nothing can run now: a bubble, if the pipeline has several stages.

        Sequences may be runnable later: once a step in flight completes or, with several stages, in one of the next
        plans. Call the schedulers of a replica equally often: they number their plans by calls.

        Args:
            now: Time in seconds of ``time.monotonic()``.
        """
        self.pages.settle()
        step = self._microbatches.begin(self.running, len(self.waiting))
        self._schedule_decodes(step)
        num_decodes = step.num_members
        self.num_decode_rows += num_decodes
        budget = self.limits.max_num_batched_tokens - num_decodes - step.num_again
        if step.partial_prefills:
            budget = self._schedule_prefills(budget, step)
        if not step.preempts:
            self._admit(budget, step, now)
        if self.limits.max_draft_tokens:
            self.proposer = add_drafts(step, num_decodes, self.proposer, self.draft_lengths, self.limits, self.pages)
        self.num_runnable = step.num_runnable + len(step.plan.setups)
        self.waits = step.waits
        if not step.sequences:
            return None
        self._microbatches.add(step)
        self._in_flight.append(step)
        return step.plan

    def complete(
        self, plan: StepPlan, tokens: list[list[int]], errors: Items[tuple[int, Exception]] = (), now: float = 0.0
    ) -> Step:
        """Append the tokens that a step sampled, and finish the sequences that end with them; return the step.

        Args:
            plan: Plan of the oldest step in flight.
            tokens: Tokens of each row; empty if the row does not sample, or if sampling failed.
            errors: Rows that could not be built, each with the reason.
            now: Time of the tokens, in seconds of ``time.monotonic()``.
        """
        step = self._in_flight.popleft()
        assert step.plan.number == plan.number, f"step {plan.number} completed, step {step.plan.number} expected"
        step.completed_s = now
        if step.errors or errors or plan.pooling or plan.targets or plan.has_drafts:
            self._complete_special(step, tokens, errors)
        sampled, previous_s, num_more = step.sampled, step.previous_s, 0
        for sequence, num_samples, new in zip(step.sequences, plan.num_samples, tokens, strict=True):
            if not num_samples or sequence.finish_reason is not None:
                continue
            if not new:
                sequence.num_pending -= 1
                self._end(sequence, Ending("error", error=sequence.error), step.finished)
                continue
            sampled.append(sequence)
            if sequence.last_token_s:
                previous_s.append(sequence.last_token_s)
            else:
                step.started.append(sequence)
                sequence.first_token_s = now
            sequence.last_token_s = now
            sequence.num_pending -= len(new)
            token, token_ids = new[0], sequence.token_ids
            if len(new) == 1 and len(token_ids) + 1 < sequence.next_check and token not in sequence.stop_ids:
                token_ids.append(token)
                if sequence.stop_strings is not None:
                    self._end(sequence, find_stop_string(sequence, 1, None), step.finished)
            else:
                num_more += self._append(sequence, new, step.finished) - 1
        step.num_new_tokens = len(sampled) + num_more
        if self.limits.max_draft_tokens:
            measure_step(step, self.draft_lengths)
        return step

    def _complete_special(self, step: Step, tokens: list[list[int]], errors: Items[tuple[int, Exception]]) -> None:
        """Complete what few steps have: rows that failed, rows that are pooled or scored, and drafts."""
        plan = step.plan
        if step.errors or errors:
            failed = [*step.errors, *((step.sequences[row], error) for row, error in errors)]
            self._fail_rows(failed, step.finished)
        if plan.pooling or plan.targets:
            step.scored, step.pooled = step.scored_rows(), self._end_pooled(step.pooled_rows())
        if plan.has_drafts:
            drop_rejected(step, tokens, self.pages, self.draft_counts, self.draft_lengths)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Finish a waiting or running sequence and free its slot and pages.

        A finished sequence keeps its reason. Its pages stay in the prefix cache unless the reason is "error", which
        removes them even if the sequence had finished before.
        """
        if reason == "error":
            self.pages.forget(sequence)
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self.pages.release(sequence)
        self._queues.remove(sequence)
        if self.proposer is not None and not finish_drafts(self.proposer, sequence):
            self.proposer = None
        if sequence.followers:
            self._queues.enqueue(*sequence.release_followers())

    def requeue_all(self) -> None:
        """Requeue every running sequence, as if preempted; no step may be in flight."""
        assert not self._in_flight, "steps are in flight"
        for sequence in reversed(self.running[:]):
            self._requeue(sequence)
            sequence.last_plan = -1

    def renewed(self) -> "Scheduler":
        """Return a scheduler with the same limits and counters, without sequences, and with all pages free."""
        made = Scheduler(self.limits, self.allocator.renewed())
        made.replace([self])
        made.take_proposer(self)
        return made

    def take_proposer(self, other: "Scheduler") -> None:
        """Go on with the proposer of a scheduler that this one replaces; it forgets the sequences of that one."""
        self.proposer = other.proposer
        if self.proposer is not None:
            for sequence in (*other.waiting, *other.running):
                self.proposer.forget(sequence)

    def abandon(self, sequence: Sequence) -> None:
        """Finish a sequence of a scheduler that has been replaced, unless it has finished."""
        sequence.finish_reason = sequence.finish_reason or "error"
        sequence.slot, sequence.tables, sequence.followers = -1, [], []

    def replace(self, schedulers: Iterable["Scheduler"]) -> None:
        """Continue the counters of schedulers that this one replaces."""
        for other in schedulers:
            self.num_preemptions += other.num_preemptions
            self.num_decode_rows += other.num_decode_rows
            self.draft_counts.add(other.draft_counts)
            self.pages.continue_counts(other.pages)

    def _fail_rows(self, failed: Items[tuple[Sequence, Exception]], finished: list[Sequence]) -> None:
        """Finish the sequences whose rows could not be built, unless they have finished."""
        for sequence, error in failed:
            if sequence.finish_reason is None:
                self._end(sequence, Ending("error", error=error), finished)

    def _end_pooled(self, pooled: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Finish sequences whose pooling is complete; return those that had not finished before, and their rows."""
        finished = [(sequence, row) for sequence, row in pooled if sequence.finish_reason is None]
        for sequence, _ in pooled:
            sequence.num_pending -= 1
            self.finish(sequence, "stop")
        return finished

    def _end(self, sequence: Sequence, ending: Ending | None, finished: list[Sequence]) -> None:
        """Finish a sequence and add it to ``finished``, unless ``ending`` is None."""
        if ending is not None:
            sequence.error = ending.error
            self.finish(sequence, ending.reason, ending.stop_reason)
            finished.append(sequence)

    def _append(self, sequence: Sequence, tokens: list[int], finished: list[Sequence]) -> int:
        """Append tokens up to the one that finishes the sequence, if one does; return the number of those kept."""
        token_ids, cache, ending, num_before = sequence.token_ids, self.pages.cache, None, len(sequence.token_ids)
        if num_before + len(tokens) < sequence.next_check and sequence.stop_ids.keys().isdisjoint(tokens):
            token_ids += tokens
            if sequence.stop_strings is None:
                return len(tokens)
        else:
            ending = self._append_checked(sequence, tokens)
        if sequence.stop_strings is not None:
            ending = find_stop_string(sequence, len(token_ids) - num_before, ending)
        if ending is None:
            if sequence.slot >= 0:
                cache.register(sequence, len(token_ids) - 1)
            if sequence.constraint is None and sequence.repetition is None:
                sequence.next_check = min(sequence.max_length, cache.next_page_end(sequence) + 1)
            if sequence.followers:
                self._queues.enqueue(*sequence.release_followers())
        self._end(sequence, ending, finished)
        return len(token_ids) - num_before

    def _append_checked(self, sequence: Sequence, tokens: list[int]) -> Ending | None:
        """Append tokens up to the one that finishes the sequence; return how it does, or None if it continues."""
        token_ids = sequence.token_ids
        for token in tokens:
            token_ids.append(token)
            if len(token_ids) >= sequence.next_check or token in sequence.stop_ids:
                ending = find_ending(sequence, token)
                if ending is not None:
                    return ending
        return None

    def _schedule_decodes(self, step: Step) -> None:
        """Add a row for each sequence that is due and can decode, in order."""
        plan, sequences = step.plan, step.sequences
        slots, known = list[int](), list[tuple[int, int, int]]()
        for sequence in step.due:  # preemption removes sequences from the end of ``running`` only
            position = sequence.num_computed
            never_waits = sequence.constraint is None and (sequence.num_pending < 2 or not sequence.sampling.banned_ids)
            is_plain = never_waits and position < sequence.decode_limit and sequence.restart < 0
            if not is_plain and not self._prepare_decode(sequence, step):
                continue
            if not sequence.num_pending:
                known.append((len(slots), position, sequence.token_ids[position]))
            slots.append(sequence.slot)
            sequences.append(sequence)
            sequence.num_computed = position + 1
            sequence.num_pending += 1
        step.num_members = len(slots)
        plan.add_decode_rows(slots)
        for row, start, token in known:
            plan.starts[row], plan.token_ids[row] = start, token

    def _prepare_decode(self, sequence: Sequence, step: Step) -> bool:
        """Add the page and the mask that a sequence needs to decode; return whether it can."""
        if not sequence.decode_limit:
            if not sequence.num_pending and sequence.slot >= 0:  # else its pooled vector is in flight, or preempted
                step.partial_prefills.append(sequence)
            return False
        constraint = sequence.constraint
        if sequence.num_computed + 1 >= sequence.max_length or sequence.waits_for_host:
            return False
        if sequence.num_computed >= sequence.decode_limit and not self._grow(sequence, step):
            return False
        if constraint is not None:
            sequence.error = step.add_mask(sequence.slot, constraint)
        step.num_again += 0 if sequence.restart < 0 else sequence.num_computed - sequence.restart
        return True

    def _grow(self, sequence: Sequence, step: Step) -> bool:
        """Add a page, preempting the last running sequences if needed; return False if this one was preempted."""
        while not self.pages.grow(sequence):
            if self._preempt_last(step) is sequence:
                return False
        step.plan.grants += self.pages.grants(sequence)
        step.plan.state_copies += self.pages.states_on_the_way(sequence)
        return True

    def _schedule_prefills(self, budget: int, step: Step) -> int:
        """Add chunks of prompts that are partly computed; return the tokens left of the budget."""
        for sequence in step.partial_prefills:
            budget -= self._schedule_chunk(sequence, budget, step) if budget > 0 else 0
        while not step.plan.num_rows and not self._in_flight:  # all wait for each other's pages
            self._preempt_last(step)
            budget -= self._schedule_chunk(self.running[0], budget, step)
        return budget

    def _schedule_chunk(self, sequence: Sequence, budget: int, step: Step) -> int:
        """Add a row with at most ``budget`` of a sequence's known tokens; return its length (0 if no page is free)."""
        start = sequence.num_computed
        end = min(len(sequence.token_ids), start + min(budget, self.limits.long_prefill_token_threshold or budget))
        if not step.has_room(is_member=end == len(sequence.token_ids)):
            return 0
        wanted = self.pages.with_lookahead(sequence, end) if end == len(sequence.token_ids) else end
        end = min(end, self.pages.grow_to(sequence, wanted))
        step.plan.grants += self.pages.grants(sequence)
        if end <= start:
            return 0
        samples = step.add_chunk(sequence, end)
        sequence.num_computed = end
        self.pages.cache.register(sequence, end, with_last=samples)
        if self.pages.states is not None:
            step.plan.snapshots += self.pages.states.snapshots(sequence, step.plan.num_rows - 1, start, end)
        if samples:
            self.pages.update_decode_limit(sequence)
            if sequence.constraint is not None:
                sequence.error = step.add_mask(sequence.slot, sequence.constraint)
        if end == len(sequence.token_ids):
            sequence.num_pending += 1
            step.num_members += 1
        return end - start

    def _admit(self, budget: int, step: Step, now: float) -> None:
        """Admit waiting sequences in turns while slots, rows, tokens and pages last."""
        while self.waiting and budget > 0 and self._queues.free_slots and step.has_room(is_member=True):
            sequence = self._queues.next
            if self.limits.admits_whole and len(sequence.token_ids) > budget:
                return
            copies = None if sequence.num_pending else self.pages.allocate(sequence)
            if copies is None:
                return
            self._queues.start(sequence)
            sequence.own_tokens()
            sequence.scheduled_s = sequence.scheduled_s or now
            step.add_setup(sequence, copies)
            num_members = step.num_members + 1
            budget -= self._schedule_chunk(sequence, budget, step)
            step.num_members = num_members

    def _preempt_last(self, step: Step) -> Sequence:
        """Preempt the last running sequence, and return it."""
        step.preempts, victim = True, self.running[-1]
        self._requeue(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        return victim

    def _requeue(self, sequence: Sequence) -> None:
        """Free the slot and pages of a running sequence and requeue it, to be recomputed."""
        self.pages.release(sequence)
        self._queues.remove(sequence)
        self._queues.enqueue(sequence)
