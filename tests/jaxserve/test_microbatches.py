"""A replica whose runner has several stages: which sequences its plans have, its bubbles and its idle stages."""

import collections
import random
from collections.abc import Sequence as Items
from typing import Any

import pytest

from jaxserve.device.runner_interface import StepResult
from jaxserve.engine.replica import Replica
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import ON_DEVICE, SchedulerLimits, StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from tests.jaxserve.test_scheduler import STOP, Device, Recorder, check_books, make_sequence
from tests.plan_rows import rows_of

STAGES = [2, 3, 4]


def draw(context: list[int]) -> int:
    """A token that depends on all before it."""
    return random.Random(repr(context)).choice([1, 2, 3, *[4] * 20, STOP])


class Timing:
    """A device without memory, for long runs: only checks when tokens are read, and samples the same one always."""

    def __init__(self, scheduler: Scheduler):
        self.num_stages = scheduler.limits.num_stages
        self.sampled_by: dict[int, int] = {}

    def run(self, plan: StepPlan) -> list[list[int]]:
        """The tokens of each row."""
        for row in rows_of(plan):
            if ON_DEVICE in (row.start, row.token_ids[0]):
                assert plan.number >= self.sampled_by[row.slot] + self.num_stages
        self.sampled_by |= {row.slot: plan.number for row in rows_of(plan) if row.num_samples}
        return [[5] * row.num_samples for row in rows_of(plan)]


class StagedRunner:
    """A ``Runner`` in several stages; its devices check that tokens are read once they have passed all of them."""

    def __init__(self, devices: list[Device] | list[Timing]):
        self.devices = devices
        self.plans: list[list[StepPlan]] = []
        self.results = collections.deque[list[list[list[int]]]]()
        self.most_launched = 0

    def warm_up(self) -> None:
        """There are no programs."""

    def launch(self, plans: Items[StepPlan]) -> None:
        """See ``Runner``."""
        assert len({plan.number for plan in plans if rows_of(plan)}) == 1, "lanes number their steps alike"
        self.plans.append([*plans])
        self.results.append([device.run(plan) for device, plan in zip(self.devices, plans, strict=True)])
        self.most_launched = max(self.most_launched, len(self.results))

    def collect(self) -> list[StepResult]:
        """See ``Runner``."""
        return [StepResult(tokens, None, None) for tokens in self.results.popleft()]

    def reset(self) -> None:
        """No launch is interrupted."""

    def close(self) -> None:
        """Nothing to free."""


class Pipeline:
    """A replica on a ``StagedRunner``."""

    def __init__(
        self,
        num_stages: int,
        *,
        num_seqs: int = 64,
        num_tokens: int = 256,
        num_pages: int = 600,
        num_lanes: int = 1,
        depth: int = 0,
        is_checked: bool = True,
    ):
        limits = SchedulerLimits(num_seqs, num_tokens, num_stages=num_stages)
        self.schedulers = [Scheduler(limits, PageAllocator(num_pages, 4)) for _ in range(num_lanes)]
        self.is_checked = is_checked
        devices = [Device(each, draw) for each in self.schedulers] if is_checked else [*map(Timing, self.schedulers)]
        self.runner = StagedRunner(devices)
        self.replica = Replica(self.schedulers, self.runner, depth or num_stages + 1)
        self.num_stages = num_stages

    def add(self, *sequences: Sequence, lane: int = 0) -> None:
        for sequence in sequences:
            self.schedulers[lane].add(sequence)

    def step(self) -> None:
        self.replica.collect(not self.replica.launch())
        for scheduler in self.schedulers if self.is_checked else ():
            check_books(scheduler)

    def finish(self) -> None:
        for _ in range(10_000):
            if not (self.replica.has_steps_in_flight or any(each.num_unfinished for each in self.schedulers)):
                return
            self.step()
        raise AssertionError("the replica stands still")

    @property
    def plans(self) -> list[StepPlan]:
        """Those of the first lane."""
        return [plans[0] for plans in self.runner.plans]

    @property
    def rows(self) -> list[int]:
        """Number of rows of each plan."""
        return [plan.num_rows for plan in self.plans]


def texts(count: int, prompt: int = 6, new: int = 30, name: str = "", **fields: Any) -> list[Sequence]:
    return [make_sequence(f"{name}{index}", prompt, new, **fields) for index in range(count)]


# ---------------------------------------------------------------- tokens


def run_load(num_stages: int, depth: int, seed: int) -> list[list[int]]:
    """The tokens of requests that arrive over time, with too few pages for all, common prefixes and several samples."""
    rng = random.Random(seed)
    pipeline = Pipeline(num_stages, num_seqs=12, num_tokens=24, num_pages=30, depth=depth)
    sequences: list[Sequence] = []
    for number in range(25):
        prompt = rng.choices([1, 2, 3], k=rng.choice([1, 5, 30]))
        new, fields = rng.choice([1, 5, 30]), {"stop_ids": {STOP: None}, "priority": rng.choice([0, 0, 1])}
        samples = [make_sequence(f"{number}-{i}", prompt, new, **fields) for i in range(rng.choice([1, 1, 3]))]
        samples[0].followers = samples[1:]
        sequences += samples
        pipeline.add(samples[0])
        for _ in range(rng.choice([0, 0, 1, 5])):
            pipeline.step()
    pipeline.finish()
    assert pipeline.schedulers[0].num_preemptions
    allocator = pipeline.schedulers[0].allocator
    assert allocator.num_free == allocator.num_pages
    return [sequence.token_ids for sequence in sequences]


@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_the_number_of_stages(seed: int) -> None:
    expected = run_load(1, 2, seed)
    for num_stages in STAGES:
        for depth in (num_stages, num_stages + 1):
            assert run_load(num_stages, depth, seed) == expected


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("is_async", [True, False])
def test_a_request_alone(num_stages: int, is_async: bool) -> None:
    """The next step is launched before a token is known only with async scheduling; stages stay idle, uncounted."""
    pipeline = Pipeline(num_stages, depth=num_stages + is_async)
    (sequence,) = texts(1, new=20)
    pipeline.add(sequence)
    pipeline.finish()
    assert sequence.num_output_tokens == 20 and pipeline.replica.num_steps == 20
    assert pipeline.runner.most_launched == 1 + is_async
    assert pipeline.replica.num_idle_stage_ticks == 0
    if is_async:
        assert [plan.number for plan in pipeline.plans] == [*range(0, 20 * num_stages, num_stages)]


@pytest.mark.parametrize("num_stages", STAGES)
def test_requests_with_constraints_wait_for_the_host(num_stages: int) -> None:
    pipeline = Pipeline(num_stages)
    constraints = [Recorder() for _ in range(6)]
    sequences = [make_sequence(str(i), 5, 8, constraint=one) for i, one in enumerate(constraints)]
    pipeline.add(*sequences, *texts(3))
    pipeline.finish()
    for sequence, constraint in zip(sequences, constraints, strict=True):
        assert constraint.taken == sequence.token_ids[5:] and constraint.taken


def test_chunks_of_a_prompt_follow_each_other() -> None:
    pipeline = Pipeline(3, num_tokens=64)
    pipeline.add(make_sequence("long", 200, 4))
    pipeline.finish()
    assert [(plan.number, plan.num_tokens) for plan in pipeline.plans] == [
        *[(0, 64), (1, 64), (2, 64), (3, 8)],
        *[(6, 1), (9, 1), (12, 1)],
    ]


# ---------------------------------------------------------------- microbatches


@pytest.mark.parametrize(
    ("num_stages", "count", "rows"),
    [(2, 16, [8, 8]), (2, 17, [9, 8]), (3, 4, [2, 1, 1]), (4, 6, [2, 2, 1, 1]), (4, 64, [16] * 4), (3, 3, [1] * 3)],
)
def test_requests_that_arrive_together_are_divided(num_stages: int, count: int, rows: list[int]) -> None:
    """Into plans of as many rows, which then decode in turn."""
    pipeline = Pipeline(num_stages, num_tokens=1000)
    pipeline.add(*texts(count))
    pipeline.finish()
    cycles = [pipeline.rows[first : first + num_stages] for first in range(0, 30 * num_stages, num_stages)]
    assert cycles == [rows] * 30
    assert len(pipeline.rows) == 30 * num_stages


def test_more_requests_than_slots_are_divided_by_slots() -> None:
    pipeline = Pipeline(4, num_seqs=10, num_tokens=1000, is_checked=False)
    pipeline.add(*texts(100))
    for _ in range(4):
        pipeline.step()
    assert pipeline.rows == [3, 3, 2, 2]
    pipeline.finish()
    assert max(pipeline.rows) == 3


def test_microbatches_are_balanced_again_after_some_finish() -> None:
    """Those of every other plan finish early: the rest is divided anew, and no stage stays idle."""
    pipeline = Pipeline(2)
    short, long = texts(8, new=5, name="short"), texts(8, new=60, name="long")
    pipeline.add(*short, *long)
    while any(sequence.finish_reason is None for sequence in short):
        pipeline.step()
    for _ in range(4):
        pipeline.step()
    idle, first = pipeline.replica.num_idle_stage_ticks, len(pipeline.rows)
    pipeline.finish()
    assert pipeline.rows[first : first + 80] == [4] * 80
    assert pipeline.replica.num_idle_stage_ticks == idle
    assert idle <= 4


@pytest.mark.parametrize("num_stages", STAGES)
def test_plans_of_the_same_microbatch_name_the_first_with_their_rows(num_stages: int) -> None:
    pipeline = Pipeline(num_stages)
    pipeline.add(*texts(8 * num_stages, prompt=4, new=40))
    pipeline.finish()
    plans = pipeline.plans[4 * num_stages : 30 * num_stages]
    for plan, later in zip(plans, plans[num_stages:], strict=False):
        assert later.same_rows_as == plan.rows_number < later.number
        assert rows_of(later) == rows_of(plan)
    assert len({plan.rows_number for plan in plans}) == num_stages


# ---------------------------------------------------------------- steady state


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("depth", [0, 1])
def test_no_stage_is_idle_while_all_decode(num_stages: int, depth: int) -> None:
    """Not even with a number that the stages do not divide; every sequence decodes once in as many plans."""
    pipeline = Pipeline(num_stages, num_pages=1000, depth=num_stages + depth, is_checked=False)
    count = 8 * num_stages + 1
    pipeline.add(*texts(count, new=100))
    for _ in range(3 * num_stages):
        pipeline.step()
    first, idle = len(pipeline.plans), pipeline.replica.num_idle_stage_ticks
    for _ in range(90 * num_stages):
        pipeline.step()
    assert pipeline.replica.num_idle_stage_ticks == idle
    plans = pipeline.plans[first:]
    assert [plan.number for plan in plans] == [*range(plans[0].number, plans[0].number + len(plans))], "no bubbles"
    for start in range(0, len(plans) - num_stages, num_stages):
        slots = [row.slot for plan in plans[start : start + num_stages] for row in rows_of(plan)]
        assert sorted(slots) == [*range(count)]
    assert max(pipeline.rows[first:]) <= 9


@pytest.mark.parametrize("num_stages", STAGES)
def test_few_stages_are_idle_while_requests_come_and_go(num_stages: int) -> None:
    """Eight requests for each stage, each followed by another; some prompts need several steps."""
    rng = random.Random(num_stages)
    pipeline = Pipeline(num_stages, num_seqs=8 * num_stages, num_tokens=96, num_pages=4000, is_checked=False)
    scheduler = pipeline.schedulers[0]
    latest: dict[Sequence, int] = {}
    longest = 0
    arrived = 0
    for _ in range(400 * num_stages):
        while scheduler.num_unfinished < 8 * num_stages and rng.random() < 0.8:
            prompt = rng.choice([3, 10, 40, 40, 300])
            pipeline.add(make_sequence(str(arrived), prompt, rng.randint(1, 60), priority=rng.choice([0, 1])))
            arrived += 1
        pipeline.step()
        number = pipeline.plans[-1].number if pipeline.plans else 0
        for sequence in scheduler.running:
            if sequence.last_plan == number:
                longest = max(longest, number - latest.get(sequence, number))
                latest[sequence] = number
    replica = pipeline.replica
    assert arrived > 100 * num_stages
    assert replica.num_stage_ticks >= 390 * num_stages**2
    assert replica.num_idle_stage_ticks <= 0.05 * replica.num_stage_ticks
    missing = pipeline.plans[-1].number + 1 - len(pipeline.plans)
    assert missing <= 0.05 * len(pipeline.plans), "bubbles, counted otherwise"
    assert longest <= 3 * num_stages, "a sequence waits for its turn"
    pipeline.finish()


# ---------------------------------------------------------------- idle stages


def test_idle_stages_are_counted_while_the_pipeline_fills_and_not_while_it_drains() -> None:
    """Four stages, a request each: they get their first plans one by one, and the last one's bubbles are no fault."""
    pipeline = Pipeline(4, num_tokens=1000)
    pipeline.add(*texts(16, new=5))
    pipeline.finish()
    replica = pipeline.replica
    assert replica.num_steps == 20
    assert replica.num_idle_stage_ticks == 3 + 2 + 1
    assert replica.num_stage_ticks == 4 * (20 + 4), "as many ticks as stages until the last plan leaves them"
    pipeline.add(*texts(3, new=5, name="few"))
    pipeline.finish()
    assert replica.num_idle_stage_ticks == 6, "three requests cannot keep four stages busy"


def test_bubbles_of_requests_that_wait_for_the_host_are_not_idle_stages() -> None:
    """Four stages, a request each, whose next tokens all need the host."""
    pipeline = Pipeline(4)
    for index in range(4):
        pipeline.add(make_sequence(f"bound{index}", 5, 6, constraint=Recorder()))
    pipeline.finish()
    replica = pipeline.replica
    assert replica.num_stage_ticks > 4 * replica.num_steps
    assert replica.num_idle_stage_ticks == 0


def test_one_stage_is_never_idle() -> None:
    pipeline = Pipeline(1)
    pipeline.add(*texts(4), make_sequence("bound", 5, 6, constraint=Recorder()))
    pipeline.finish()
    assert pipeline.replica.num_stage_ticks == pipeline.replica.num_steps
    assert pipeline.replica.num_idle_stage_ticks == 0


# ---------------------------------------------------------------- lanes


@pytest.mark.parametrize("num_stages", [1, *STAGES])
def test_lanes_share_their_ticks(num_stages: int) -> None:
    """A lane without work has an empty plan while the other has one, and a bubble is a tick without any."""
    pipeline = Pipeline(num_stages, num_lanes=2)
    first, second = texts(7, new=20, name="a"), texts(2, new=50, name="b")
    pipeline.add(*first)
    for _ in range(3):
        pipeline.step()
    pipeline.add(*second, lane=1)
    pipeline.finish()
    for sequence, length in [*((one, 20) for one in first), *((one, 50) for one in second)]:
        assert sequence.num_output_tokens == length
    kinds = collections.Counter(tuple(bool(rows_of(plan)) for plan in plans) for plans in pipeline.runner.plans)
    assert kinds[True, True] and kinds[True, False] and kinds[False, True] and not kinds[False, False]
    numbers = [max(plan.number for plan in plans) for plans in pipeline.runner.plans]
    assert numbers == sorted(set(numbers))
