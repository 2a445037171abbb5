"""One data-parallel replica of an engine: the schedulers of its lanes, their runner, and the steps in flight."""

import collections
import collections.abc
import time

from jaxserve.device.runner_interface import Runner, StepResult
from jaxserve.scheduling.pipeline import num_idle_stages
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step import Step

_NO_PLAN = StepPlan(-1, same_rows_as=-1)
"""Plan of a lane without work in a step."""


class Replica:
    """The schedulers of a data slice's lanes and their runner, with up to ``depth`` steps in flight.

    Args:
        schedulers: The scheduler of each lane, with its own requests and pages.
        runner: Runs the plans of all lanes.
        depth: Most steps in flight: 1, or 2 for async scheduling; for S stages, S - 1 more.

    Attributes:
        schedulers: The scheduler of each lane, with its own requests and pages.
        runner: Runs the plans of all lanes.
        num_steps: Number of steps so far.
        num_stage_ticks: Number of steps so far; with several stages, of ticks, bubbles included, times the stages.
        num_idle_stage_ticks: Number of these in which the stage was idle; see ``num_idle_stages``.
    """

    def __init__(self, schedulers: collections.abc.Sequence[Scheduler], runner: Runner, depth: int):
        self.schedulers = tuple(schedulers)
        self.runner = runner
        self.num_steps = 0
        self.num_stage_ticks = 0
        self.num_idle_stage_ticks = 0
        self._num_stages = schedulers[0].limits.num_stages
        assert depth >= self._num_stages, f"depth {depth} leaves some of {self._num_stages} stages without work"
        self._depth = depth
        self._in_flight = collections.deque[list[StepPlan | None] | None]()  # the plans of each step; None: a bubble

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
    def has_steps_in_flight(self) -> bool:
        """Whether any step is in flight."""
        return bool(self._in_flight)

    def launch(self) -> bool:
        """Plan and launch the next step of all lanes, in a pipeline after bubbles if needed.

        Returns:
            Whether any sequence can run before a step in flight completes, and need not wait for better drafts.
        """
        if self._num_stages == 1 and self._in_flight and any(scheduler.waits for scheduler in self.schedulers):
            return False
        now = time.monotonic()
        plans = [scheduler.schedule(now) for scheduler in self.schedulers]
        while not any(plans):
            if self._num_stages == 1 or not self._in_flight:
                return False
            self._add_tick(None)
            if len(self._in_flight) >= self._depth:
                return False
            plans = [scheduler.schedule(now) for scheduler in self.schedulers]
        self.runner.launch([plan or _NO_PLAN for plan in plans])
        self._add_tick(plans)
        self.num_steps += 1
        return True

    def collect(self, is_last: bool) -> list[tuple[Step, StepResult]]:
        """Complete the oldest step if ``depth`` steps are in flight or ``is_last``; return what it did in each lane."""
        if not self._in_flight or (not is_last and len(self._in_flight) < self._depth):
            return []
        plans = self._in_flight.popleft()
        assert plans is not None, "the oldest step in flight is a bubble"
        while self._in_flight and self._in_flight[0] is None:
            self._in_flight.popleft()
        results = self.runner.collect()
        now = time.monotonic()
        return [
            (scheduler.complete(plan, result.tokens, result.errors, now), result)
            for scheduler, plan, result in zip(self.schedulers, plans, results, strict=True)
            if plan is not None
        ]

    def reset(self) -> None:
        """Forget all sequences, pages and steps in flight, whatever state an interrupted step has left them in."""
        self._in_flight.clear()
        self.runner.reset()
        self.schedulers = tuple(scheduler.renewed() for scheduler in self.schedulers)

    def close(self) -> None:
        """Wait for the steps in flight and free the device's memory."""
        self._in_flight.clear()
        self.runner.close()

    def _add_tick(self, plans: list[StepPlan | None] | None) -> None:
        """Add the plans of a step, or None for a bubble of a pipeline, to the ticks in flight."""
        self._in_flight.append(plans)
        self.num_stage_ticks += self._num_stages
        if self._num_stages > 1:
            num_runnable = sum(scheduler.num_runnable for scheduler in self.schedulers)
            self.num_idle_stage_ticks += num_idle_stages(reversed(self._in_flight), self._num_stages, num_runnable)
