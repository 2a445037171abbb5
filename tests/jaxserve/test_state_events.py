"""Random events through a scheduler of recurrent sequences, against a plain model of what each state has taken in."""

from collections.abc import Callable

import pytest

from jaxserve.reshard.cache_moves import best_states, move_cache, move_states, newest_pages
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import SchedulerLimits, StepPlan
from jaxserve.scheduling.prefix_cache import TOKEN_BYTES, pack_tokens
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.state_allocator import Checkpoint, StateAllocator
from tests.jaxserve.test_page_events import Context, Events, Pages, Slot
from tests.plan_rows import Row, rows_of
from tests.sequences import make_sequence

COPIES_AT_ONCE = 8


class StatePages(Pages):
    """A device with states too, each of which is the context that it has taken in."""

    def __init__(self, num_states: int, num_pages: int, page_size: int, num_stages: int):
        super().__init__(num_pages, page_size, [None], num_stages)
        self.states: list[Context] = [(-1,)] * num_states
        self.state_pages: dict[int, int] = {}
        self.contexts: dict[int, Context] = {}
        self.num_kept = 0  # states of rows of which others were kept too
        self.num_decode_copies = 0  # states kept before a decode row

    def run(self, plan: StepPlan, running: list[Sequence]) -> list[list[int]]:
        """The tokens of each row: every row goes on from the state in its page, or from nothing."""
        self.state_pages |= {setup.slot: setup.state_page for setup in plan.setups}
        admitted = {setup.state_page for setup in plan.setups}
        self.num_decode_copies += sum(copy.target not in admitted for copy in plan.state_copies)
        for start in range(0, len(plan.state_copies), COPIES_AT_ONCE):
            copies = plan.state_copies[start : start + COPIES_AT_ONCE]
            for copy, state in zip(copies, [self.states[copy.source] for copy in copies], strict=True):
                self.states[copy.target] = state
        tokens = super().run(plan, running)
        rows = rows_of(plan)
        used = [self.state_pages[row.slot] for row in rows]
        assert len({*used}) == len(used), "two rows update one state"
        assert not {*used} & {snapshot.page for snapshot in plan.snapshots}, "a snapshot over a running state"
        assert len({snapshot.page for snapshot in plan.snapshots}) == len(plan.snapshots), "two states kept in a page"
        self.num_kept += len(plan.snapshots) - len({snapshot.row for snapshot in plan.snapshots})
        for row, page in zip(rows, used, strict=True):
            context = self.contexts[row.slot]
            start = len(context) - len(row.token_ids)
            assert not start or self.states[page] == context[:start], "a row goes on from another state"
            self.states[page] = context
        for index, length, page in plan.snapshots:
            context = self.contexts[rows[index].slot]
            assert 0 < length <= len(rows[index].token_ids)
            self.states[page] = context[: len(context) - len(rows[index].token_ids) + length]
        return tokens

    def _write(self, row: Row, slot: Slot) -> Context:
        self.contexts[row.slot] = super()._write(row, slot)
        return self.contexts[row.slot]


class StateEvents(Events):
    """One random run with few or many states for the prefix cache."""

    def __init__(self, seed: int, depth: int, num_stages: int = 1, num_drafts: int = 0):
        super().__init__(seed, depth, num_stages)
        rng, old = self.rng, self.scheduler.limits
        num_pages, page_size = self.allocator.num_pages, self.allocator.page_size
        self.allocator = PageAllocator(num_pages, page_size, keeps_free_pages=rng.random() < 0.9)
        num_states = old.max_num_seqs * (2 if num_drafts else 1) + int(rng.choice([0, 1, 3, 12, 100]))
        max_tokens = max(old.max_num_batched_tokens, old.max_num_seqs * (1 + num_drafts))
        self.max_pending = 1 + num_drafts if num_drafts else self.max_pending
        limits = SchedulerLimits(
            old.max_num_seqs, max_tokens, 0, num_drafts, num_stages=num_stages, num_states=num_states
        )
        self.windows = [None]
        self.scheduler = Scheduler(limits, self.allocator, self if num_drafts else None)
        self._shorten_distance()
        self.pages = self.device = StatePages(num_states, num_pages, page_size, num_stages)
        self.room = num_pages * page_size

    def _shorten_distance(self) -> None:
        """Contexts are short."""
        assert self.scheduler.pages.states is not None
        self.scheduler.pages.states._distance = self.allocator.page_size * int(self.rng.choice([1, 2]))

    def _event(self) -> None:
        if self.rng.random() < 0.02:
            self._reshard()
        else:
            super()._event()

    def _reshard(self) -> None:
        """Everything moves to a scheduler and a device with more or fewer pages and states, as ``resharding`` does."""
        while self.in_flight:
            oldest = self.in_flight.pop(0)
            if oldest is not None:
                self._complete(*oldest)
        old, before, rng, limits = self.scheduler, self.device, self.rng, self.scheduler.limits
        running = {sequence: sequence.num_computed for sequence in old.running}
        old.requeue_all()
        states = [each for each in (self.states.num_checkpoints, limits.num_states) if each]
        num_states = limits.max_num_seqs * (1 + (limits.max_draft_tokens > 0)) + int(rng.choice([0, 1, *states]))
        num_pages = self.room // self.allocator.page_size + int(rng.choice([0, self.allocator.num_pages]))
        made = PageAllocator(num_pages, self.allocator.page_size, self.allocator.keeps_free_pages)
        new = Scheduler(limits._replace(num_states=num_states), made)
        pages, kept = newest_pages([old], int(rng.choice([10, 1000]))), best_states([old], int(rng.choice([4, 1000])))
        moves, state_moves = move_cache([old], [new], pages), move_states([new], kept)
        self.device = self.pages = StatePages(num_states, num_pages, made.page_size, self.num_stages)
        for move in moves[0]:
            self.device.held[move.target] = before.held[move.source]
            self.device.written_by[move.target] = before.written_by[move.source]
        for move in state_moves[0]:
            self.device.states[move.target] = before.states[move.source]
        self.allocator, self.scheduler = made, new
        new.replace([old])
        new.take_proposer(old)
        for sequence in [*old.waiting]:
            new.add(sequence)
        self._shorten_distance()
        self.counts["reshards"] += 1
        self.counts["moved states"] += len(state_moves[0])
        found = {sequence: new.pages.num_cached_tokens(sequence) for sequence in running}
        self.counts["went on"] += sum(0 < running[sequence] == tokens for sequence, tokens in found.items())
        self.check()

    @property
    def states(self) -> StateAllocator:
        """The allocator of the scheduler's state pages."""
        assert self.scheduler.pages.states is not None
        return self.scheduler.pages.states.allocator

    def check(self) -> None:
        """Each state is that of its sequence's or checkpoint's tokens, and each page has one owner."""
        super().check()
        allocator = self.states
        for sequence in self.scheduler.running:
            state, count = self.device.states[sequence.state_page], sequence.num_computed
            known = min(count, len(sequence.token_ids))
            if sequence.draft_length:
                before = self.device.states[sequence.draft_page]
                assert [*before] == sequence.token_ids[: sequence.draft_length], "not the state before the drafts"
            if count and sequence.restart < 0:
                assert len(state) == count and [*state[:known]] == sequence.token_ids[:known]
        running = [sequence.state_page for sequence in self.scheduler.running]
        running += [sequence.draft_page for sequence in self.scheduler.running if sequence.draft_page >= 0]
        owned = [*running, *allocator._checkpoints, *allocator._free]
        assert sorted(owned) == [*range(allocator.num_pages)]
        for checkpoint in allocator._checkpoints.values():
            self._check_checkpoint(checkpoint)

    def _check_checkpoint(self, checkpoint: Checkpoint) -> None:
        context, cache = self.device.states[checkpoint.page], self.allocator.cache
        num_full = (len(context) - len(checkpoint.content) // TOKEN_BYTES) // self.allocator.page_size
        key, size = cache.root_key(b""), self.allocator.page_size
        for index in range(num_full):
            key = cache.key(key, pack_tokens([*context[index * size : (index + 1) * size]]))
        assert checkpoint.parent == key
        assert checkpoint.content == pack_tokens([*context[num_full * size :]])
        assert len(context) - num_full * size < size


def run_events(seed: int, num_events: int = 80) -> StateEvents:
    """A run of its own for each seed, with one, two or three steps in flight."""
    events = StateEvents(seed, depth=1 + seed % 3)
    events.run(num_events)
    return events


def run_staged_events(seed: int, num_events: int = 80) -> StateEvents:
    """A run of its own for each seed, in two to four stages."""
    num_stages = 2 + seed // 2 % 3
    events = StateEvents(seed, num_stages + seed % 2, num_stages)
    events.run(num_events)
    return events


def run_draft_events(seed: int, num_events: int = 80) -> StateEvents:
    """A run of its own for each seed, with up to one or four drafts, whose steps are not planned ahead."""
    num_stages = 1 + seed % 5 // 4 * 2
    events = StateEvents(seed, num_stages, num_stages, num_drafts=1 + seed % 2 * 3)
    events.run(num_events)
    return events


def test_rejected_drafts_are_in_no_state() -> None:
    runs = [run_draft_events(seed) for seed in range(200, 225)]
    assert sum(each.counts["accepted"] for each in runs) > 100 < sum(each.counts["rejected"] for each in runs)
    assert sum(each.scheduler.num_preemptions for each in runs) > 10
    assert sum(each.scheduler.pages.num_hit_tokens for each in runs) > 100


@pytest.mark.parametrize("group", range(2))
def test_states_are_those_of_their_contexts(group: int) -> None:
    for seed in range(group * 20, group * 20 + 20):
        run_events(seed)


def test_states_in_several_stages_are_those_of_their_contexts() -> None:
    for seed in range(100, 115):
        run_staged_events(seed)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_events, run_staged_events, run_draft_events])
def test_many_random_events(run: Callable[[int, int], StateEvents]) -> None:
    for seed in range(1000, 2000):
        run(seed, 300)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_events, run_staged_events, run_draft_events])
@pytest.mark.parametrize("seed", range(3000, 3003))
def test_ten_thousand_events_of_one_scheduler(run: Callable[[int, int], StateEvents], seed: int) -> None:
    """And at the end no state page is lost: ``check`` finds an owner of each."""
    events = run(seed, 10_000)
    events.check()
    assert not events.scheduler.num_unfinished and not events.states.num_running


def test_random_events_meet_what_they_are_meant_to() -> None:
    runs = [run_events(seed) for seed in range(30)]
    assert sum(each.scheduler.num_preemptions for each in runs) > 30
    assert sum(each.scheduler.pages.num_hit_tokens for each in runs) > 150
    assert sum(each.states.num_checkpoints for each in runs) > 30
    assert sum(each.device.num_kept for each in runs) > 30
    assert sum(each.device.num_decode_copies for each in runs) > 10
    assert sum(each.counts["reshards"] for each in runs) > 20 and sum(each.counts["moved states"] for each in runs) > 20
    assert sum(each.counts["went on"] for each in runs) > 10


def test_no_prompt_is_cut_for_the_states_that_are_kept_of_it() -> None:
    """Not even with a state at every page and before the generation prompt."""
    scheduler = Scheduler(SchedulerLimits(2, 64, num_states=99), PageAllocator(40, 4))
    sequence = make_sequence("a", [*range(100, 150)], 50, 53, num_generation_tokens=3)
    scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None and list(plan.lengths) == [50]
    assert [snapshot.num_tokens for snapshot in plan.snapshots] == [*range(4, 48, 4), 47, 48]
    assert len({snapshot.page for snapshot in plan.snapshots}) == 13
