"""The part of process 0 in the steps of a group whose pipeline stages are those of several processes."""

import queue
import threading
from collections.abc import Sequence

from jaxserve.device.runner_interface import Runner, StepResult
from jaxserve.scheduling.plan import StepPlan


class OwnPart:
    """A ``Runner`` that launches on a thread of its own: a launch may wait for what other processes compute, while who
    plans goes on.

    Args:
        runner: Runs the part of this process.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._plans: queue.SimpleQueue[Sequence[StepPlan] | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._num_in_flight = 0
        threading.Thread(target=self._launch_all, name="jaxserve-launch", daemon=True).start()

    def warm_up(self) -> None:
        """See ``Runner``."""
        self._runner.warm_up()

    def launch(self, plans: Sequence[StepPlan]) -> None:
        """See ``Runner``; ``collect`` raises the error of a launch."""
        self._plans.put(plans)
        self._num_in_flight += 1

    def collect(self) -> list[StepResult]:
        """See ``Runner``."""
        self._num_in_flight -= 1
        error = self._launched.get()
        if error is not None:
            raise error
        return self._runner.collect()

    def reset(self) -> None:
        """See ``Runner``."""
        self._wait()
        self._runner.reset()

    def release(self) -> None:
        """End the thread; the runner is no longer used through this object."""
        self._wait()
        self._plans.put(None)

    def close(self) -> None:
        """See ``Runner``."""
        self.release()
        self._runner.close()

    def _wait(self) -> None:
        """Wait until every step is launched or has failed."""
        while self._num_in_flight:
            self._num_in_flight -= 1
            self._launched.get()

    def _launch_all(self) -> None:
        while (plans := self._plans.get()) is not None:
            try:
                self._runner.launch(plans)
            except Exception as error:
                self._launched.put(error)
            else:
                self._launched.put(None)
