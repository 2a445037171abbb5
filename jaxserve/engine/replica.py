"""One data slice of an engine: a scheduler, its runner, and the steps between them."""

import collections

from jaxserve.device.runner_interface import Runner, StepResult
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.plan_draft import Completion
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence


class Replica:
    """One data slice: a scheduler and its runner, with up to ``depth`` steps in flight."""

    def __init__(self, scheduler: Scheduler, runner: Runner, depth: int):
        self.scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._in_flight: collections.deque[tuple[StepPlan, int]] = collections.deque()
        self.num_steps = 0

    @property
    def num_decode_rows(self) -> int:
        """Rows of all steps that continued a completion."""
        return self.scheduler.num_decode_rows

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is in flight."""
        return not self._in_flight and not self.scheduler.num_unfinished

    def launch(self) -> list[Sequence] | None:
        """Plans and starts the next step; returns the sequences it admits.

        None where nothing is left to run, or nothing that does not wait for tokens in flight.
        """
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self._in_flight.append((plan, self._runner.launch(plan)))
        self.num_steps += 1
        return self.scheduler.admitted

    def collect(self, is_last: bool) -> tuple[Completion, StepResult] | None:
        """The oldest step's results, once ``depth`` steps are in flight or none can be added (``is_last``)."""
        if not self._in_flight or (not is_last and len(self._in_flight) < self._depth):
            return None
        plan, handle = self._in_flight.popleft()
        result = self._runner.collect(handle)
        return self.scheduler.complete(plan, result.tokens), result

    def close(self) -> None:
        """Waits for what is in flight and frees the device's memory."""
        self._in_flight.clear()
        self._runner.close()
