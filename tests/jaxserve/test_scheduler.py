"""The scheduler alone: no model, no text, and a device that is a table of what was written where."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.outputs import FinishReason
from jaxserve.api.sampling_options import OptionValues
from jaxserve.api.structured_params import RepetitionDetectionParams
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import ON_DEVICE, PageCopy, Sampling, SchedulerLimits, StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from tests.plan_rows import Row, rows_of
from tests.sequences import Taken, name_of
from tests.sequences import make_sequence as a_sequence

STOP = 9


def make_scheduler(
    num_pages: int = 16,
    page_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    threshold: int = 0,
    keeps_free_pages: bool = True,
    num_stages: int = 1,
    admits_whole: bool = False,
) -> Scheduler:
    sizes = (max_num_seqs, max_num_batched_tokens, threshold)
    limits = SchedulerLimits(*sizes, num_stages=num_stages, admits_whole=admits_whole)
    return Scheduler(limits, PageAllocator(num_pages, page_size, keeps_free_pages))


def make_sequence(name: str, prompt: int | list[int], new: int, **fields: Any) -> Sequence:
    """A prompt of its own tokens where only its length is given."""
    token_ids = random.Random(name).choices(range(100, 30_000), k=prompt) if isinstance(prompt, int) else list(prompt)
    return a_sequence(name, token_ids, len(token_ids), len(token_ids) + new, **fields)


class Device:
    """Runs plans as a device would, and checks that each row reads its own context.

    What a page holds at an offset stands for keys and values there: a number made of the token and of the number at
    the position before, so that it stands for the whole context up to it. Rows read what pages hold, never the truth.
    A new ``version`` stands for new weights: what was written before is not what would be written now. With stages, a
    sampled token reaches the first one before the plan that many later.

    Args:
        scheduler: Whose plans they are.
        draw: Makes the token of a row that samples from the tokens before it.
        copies_at_once: Copies that one run of the copy program takes.
    """

    def __init__(self, scheduler: Scheduler, draw: Any = None, copies_at_once: int = 100):
        self.scheduler = scheduler
        self.draw = draw or (lambda context: 1000 + len(context))
        self.copies_at_once = copies_at_once
        size = scheduler.allocator.page_size
        self.memory = [[0] * size for _ in range(scheduler.allocator.num_pages)]
        self.owner: dict[int, Sequence] = {}
        self.pages: dict[int, list[int]] = {}
        self.context: dict[Sequence, list[int]] = {}
        self.starts: list[list[int]] = []
        self.length: dict[int, int] = {}
        self.sampled_by: dict[int, int] = {}
        self.version = 0
        self.versions: dict[Sequence, list[int]] = {}
        self.expected: dict[Sequence, list[int]] = {}
        self.num_query_tokens = 0
        self.num_copies = 0
        self.masks: list[tuple[Sequence, bytes]] = []

    def run(self, plan: StepPlan) -> list[list[int]]:
        limits = self.scheduler.limits
        assert plan.num_rows <= -(-limits.max_num_seqs // limits.num_stages)
        assert plan.num_tokens <= limits.max_num_batched_tokens
        self.num_query_tokens += plan.num_tokens
        self._apply(plan)
        self._copy(plan)
        for row in rows_of(plan):
            if ON_DEVICE in (row.start, row.token_ids[0]):
                assert plan.number >= self.sampled_by[row.slot] + limits.num_stages, "the token is still in the stages"
        rows = [self._known(row) for row in rows_of(plan)]
        self.starts.append([row.start for row in rows])
        assert len({row.slot for row in rows}) == len(rows)
        assert all(len(row.token_ids) <= (limits.long_prefill_token_threshold or 1 << 30) for row in rows)
        for row in rows:
            assert row.token_ids
            for position, token in enumerate(row.token_ids, row.start):
                self._write(row.slot, position, token)
        self.sampled_by |= {row.slot: plan.number for row in rows if row.num_samples}
        masks = {mask.slot: mask.words for mask in plan.masks}
        return [self._finish_row(row, masks) for row in rows]

    def _known(self, row: Row) -> Row:
        """The row with the token and the start that are on the device."""
        start = self.length[row.slot] if row.start == ON_DEVICE else row.start
        first, *others = row.token_ids
        token_ids = [self._latest(row.slot) if first == ON_DEVICE else first, *others]
        return row._replace(start=start, token_ids=token_ids)

    def _apply(self, plan: StepPlan) -> None:
        running = {sequence.slot: sequence for sequence in self.scheduler.running}
        for setup in plan.setups:
            sequence = running[setup.slot]
            self.owner[setup.slot] = sequence
            self.pages[setup.slot] = []
            self.length.pop(setup.slot, None)
            self.sampled_by.pop(setup.slot, None)
            self.context.setdefault(sequence, list(sequence.token_ids))
            assert self.context[sequence] == sequence.token_ids
            self.versions[sequence] = [self.version] * sequence.max_length
            self.expected[sequence] = []
            assert list(setup.token_ids) == (sequence.token_ids if sequence.sampling.has_penalties else [])
            assert setup.num_prompt_tokens == sequence.num_prompt_tokens
        for grant in plan.grants:
            assert grant.first == len(self.pages[grant.slot])
            self.pages[grant.slot] += grant.pages

    def _copy(self, plan: StepPlan) -> None:
        self.num_copies += len(plan.copies)
        assert len({copy.target for copy in plan.copies}) == len(plan.copies)
        for first in range(0, len(plan.copies), self.copies_at_once):
            some = plan.copies[first : first + self.copies_at_once]
            contents = [list(self.memory[copy.source]) for copy in some]
            for copy, content in zip(some, contents, strict=True):
                self.memory[copy.target] = content

    def _latest(self, slot: int) -> int:
        return self.context[self.owner[slot]][-1]

    def _place(self, slot: int, position: int) -> tuple[list[int], int]:
        index, offset = divmod(position, self.scheduler.allocator.page_size)
        return self.memory[self.pages[slot][index]], offset

    def _write(self, slot: int, position: int, token: int) -> None:
        before = hash(self.owner[slot].cache_root)
        if position:
            page, offset = self._place(slot, position - 1)
            before = page[offset]
        page, offset = self._place(slot, position)
        page[offset] = hash((before, token, self.version))
        self.versions[self.owner[slot]][position] = self.version

    def _finish_row(self, row: Row, masks: dict[int, bytes]) -> list[int]:
        """Check all that a row reads, once every row has written; draw its token if it samples."""
        slot, end, samples = row.slot, row.start + len(row.token_ids), row.num_samples > 0
        sequence = self.owner[slot]
        context = self.context[sequence]
        expected, versions = self.expected[sequence], self.versions[sequence]
        for position in range(len(expected), end):
            before = expected[-1] if expected else hash(sequence.cache_root)
            expected.append(hash((before, context[position], versions[position])))
        held = [value for page in self.pages[slot] for value in self.memory[page]]
        assert held[:end] == expected[:end], f"{name_of(sequence)} reads another context"
        assert samples == (end == len(context))
        if not samples:
            assert slot not in masks
            return []
        if sequence.constraint is not None and sequence.finish_reason is None:
            assert slot in masks
            self.masks.append((sequence, masks[slot]))
        self.length[slot] = end
        context.append(self.draw(context))
        return [context[-1]]


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
        check_books(scheduler)
        if not flight and not scheduler.num_unfinished:
            return plans
    raise AssertionError("the scheduler stands still")


def step(scheduler: Scheduler, device: Device) -> StepPlan:
    """One step on its own."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.complete(plan, device.run(plan))
    return plan


def check_books(scheduler: Scheduler) -> None:
    """Every page has as many holders as running sequences have it; waiting ones hold nothing; all are in order."""
    allocator = scheduler.allocator
    holders = [0] * allocator.num_pages
    for sequence in scheduler.running:
        assert len(set(sequence.tables[0].pages)) == len(sequence.tables[0].pages)
        for page in sequence.tables[0].pages:
            holders[page] += 1
    assert [allocator.num_holders(page) for page in range(allocator.num_pages)] == holders
    assert allocator.num_free == holders.count(0)
    slots = [sequence.slot for sequence in scheduler.running]
    assert len(set(slots)) == len(slots) and -1 not in slots
    assert all(not sequence.tables and sequence.slot == -1 for sequence in scheduler.waiting)
    for queue in (list(scheduler.running), list(scheduler.waiting)):
        assert queue == sorted(queue, key=lambda sequence: (sequence.request.priority, sequence.arrival))


# ------------------------------------------------------------------------------------------------ steps


def test_prefill_then_decode():
    scheduler = make_scheduler()
    sequence = make_sequence("a", [100, 101, 102, 103, 104], new=3)
    scheduler.add(sequence)
    device = Device(scheduler)
    plans = drain(scheduler, 2, device)
    assert [row.token_ids for row in rows_of(plans[0])] == [[100, 101, 102, 103, 104]]
    assert rows_of(plans[0])[0].num_samples
    assert device.starts == [[0], [5], [6]]
    assert sequence.finish_reason == "length"
    assert sequence.token_ids[5:] == [1005, 1006, 1007]
    assert scheduler.allocator.num_free == 16


def test_a_pending_token_is_taken_from_the_device():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", prompt=3, new=5))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None and second is not None
    assert [(row.start, row.token_ids) for row in rows_of(second)] == [(ON_DEVICE, [ON_DEVICE])]
    scheduler.complete(first, [[7]])
    scheduler.complete(second, [[8]])
    third = scheduler.schedule()
    assert third is not None
    assert [(row.start, row.token_ids) for row in rows_of(third)] == [(4, [8])]


def test_long_prompts_are_chunked_and_mixed_with_decodes():
    scheduler = make_scheduler(num_pages=40, max_num_batched_tokens=8)
    scheduler.add(make_sequence("short", prompt=2, new=20))
    first = scheduler.schedule()
    assert first is not None and first.num_tokens == 2
    scheduler.add(make_sequence("long", prompt=30, new=2))
    plan = scheduler.schedule()
    assert plan is not None
    decoded, chunk = rows_of(plan)
    assert (decoded.slot, decoded.token_ids) == (rows_of(first)[0].slot, [ON_DEVICE])
    assert len(chunk.token_ids) == 7 and not chunk.num_samples


def test_prompt_logprob_targets_follow_the_chunks():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_sequence("a", [100, 101, 102, 103, 104, 105], new=1, prompt_logprobs=0))
    plans = drain(scheduler)
    assert [row.targets for plan in plans for row in rows_of(plan)] == [[101, 102, 103, 104], [105, -1]]


def test_prompt_logprobs_of_a_preempted_prompt_have_no_targets_among_its_output():
    scheduler = make_scheduler(num_pages=4, page_size=2, max_num_seqs=2)
    device = Device(scheduler)
    old = make_sequence("old", 3, 5)
    young = make_sequence("young", [100, 101, 102], 4, prompt_logprobs=0, reads_cache=False)
    scheduler.add(old)
    scheduler.add(young)
    plans = drain(scheduler, 1, device)
    rows = [row for plan in plans for row in rows_of(plan) if row.targets is not None]
    assert rows[0].targets == [101, 102, -1]
    assert len(rows) == 2 and rows[1].token_ids[:3] == [100, 101, 102]
    assert rows[1].targets == [101, 102] + [-1] * (len(rows[1].token_ids) - 2)


def test_slots_of_requests_with_penalties_get_all_known_tokens():
    scheduler = make_scheduler(num_pages=4, page_size=2, max_num_seqs=2)
    old, young = (
        make_sequence("old", 3, 5),
        make_sequence("young", 3, 4, sampling=Sampling(OptionValues(presence_penalty=1.0))),
    )
    scheduler.add(old)
    scheduler.add(young)
    plans = drain(scheduler)
    setups = [setup for plan in plans for setup in plan.setups]
    assert [(len(setup.token_ids), setup.num_prompt_tokens) for setup in setups] == [(0, 3), (3, 3), (5, 3)]


# ------------------------------------------------------------------------------------------------ ends


def test_stop_token_ends_and_the_step_in_flight_is_ignored():
    scheduler = make_scheduler()
    sequence = make_sequence("a", prompt=3, new=10, stop_ids={9: None, 8: 8})
    scheduler.add(sequence)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    completion = scheduler.complete(first, [[8]])
    assert completion.sampled == completion.finished == [sequence]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", 8)
    assert scheduler.complete(second, [[5]]).sampled == []
    assert sequence.token_ids[3:] == [8]


def test_min_length_outlives_stop_tokens():
    scheduler = make_scheduler()
    sequence = make_sequence("a", prompt=3, new=10, stop_ids={9: None}, min_tokens=2)
    scheduler.add(sequence)
    for expected in (None, "stop"):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.complete(plan, [[9]])
        assert sequence.finish_reason == expected


def test_repetition_ends_a_text():
    scheduler = make_scheduler()
    repetition = RepetitionDetectionParams(max_pattern_size=3, min_count=2)
    sequence = make_sequence("a", [5, 6, 5, 6], new=20, repetition=repetition)
    scheduler.add(sequence)
    drawn = iter([5, 6, 7, 5, 6, 7, 1, 1])
    drain(scheduler, 1, Device(scheduler, lambda _: next(drawn)))
    assert (sequence.finish_reason, sequence.stop_reason) == ("repetition", "repetition_detected")
    assert sequence.token_ids[4:] == [5, 6, 7, 5, 6, 7]


def test_finish_waiting_and_twice():
    scheduler = make_scheduler()
    sequence = make_sequence("a", 3, 3)
    scheduler.add(sequence)
    scheduler.finish(sequence, "abort")
    scheduler.finish(sequence, "stop")
    assert sequence.finish_reason == "abort"
    assert scheduler.schedule() is None


# ------------------------------------------------------------------------------------------------ preemption


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
    old, young = make_sequence("old", 3, 5), make_sequence("young", [100, 101, 102], 4)
    scheduler.add(old)
    scheduler.add(young)
    first = scheduler.schedule()
    second = scheduler.schedule()
    third = scheduler.schedule()
    assert first is not None and second is not None and third is not None
    assert young.slot == -1 and young.num_pending == 2
    scheduler.finish(old, "abort")
    assert scheduler.schedule() is None
    scheduler.complete(first, [[1], [2]])
    assert scheduler.schedule() is None
    scheduler.complete(second, [[3], [4]])
    again = scheduler.schedule()
    assert again is not None
    (row,) = rows_of(again)
    assert ([100, 101, 102, 2, 4][row.start :], row.start) == (row.token_ids, young.num_computed - len(row.token_ids))


def test_a_preempted_sequence_finds_what_is_left_of_it_and_is_not_counted_again():
    scheduler = make_scheduler(num_pages=6, page_size=4)
    device = Device(scheduler)
    old, young = make_sequence("old", 8, 12), make_sequence("young", 8, 8)
    scheduler.add(old)
    scheduler.add(young)
    drain(scheduler, 2, device)
    assert young.num_preemptions == 1
    assert device.num_query_tokens < 20 + 16 + 16
    assert (scheduler.pages.num_queried_tokens, scheduler.pages.num_hit_tokens) == (16, 0)
    assert young.num_cached_tokens == 0


# ------------------------------------------------------------------------------------------------ order


def test_waiting_and_running_are_in_order_of_priority_then_arrival():
    scheduler = make_scheduler(max_num_seqs=2)
    names = {"a": 0, "b": 5, "c": -1, "d": 5, "e": 0}
    sequences = {name: make_sequence(name, 2, 2, priority=priority) for name, priority in names.items()}
    for sequence in sequences.values():
        scheduler.add(sequence)
    assert [name_of(sequence) for sequence in scheduler.waiting] == list("caebd")
    device = Device(scheduler)
    first = scheduler.schedule()
    assert first is not None
    device.run(first)
    assert [name_of(sequence) for sequence in scheduler.running] == ["c", "a"]


def test_the_victim_is_the_lowest_priority_and_returns_to_its_place():
    scheduler = make_scheduler(num_pages=6, page_size=4)
    low, high = make_sequence("low", 8, 8, priority=1), make_sequence("high", 8, 12)
    scheduler.add(low)
    device = Device(scheduler)
    step(scheduler, device)
    scheduler.add(high)
    while not low.num_preemptions:
        step(scheduler, device)
    later = make_sequence("later", 4, 2, priority=1)
    between = make_sequence("between", 4, 2)
    scheduler.add(later)
    scheduler.add(between)
    assert list(scheduler.waiting) == [between, low, later]
    drain(scheduler, 2, device)
    assert high.num_preemptions == 0


def test_a_long_prompt_leaves_room_for_short_ones():
    for threshold, expected in ((0, [("long", 16)]), (4, [("long", 4), ("short 0", 3), ("short 1", 3)])):
        scheduler = make_scheduler(num_pages=64, threshold=threshold)
        scheduler.add(make_sequence("long", 100, 1))
        for i in range(2):
            scheduler.add(make_sequence(f"short {i}", 3, 1))
        device = Device(scheduler)
        plan = step(scheduler, device)
        rows = [(name_of(device.owner[row.slot]), len(row.token_ids)) for row in rows_of(plan)]
        assert rows == expected


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 3, 8]))
def test_under_overload_first_tokens_come_in_order_of_arrival(seed: int, threshold: int):
    """Every sequence has its first token within the steps that the work before it takes; none is passed over."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_pages=24, max_num_seqs=4, max_num_batched_tokens=12, threshold=threshold)
    device, flight, first_tokens, added = Device(scheduler), [], {}, {}
    work = 0
    for number in range(2000):
        if number < 100 and rng.random() < 0.5:  # far more than it can take
            sequence = make_sequence(f"{number}", rng.randint(1, 40), rng.randint(1, 20))
            scheduler.add(sequence)
            work += sequence.max_length
            added[sequence] = (number, work)
        plan = scheduler.schedule()
        if plan is not None:
            flight.append((plan, device.run(plan)))
        if flight and (plan is None or len(flight) == 2):
            for sequence in scheduler.complete(*flight.pop(0)).sampled:
                first_tokens.setdefault(sequence, number)
        if number >= 100 and not scheduler.num_unfinished:
            break
    assert list(first_tokens) == list(added) or threshold
    for sequence, (number, before) in added.items():
        assert first_tokens[sequence] <= number + 3 * before + 5


def test_with_a_threshold_short_prompts_are_not_held_up_by_a_very_long_one():
    scheduler = make_scheduler(num_pages=600, max_num_seqs=8, max_num_batched_tokens=32, threshold=8)
    device = Device(scheduler)
    long = make_sequence("long", 2000, 1)
    scheduler.add(long)
    waits = []
    for i in range(20):
        short = make_sequence(f"{i}", 10, 3)
        scheduler.add(short)
        num_steps = 0
        while not short.num_output_tokens:
            step(scheduler, device)
            num_steps += 1
        waits.append(num_steps)
    assert max(waits) <= 2 and long.num_output_tokens == 0


# ------------------------------------------------------------------------------------------------ prefix cache


def test_full_pages_are_shared_and_the_last_one_is_copied():
    scheduler = make_scheduler(page_size=4, num_pages=32)
    device = Device(scheduler)
    prompt = list(range(100, 110))
    first = make_sequence("first", prompt, 5)
    scheduler.add(first)
    step(scheduler, device)
    second = make_sequence("second", prompt, 5)
    scheduler.add(second)
    plan = step(scheduler, device)
    assert second.tables[0].pages[:2] == first.tables[0].pages[:2]
    assert plan.copies == [PageCopy(first.tables[0].pages[2], second.tables[0].pages[2])]
    assert [(row.start, row.token_ids) for row in rows_of(plan)[1:]] == [(9, [109])]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 9)
    assert (scheduler.pages.num_queried_tokens, scheduler.pages.num_hit_tokens) == (20, 9)
    drain(scheduler, 2, device)


def test_a_prompt_of_full_pages_still_computes_its_last_token():
    scheduler = make_scheduler(page_size=4)
    device = Device(scheduler)
    for name in ("first", "second"):
        scheduler.add(make_sequence(name, list(range(8)), 1))
        drain(scheduler, 2, device)
    assert device.num_query_tokens == 8 + 1
    assert device.num_copies == 1


def test_sequences_of_one_plan_share_full_pages_but_copy_nothing_that_the_plan_writes():
    scheduler = make_scheduler(page_size=4, num_pages=32, max_num_batched_tokens=64)
    for name in ("first", "second"):
        scheduler.add(make_sequence(name, list(range(11)), 3))
    device = Device(scheduler)
    plan = step(scheduler, device)
    assert [(row.start, len(row.token_ids)) for row in rows_of(plan)] == [(0, 11), (8, 3)]
    assert not plan.copies
    drain(scheduler, 2, device)


def test_generated_tokens_are_found_by_the_next_turn():
    scheduler = make_scheduler(page_size=4, num_pages=32)
    device = Device(scheduler)
    turn = make_sequence("turn 1", list(range(6)), 9)
    scheduler.add(turn)
    drain(scheduler, 2, device)
    following = make_sequence("turn 2", [*turn.token_ids, 50, 51], 2)
    scheduler.add(following)
    drain(scheduler, 2, device)
    assert following.num_cached_tokens == 14  # the last token's keys and values were never computed


def test_a_prompt_that_leaves_a_full_page_in_the_middle_copies_its_beginning():
    scheduler = make_scheduler(page_size=8)
    device = Device(scheduler)
    for name, prompt in (("first", list(range(16))), ("second", [*range(13), 90, 91, 92])):
        scheduler.add(make_sequence(name, prompt, 1))
        plans = drain(scheduler, 2, device)
    assert [(row.start, len(row.token_ids)) for row in rows_of(plans[0])] == [(13, 3)]


def test_different_roots_share_nothing():
    scheduler = make_scheduler()
    device = Device(scheduler)
    for root in (b"", b"salt"):
        sequence = make_sequence("a", list(range(9)), 1, cache_root=root)
        scheduler.add(sequence)
        drain(scheduler, 2, device)
        assert sequence.num_cached_tokens == 0


def test_a_sequence_that_does_not_read_the_cache_fills_it():
    scheduler = make_scheduler()
    device = Device(scheduler)
    found = []
    for reads_cache in (False, False, True):
        sequence = make_sequence("a", list(range(9)), 1, reads_cache=reads_cache)
        scheduler.add(sequence)
        drain(scheduler, 2, device)
        found.append(sequence.num_cached_tokens)
    assert found == [0, 0, 8]
    assert scheduler.pages.num_queried_tokens == 9


def test_reset_forgets_also_what_running_sequences_compute():
    scheduler = make_scheduler(num_pages=32, max_num_batched_tokens=4)
    device = Device(scheduler)
    running = make_sequence("running", list(range(12)), 8)
    scheduler.add(running)
    step(scheduler, device)
    scheduler.allocator.reset()
    drain(scheduler, 2, device)
    again = make_sequence("again", running.token_ids, 2)
    scheduler.add(again)
    drain(scheduler, 2, device)
    assert again.num_cached_tokens == 0


def test_an_error_leaves_nothing_behind_but_what_it_found():
    scheduler = make_scheduler(num_pages=32)
    device = Device(scheduler)
    scheduler.add(make_sequence("system prompt", list(range(8)), 1))
    drain(scheduler, 2, device)
    known = len(scheduler.allocator.cache)
    broken = make_sequence("broken", list(range(14)), 12)
    scheduler.add(broken)
    for _ in range(5):
        step(scheduler, device)
    assert len(scheduler.allocator.cache) > known
    scheduler.finish(broken, "error")
    assert len(scheduler.allocator.cache) == known
    after = make_sequence("after", broken.token_ids, 1)
    scheduler.add(after)
    drain(scheduler, 2, device)
    assert after.num_cached_tokens == 8


def test_an_error_found_after_the_end_leaves_nothing_either():
    scheduler = make_scheduler(num_pages=32)
    sequence = make_sequence("a", 9, 6)
    scheduler.add(sequence)
    drain(scheduler)
    assert len(scheduler.allocator.cache) == 4
    scheduler.finish(sequence, "error")
    assert sequence.finish_reason == "length"
    assert len(scheduler.allocator.cache) == 0


def test_without_caching_only_running_sequences_share():
    scheduler = make_scheduler(num_pages=32, keeps_free_pages=False)
    device = Device(scheduler)
    leader = make_sequence("0", list(range(10)), 6, followers=[make_sequence("1", list(range(10)), 3)])
    scheduler.add(leader)
    drain(scheduler, 2, device)
    assert leader.num_output_tokens == 6 and device.num_query_tokens == 10 + 5 + 1 + 2
    assert len(scheduler.allocator.cache) == 0
    late = make_sequence("2", list(range(10)), 3)
    scheduler.add(late)
    drain(scheduler, 2, device)
    assert late.num_cached_tokens == 0


# ------------------------------------------------------------------------------------------------ samples of a prompt


def make_samples(num_samples: int, new: int = 3, prompt: int = 10, **fields: Any) -> list[Sequence]:
    samples = [make_sequence(f"{i}", list(range(100, 100 + prompt)), new, **fields) for i in range(num_samples)]
    samples[0].followers = samples[1:]
    return samples


def test_followers_start_from_the_leaders_pages():
    scheduler = make_scheduler(num_pages=64)
    samples = make_samples(4, new=6)
    scheduler.add(samples[0])
    later = make_sequence("later", 4, 2)
    scheduler.add(later)
    device = Device(scheduler)
    step(scheduler, device)
    assert list(scheduler.waiting) == samples[1:]
    plan = step(scheduler, device)
    assert [row.start for row in rows_of(plan)] == [10, 4, 9, 9]
    drain(scheduler, 2, device)
    assert [sample.num_cached_tokens for sample in samples] == [0, 9, 9, 9]
    assert [sample.num_output_tokens for sample in samples] == [6] * 4


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_followers_outlive_a_leader_that_is_aborted(num_steps: int):
    scheduler = make_scheduler(num_pages=64, max_num_batched_tokens=8)
    samples = make_samples(3)
    scheduler.add(samples[0])
    device = Device(scheduler)
    for _ in range(num_steps):
        step(scheduler, device)
    scheduler.finish(samples[0], "abort")
    drain(scheduler, 2, device)
    assert [sample.finish_reason for sample in samples] == ["abort", "length", "length"]
    assert device.num_query_tokens <= 8 * num_steps + 10 + 2 * 3


def test_followers_of_a_leader_that_ends_with_its_first_token():
    scheduler = make_scheduler(num_pages=64)
    samples = make_samples(3, stop_ids={1010: None})
    scheduler.add(samples[0])
    drain(scheduler)
    assert [sample.num_cached_tokens for sample in samples] == [0, 9, 9]
    assert [sample.finish_reason for sample in samples] == ["stop"] * 3


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_request_can_be_aborted_in_any_order_of_its_samples(num_steps: int, order: tuple[int, ...]):
    scheduler = make_scheduler(num_pages=64, max_num_batched_tokens=8)
    samples = make_samples(3)
    scheduler.add(samples[0])
    device = Device(scheduler)
    for _ in range(num_steps):
        step(scheduler, device)
    for i in order:
        scheduler.finish(samples[i], "abort")
    assert not scheduler.num_unfinished and scheduler.schedule() is None
    assert {sample.finish_reason for sample in samples} == {"abort"}
    check_books(scheduler)


# ------------------------------------------------------------------------------------------------ constraints


class Recorder(Taken):
    """A constraint that ends with a token and keeps count of what it took."""

    def __init__(self, last: int = -1):
        super().__init__()
        self.last = last

    def mask(self) -> bytes | None:
        return len(self.taken).to_bytes(4, "little")

    def accept(self, token: int) -> bool:
        self.taken.append(token)
        return token == self.last


def test_a_constrained_sequence_samples_with_a_mask_of_all_its_tokens():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    constraint = Recorder(last=1007)
    bound, free = make_sequence("bound", 5, 10, constraint=constraint), make_sequence("free", 2, 10)
    scheduler.add(bound)
    scheduler.add(free)
    device = Device(scheduler)
    plans = drain(scheduler, 2, device)
    assert [words[0] for _, words in device.masks] == [0, 1, 2]
    assert constraint.taken == [1005, 1006, 1007]
    assert (bound.finish_reason, bound.stop_reason) == ("stop", None)
    assert bound.token_ids[5:] == [1005, 1006, 1007]
    assert not plans[0].masks  # a chunk that does not sample


def test_a_constrained_sequence_sits_out_while_a_token_is_pending():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("bound", 5, 10, constraint=Recorder()))
    device = Device(scheduler)
    first = scheduler.schedule()
    assert first is not None
    tokens = device.run(first)
    assert scheduler.schedule() is None
    scheduler.complete(first, tokens)
    second = scheduler.schedule()
    assert second is not None and [row.token_ids for row in rows_of(second)] == [[1005]]


# ------------------------------------------------------------------------------------------------ random load


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_random_load_leaks_nothing_reads_its_own_and_always_ends(seed: int, depth: int):
    run_random_load(seed, depth, events=120)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(0, 4))
def test_random_load_in_several_stages(seed: int, num_stages: int, depth: int):
    run_random_load(seed, min(depth, num_stages) + 1, events=120, num_stages=num_stages)


@pytest.mark.slow
def test_many_random_events():
    for seed in range(1000):
        run_random_load(seed, depth=1 + seed % 3, events=2000)
    for seed in range(1000, 2000):
        num_stages = 2 + seed % 3
        run_random_load(seed, depth=1 + seed % (num_stages + 1), events=1000, num_stages=num_stages)


class RandomLoad:
    """Random arrivals, aborts, errors, resets, stop tokens and pool sizes.

    Prompts are of few different tokens, and often go on from an earlier text, so that contexts meet in all ways.
    """

    def __init__(self, seed: int, num_stages: int = 1):
        rng = self.rng = random.Random(seed)
        max_num_seqs = rng.randint(1, 8)
        self.scheduler = make_scheduler(
            num_pages=rng.randint(5, 30),
            page_size=rng.choice([1, 2, 4, 8]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.randint(0, 20),
            threshold=rng.choice([0, 0, 1, 5]),
            keeps_free_pages=rng.random() < 0.8,
            num_stages=num_stages,
        )
        self.device = Device(self.scheduler, lambda _: rng.choice([1, 1, 1, 2, 2, 3, STOP]), rng.choice([1, 2, 100]))
        self.everyone: list[Sequence] = []
        self.room = self.scheduler.allocator.num_pages * self.scheduler.allocator.page_size

    def prompt(self) -> list[int]:
        rng = self.rng
        start = rng.choice(self.everyone).token_ids if self.everyone and rng.random() < 0.7 else []
        start = start[: rng.randint(0, len(start))] if rng.random() < 0.6 else start
        prompt = [*start, *rng.choices([1, 2, 3], k=rng.choice([0, 1, 3, 10, self.room]))]
        return prompt[: rng.randint(1, max(1, self.room - 2))] or [1]

    def arrive(self) -> None:
        rng = self.rng
        prompt = self.prompt()
        new = min(rng.choice([1, 2, 10, 50]), self.room - len(prompt))
        has_constraint, num_samples = rng.random() < 0.15, rng.choice([1, 1, 1, 2, 5])
        fields: dict[str, Any] = {
            "stop_ids": {STOP: None},
            "priority": rng.choice([0, 0, 0, 1, -1]),
            "cache_root": rng.choice([b"", b"", b"", b"salt"]),
            "reads_cache": rng.random() < 0.9,
            "prompt_logprobs": 0 if rng.random() < 0.1 else None,
            "sampling": Sampling(OptionValues(presence_penalty=rng.choice([0.0, 1.0]))),
            "repetition": RepetitionDetectionParams(max_pattern_size=2, min_count=4) if rng.random() < 0.1 else None,
        }
        samples = []
        for i in range(num_samples):
            constraint = Recorder(3) if has_constraint else None
            samples.append(make_sequence(f"{len(self.everyone)}-{i}", prompt, new, constraint=constraint, **fields))
        samples[0].followers = samples[1:]
        self.everyone += samples
        self.scheduler.add(samples[0])

    def disturb(self) -> None:
        """An abort or an error, of one or all samples of a request, or, seldom, a reset."""
        alive = [sequence for sequence in self.everyone if sequence.finish_reason is None]
        if alive and self.rng.random() < 0.95:
            one = self.rng.choice(alive)
            request = [s for s in alive if name_of(s).split("-")[0] == name_of(one).split("-")[0]]
            self.rng.shuffle(request)
            reasons: list[FinishReason] = ["abort", "error"]
            reason = self.rng.choice(reasons)
            for sequence in request if self.rng.random() < 0.5 else [one]:
                self.scheduler.finish(sequence, reason)
        else:
            self.scheduler.allocator.reset()
            self.device.version += 1

    def check_end(self) -> None:
        allocator = self.scheduler.allocator
        assert allocator.num_free == allocator.num_pages
        assert allocator.keeps_free_pages or not len(allocator.cache)
        for sequence in self.everyone:
            known = self.device.context.get(sequence, sequence.token_ids)
            assert sequence.token_ids == known[: len(sequence.token_ids)]
            last = sequence.token_ids[-1]
            ended = {
                "length": len(sequence.token_ids) == sequence.max_length,
                "stop": last == STOP or (sequence.constraint is not None and last == 3),
                "repetition": sequence.request.params.repetition_detection is not None,
                "abort": True,
                "error": True,
            }
            assert sequence.finish_reason is not None and ended[sequence.finish_reason]
            if isinstance(sequence.constraint, Recorder):
                taken = sequence.token_ids[sequence.num_prompt_tokens :]
                assert sequence.constraint.taken == (taken[:-1] if taken and taken[-1] == STOP else taken)


def run_random_load(seed: int, depth: int, events: int, num_stages: int = 1) -> RandomLoad:
    """A random load with ``depth`` steps in flight; with stages, some bubbles besides."""
    load = RandomLoad(seed, num_stages)
    scheduler, device, rng = load.scheduler, load.device, load.rng
    flight: list[tuple[StepPlan, list[list[int]]]] = []
    for _ in range(events):
        kind = rng.random()
        if kind < 0.2 and scheduler.num_unfinished < 30:
            load.arrive()
        elif kind < 0.25:
            load.disturb()
        else:
            plan = scheduler.schedule()
            if plan is not None:
                flight.append((plan, device.run(plan)))
            elif num_stages > 1 and rng.random() < 0.5:
                continue
            while flight and (plan is None or len(flight) >= depth):
                plan = flight[0][0]
                scheduler.complete(*flight.pop(0))
        check_books(scheduler)
    while flight:
        scheduler.complete(*flight.pop(0))
    drain(scheduler, depth, device)
    load.check_end()
    return load


def test_random_load_meets_what_it_is_meant_to():
    loads = [run_random_load(seed, depth=2, events=150) for seed in range(20)]
    assert sum(load.scheduler.num_preemptions for load in loads) > 50
    assert sum(load.scheduler.pages.num_hit_tokens for load in loads) > 1000
    assert sum(load.device.num_copies for load in loads) > 100
    loads = [run_random_load(seed, depth=1 + seed % 4, events=150, num_stages=3) for seed in range(10)]
    assert sum(load.scheduler.num_preemptions for load in loads) > 20
    assert sum(load.scheduler.pages.num_hit_tokens for load in loads) > 500


# ---------------------------------------------------------------------------------------------- whole prompts


def test_prompts_are_admitted_whole() -> None:
    """A prompt waits for a step with room for all of it, and those after it wait too."""
    scheduler = make_scheduler(num_pages=32, max_num_batched_tokens=16, admits_whole=True)
    prompts = {"a": 10, "b": 8, "c": 2, "d": 16}
    for name, length in prompts.items():
        scheduler.add(make_sequence(name, length, new=3))
    device = Device(scheduler)
    rows = list[list[int]]()
    while scheduler.num_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        rows.append([len(row.token_ids) for row in rows_of(plan)])
        scheduler.complete(plan, device.run(plan))
    assert rows == [[10], [1, 8, 2], [1, 1, 1], [1, 1], [16], [1], [1]]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 12)), min_size=1, max_size=8), st.integers(8, 24))
def test_whole_prompts_are_never_split(requests: list[tuple[int, int]], num_pages: int) -> None:
    """Also those that are preempted and computed again."""
    scheduler = make_scheduler(num_pages=num_pages, max_num_batched_tokens=28, admits_whole=True)
    for index, (length, new) in enumerate(requests):
        scheduler.add(make_sequence(str(index), length, new))
    device = Device(scheduler)
    while scheduler.num_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        assert all(row.num_samples for row in rows_of(plan)), "each row reaches its sequence's last token"
        scheduler.complete(plan, device.run(plan))
