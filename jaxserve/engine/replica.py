"""One data-parallel replica of an engine: the schedulers of its lanes, their runner, and the steps in flight."""

import collections
import collections.abc
from typing import NamedTuple

from jaxserve.device.runner_interface import Runner, StepResult
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.plan_draft import Completion
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence

_NO_PLAN = StepPlan(-1, [], [], [])
"""Plan of a lane without work in a step."""


class LaneResult(NamedTuple):
    """What a step did in one lane."""

    completion: Completion
    result: StepResult


class Replica:
    """The schedulers of a data slice's lanes and their runner, with up to ``depth`` steps in flight.

    Attributes:
        schedulers: The scheduler of each lane, with its own requests and pages.
        num_steps: Number of steps so far.
    """

    def __init__(self, schedulers: collections.abc.Sequence[Scheduler], runner: Runner, depth: int):
        self.schedulers = tuple(schedulers)
        self.num_steps = 0
        self._runner = runner
        self._depth = depth
        self._in_flight: collections.deque[tuple[list[StepPlan | None], int]] = collections.deque()

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
        """Plan and launch the next step of all lanes; return the sequences it admits.

        Returns None if no sequence can run, or none before a step in flight completes.
        """
        plans = [scheduler.schedule() for scheduler in self.schedulers]
        if not any(plans):
            return None
        self._in_flight.append((plans, self._runner.launch([plan or _NO_PLAN for plan in plans])))
        self.num_steps += 1
        admitted: list[Sequence] = []
        for scheduler, plan in zip(self.schedulers, plans, strict=True):
            admitted += [] if plan is None else scheduler.admitted
        return admitted

    def collect(self, is_last: bool) -> list[LaneResult]:
        """Complete the oldest step if ``depth`` steps are in flight or ``is_last``; return what it did in each lane."""
        if not self._in_flight or (not is_last and len(self._in_flight) < self._depth):
            return []
        plans, handle = self._in_flight.popleft()
        lanes = zip(self.schedulers, plans, self._runner.collect(handle), strict=True)
        return [
            LaneResult(scheduler.complete(plan, result.tokens), result)
            for scheduler, plan, result in lanes
            if plan is not None
        ]

    def close(self) -> None:
        """Wait for the steps in flight and free the device's memory."""
        self._in_flight.clear()
        self._runner.close()
