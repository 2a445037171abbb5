"""The scheduler alone: no device, no model, no text."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.page_allocator import PageAllocator
from jaxserve.engine.plan import StepPlan
from jaxserve.engine.scheduler import Scheduler, SchedulerLimits
from jaxserve.engine.sequence import Sequence


def make_scheduler(num_pages=16, page_size=4, max_num_seqs=4, max_num_batched_tokens=16) -> Scheduler:
    return Scheduler(SchedulerLimits(max_num_seqs, max_num_batched_tokens), PageAllocator(num_pages, page_size))


def make_sequence(name: str, prompt: int, new: int, **fields) -> Sequence:
    return Sequence(name, list(range(100, 100 + prompt)), prompt, prompt + new, **fields)


class Device:
    """Checks that a device could run every plan: pages held once, positions in order, tokens where they belong."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.length: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> list[int]:
        limits = self.scheduler.limits
        assert plan.num_rows <= limits.max_num_seqs
        assert plan.num_tokens <= limits.max_num_batched_tokens
        for setup in plan.setups:
            self.length[setup.slot] = 0
            self.pages[setup.slot] = []
        for grant in plan.grants:
            assert grant.first == len(self.pages[grant.slot])
            self.pages[grant.slot] += grant.pages
        slots = plan.decode_slots + [row.slot for row in plan.prefill]
        assert len(set(slots)) == len(slots)
        held = [page for slot in slots for page in self.pages[slot]]
        assert len(set(held)) == len(held)
        for slot, position in zip(plan.decode_slots, plan.decode_positions, strict=True):
            assert position == self.length[slot]
            self.length[slot] += 1
        for row in plan.prefill:
            assert row.start == self.length[row.slot]
            assert row.token_ids
            self.length[row.slot] += len(row.token_ids)
        for slot in slots:
            assert self.length[slot] <= len(self.pages[slot]) * self.scheduler.allocator.page_size
        return [1000 + self.length[slot] for slot in slots]


def drain(scheduler: Scheduler, depth: int = 2, device: Device | None = None, limit: int = 10_000) -> list[StepPlan]:
    """Runs to the end with ``depth`` steps in flight."""
    device = Device(scheduler) if device is None else device
    plans, flight = [], []
    for _ in range(limit):
        plan = scheduler.schedule()
        if plan is not None:
            plans.append(plan)
            flight.append((plan, device.run(plan)))
        if flight and (plan is None or len(flight) >= depth):
            scheduler.complete(*flight.pop(0))
        if not flight and not scheduler.num_unfinished:
            return plans
    raise AssertionError("the scheduler stands still")


def test_prefill_then_decode():
    scheduler = make_scheduler()
    sequence = make_sequence("a", prompt=5, new=3)
    scheduler.add(sequence)
    plans = drain(scheduler)
    assert [row.token_ids for row in plans[0].prefill] == [[100, 101, 102, 103, 104]]
    assert plans[0].prefill[0].samples
    assert [plan.decode_positions for plan in plans[1:]] == [[5], [6]]
    assert sequence.finish_reason == "length"
    assert sequence.token_ids[5:] == [1005, 1006, 1007]
    assert scheduler.allocator.num_free == 16


def test_a_pending_token_is_taken_from_the_device():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", prompt=3, new=5))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None and second is not None
    assert second.decode_tokens == [-1]
    scheduler.complete(first, [7])
    scheduler.complete(second, [8])
    third = scheduler.schedule()
    assert third is not None
    assert third.decode_tokens == [8]


def test_long_prompts_are_chunked_and_mixed_with_decodes():
    scheduler = make_scheduler(num_pages=40, max_num_batched_tokens=8)
    scheduler.add(make_sequence("short", prompt=2, new=20))
    first = scheduler.schedule()
    assert first is not None and first.num_tokens == 2
    scheduler.add(make_sequence("long", prompt=30, new=2))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.decode_slots == [first.prefill[0].slot]
    assert len(plan.prefill[0].token_ids) == 7 and not plan.prefill[0].samples


def test_stop_token_ends_and_the_step_in_flight_is_ignored():
    scheduler = make_scheduler()
    sequence = make_sequence("a", prompt=3, new=10, stop_ids={9: None, 8: 8})
    scheduler.add(sequence)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    assert scheduler.complete(first, [8]).sampled == [(sequence, 0, 8)]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", 8)
    assert scheduler.complete(second, [5]).sampled == []
    assert sequence.token_ids[3:] == [8]


def test_min_length_outlives_stop_tokens():
    scheduler = make_scheduler()
    sequence = make_sequence("a", prompt=3, new=10, stop_ids={9: None}, min_length=5)
    scheduler.add(sequence)
    for expected in (None, "stop"):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.complete(plan, [9])
        assert sequence.finish_reason == expected


def test_preemption_takes_the_youngest_and_recomputes_it():
    scheduler = make_scheduler(num_pages=6, page_size=4)
    old, young = make_sequence("old", 8, 12), make_sequence("young", 8, 8)
    scheduler.add(old)
    scheduler.add(young)
    drain(scheduler)
    assert old.num_preemptions == 0
    assert young.num_preemptions >= 1
    assert old.num_output_tokens == 12 and young.num_output_tokens == 8
    assert scheduler.allocator.num_free == 6


def test_a_preempted_sequence_waits_for_its_pending_token():
    scheduler = make_scheduler(num_pages=4, page_size=2, max_num_seqs=2)
    old, young = make_sequence("old", 3, 5), make_sequence("young", 3, 4)
    scheduler.add(old)
    scheduler.add(young)
    first = scheduler.schedule()
    second = scheduler.schedule()
    third = scheduler.schedule()
    assert first is not None and second is not None and third is not None
    assert young.slot == -1 and young.num_pending == 2
    scheduler.finish(old, "abort")
    assert scheduler.schedule() is None
    scheduler.complete(first, [1, 2])
    assert scheduler.schedule() is None
    scheduler.complete(second, [3, 4])
    again = scheduler.schedule()
    assert again is not None
    assert again.prefill[0].token_ids == [100, 101, 102, 2, 4]


def test_prompt_logprob_targets_follow_the_chunks():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_sequence("a", prompt=6, new=1, wants_prompt_logprobs=True))
    plans = drain(scheduler)
    assert [row.targets for plan in plans for row in plan.prefill] == [[101, 102, 103, 104], [105, -1]]


def test_finish_waiting_and_twice():
    scheduler = make_scheduler()
    sequence = make_sequence("a", 3, 3)
    scheduler.add(sequence)
    scheduler.finish(sequence, "abort")
    scheduler.finish(sequence, "stop")
    assert sequence.finish_reason == "abort"
    assert scheduler.schedule() is None


def test_double_free_is_caught():
    allocator = PageAllocator(4, 2)
    pages = allocator.allocate(2)
    assert pages is not None
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages)
    assert allocator.allocate(5) is None and allocator.num_free == 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_random_load_leaks_nothing_and_always_ends(seed, depth):
    run_random_load(seed, depth, events=300)


@pytest.mark.slow
def test_millions_of_random_events():
    for seed in range(1000):
        run_random_load(seed, depth=1 + seed % 3, events=2500)


def run_random_load(seed: int, depth: int, events: int) -> None:
    """Random arrivals, aborts, stop tokens and pool sizes, with ``depth`` steps in flight."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8])
    num_pages = rng.randint(6, 40)
    max_num_seqs = rng.randint(1, 8)
    scheduler = make_scheduler(num_pages, page_size, max_num_seqs, max_num_seqs + rng.randint(0, 20))
    device, flight, alive, everyone = Device(scheduler), [], [], []
    room = num_pages * page_size
    for event in range(events):
        kind = rng.random()
        if kind < 0.25 and len(alive) < 30:
            prompt = rng.randint(1, max(1, room - 1))
            new = rng.randint(1, max(1, room - prompt)) if room > prompt else 1
            sequence = make_sequence(f"{event}", prompt, min(new, max(1, room - prompt)), stop_ids={1003: None})
            if sequence.max_length <= room:
                scheduler.add(sequence)
                alive.append(sequence)
                everyone.append(sequence)
        elif kind < 0.28 and alive:
            scheduler.finish(alive.pop(rng.randrange(len(alive))), "abort")
        else:
            plan = scheduler.schedule()
            if plan is not None:
                flight.append((plan, device.run(plan)))
            while flight and (plan is None or len(flight) >= depth):
                plan = flight[0][0]
                scheduler.complete(*flight.pop(0))
        alive = [sequence for sequence in alive if sequence.finish_reason is None]
        check_books(scheduler)
    while flight:
        scheduler.complete(*flight.pop(0))
    drain(scheduler, depth, device)
    assert scheduler.allocator.num_free == num_pages
    for sequence in everyone:
        length = len(sequence.token_ids)
        ended = {"length": length == sequence.max_length, "stop": sequence.token_ids[-1] == 1003, "abort": True}
        assert sequence.finish_reason is not None and ended[sequence.finish_reason]


def check_books(scheduler: Scheduler) -> None:
    """Every page is free or held by exactly one running sequence; waiting ones hold nothing."""
    held = [page for sequence in scheduler.running for page in sequence.pages]
    assert len(set(held)) == len(held)
    assert len(held) + scheduler.allocator.num_free == scheduler.allocator.num_pages
    slots = [sequence.slot for sequence in scheduler.running]
    assert len(set(slots)) == len(slots) and -1 not in slots
    assert all(not sequence.pages and sequence.slot == -1 for sequence in scheduler.waiting)
