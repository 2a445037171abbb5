"""One data-parallel replica of an engine: a scheduler, its runner, and the steps in flight."""

import collections

from jaxserve.device.runner_interface import Runner, StepResult
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.plan_draft import Completion
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence


class Replica:
    """A scheduler and its runner, with up to ``depth`` steps in flight."""

    def __init__(self, scheduler: Scheduler, runner: Runner, depth: int):
        self.scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._in_flight: collections.deque[tuple[StepPlan, int]] = collections.deque()
        self.num_steps = 0

    @property
    def num_decode_rows(self) -> int:
        """Number of decode rows so far."""
        return self.scheduler.num_decode_rows

    @property
    def is_idle(self) -> bool:
        """Whether there are no unfinished requests and no steps in flight."""
        return not self._in_flight and not self.scheduler.num_unfinished

    def launch(self) -> list[Sequence] | None:
        """Plan and launch the next step; return the sequences it admits.

        Returns None if no sequence can run, or none before a step in flight completes.
        """
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self._in_flight.append((plan, self._runner.launch(plan)))
        self.num_steps += 1
        return self.scheduler.admitted

    def collect(self, is_last: bool) -> tuple[Completion, StepResult] | None:
        """Complete the oldest step if ``depth`` steps are in flight or ``is_last``; else return None."""
        if not self._in_flight or (not is_last and len(self._in_flight) < self._depth):
            return None
        plan, handle = self._in_flight.popleft()
        result = self._runner.collect(handle)
        return self.scheduler.complete(plan, result.tokens), result

    def close(self) -> None:
        """Wait for the steps in flight and free the device's memory."""
        self._in_flight.clear()
        self._runner.close()
