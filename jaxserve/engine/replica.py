"""One data-parallel replica of an engine: the schedulers of its lanes, their runner, and the steps in flight."""

import collections
import collections.abc
import itertools
import time
from typing import NamedTuple

from jaxserve.device.runner_interface import Runner, StepResult
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.plan_draft import Completion
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence

_NO_PLAN = StepPlan(-1, same_rows_as=-1)
"""Plan of a lane without work in a step."""


class LaneResult(NamedTuple):
    """What a step did in one lane, and when its results arrived, in seconds of ``time.monotonic()``."""

    completion: Completion
    result: StepResult
    now: float


class _Tick(NamedTuple):
    """A launched step: the plan of each lane and the runner's handle."""

    plans: list[StepPlan | None]
    handle: int


class Replica:
    """The schedulers of a data slice's lanes and their runner, with up to ``depth`` ticks in flight.

    In each tick, the stages of a pipeline (one, without pipeline parallelism) move on by one plan: in tick t, stage i
    works on the plan of tick t - i. A tick at which no lane has a plan is a bubble, for which nothing is launched. It
    counts among the ticks in flight, so that the tokens sampled S ticks ago can be used although fewer requests are
    running than there are stages.

    A stage is idle in a tick if it has no plan to work on although at least S sequences are runnable, one for each
    stage: it is a bubble's turn, or the pipeline is filling after it was empty. Sequences are runnable if they have a
    slot and tokens left to plan that do not wait for the host (``Scheduler.num_runnable``). So a stage without work is
    not idle while fewer than S sequences run, as at the end of a load.

    Args:
        schedulers: The scheduler of each lane, with its own requests and pages.
        runner: Runs the plans of all lanes.
        depth: Most ticks in flight: the number of stages S, or one more for async scheduling.

    Attributes:
        schedulers: The scheduler of each lane, with its own requests and pages.
        num_steps: Number of steps so far.
        num_stage_ticks: Number of ticks so far, bubbles included, times the number of stages.
        num_idle_stage_ticks: Number of these in which the stage was idle.
    """

    def __init__(self, schedulers: collections.abc.Sequence[Scheduler], runner: Runner, depth: int):
        self.schedulers = tuple(schedulers)
        self.num_steps = 0
        self.num_stage_ticks = 0
        self.num_idle_stage_ticks = 0
        self._num_stages = schedulers[0].limits.num_stages
        assert depth >= self._num_stages, f"depth {depth} leaves some of {self._num_stages} stages without work"
        self._runner = runner
        self._depth = depth
        self._in_flight: collections.deque[_Tick | None] = collections.deque()

    def replace(self, replicas: "collections.abc.Iterable[Replica]") -> None:
        """Continue the counters of replicas that this one replaces; schedulers have their own."""
        for other in replicas:
            self.num_steps += other.num_steps
            self.num_stage_ticks += other.num_stage_ticks
            self.num_idle_stage_ticks += other.num_idle_stage_ticks

    @property
    def num_decode_rows(self) -> int:
        """Number of decode rows so far."""
        return sum(scheduler.num_decode_rows for scheduler in self.schedulers)

    @property
    def runner(self) -> Runner:
        """The runner of all lanes."""
        return self._runner

    @property
    def has_steps_in_flight(self) -> bool:
        """Whether any step is in flight."""
        return bool(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether there are no unfinished requests and no steps in flight."""
        return not self._in_flight and not any(scheduler.num_unfinished for scheduler in self.schedulers)

    def launch(self) -> list[Sequence] | None:
        """Plan and launch the next step of all lanes, after bubbles if needed; return the sequences it admits.

        Returns None if no sequence can run, or none before a step in flight completes.
        """
        while True:
            plans = [scheduler.schedule() for scheduler in self.schedulers]
            if any(plans):
                handle = self._runner.launch([plan or _NO_PLAN for plan in plans])
                self._add_tick(_Tick(plans, handle))
                self.num_steps += 1
                return self._admitted(plans)
            if not self._in_flight or self._num_stages == 1:
                return None
            self._add_tick(None)
            if len(self._in_flight) >= self._depth:
                return None

    def collect(self, is_last: bool) -> list[LaneResult]:
        """Complete the oldest step if ``depth`` ticks are in flight or ``is_last``; return what it did in each lane."""
        if not self._in_flight or (not is_last and len(self._in_flight) < self._depth):
            return []
        tick = self._in_flight.popleft()
        assert tick is not None, "the oldest tick in flight is a bubble"
        while self._in_flight and self._in_flight[0] is None:
            self._in_flight.popleft()
        lanes = zip(self.schedulers, tick.plans, self._runner.collect(tick.handle), strict=True)
        now = time.monotonic()
        return [
            LaneResult(scheduler.complete(plan, result.tokens, result.errors, now), result, now)
            for scheduler, plan, result in lanes
            if plan is not None
        ]

    def reset(self) -> None:
        """Forget all sequences, pages and steps in flight, whatever state an interrupted step has left them in."""
        self._in_flight.clear()
        self._runner.reset()
        self.schedulers = tuple(scheduler.renewed() for scheduler in self.schedulers)

    def close(self) -> None:
        """Wait for the steps in flight and free the device's memory."""
        self._in_flight.clear()
        self._runner.close()

    def _admitted(self, plans: list[StepPlan | None]) -> list[Sequence]:
        """Return the sequences that the lanes' latest plans admit."""
        admitted: list[Sequence] = []
        for scheduler, plan in zip(self.schedulers, plans, strict=True):
            admitted += [] if plan is None else scheduler.admitted
        return admitted

    def _add_tick(self, tick: _Tick | None) -> None:
        """Add a step, or None for a bubble, to the ticks in flight, and count the stages without work."""
        self._in_flight.append(tick)
        num_stages = self._num_stages
        self.num_stage_ticks += num_stages
        num_working = sum(tick is not None for tick in itertools.islice(reversed(self._in_flight), num_stages))
        if num_working < num_stages <= sum(scheduler.num_runnable for scheduler in self.schedulers):
            self.num_idle_stage_ticks += num_stages - num_working
