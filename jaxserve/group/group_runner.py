"""The runner of an engine whose devices are those of several processes, in the process that plans its steps."""

from collections.abc import Sequence

from jaxserve.device.runner_interface import Runner, StepResult
from jaxserve.group.digests import Digests
from jaxserve.group.leader import Leader
from jaxserve.group.messages import Launch, WarmUp
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.plan_codec import SentRows, encode_plans


def lead(leader: Leader, own: Runner) -> "GroupRunner":
    """Wait until all followers are loaded; return the runner of all processes."""
    leader.wait_ready()
    return GroupRunner(leader, own)


class GroupRunner:
    """A ``Runner`` that sends every plan to the followers before it launches its own part of the step.

    Args:
        leader: The connections to the followers, which are ready.
        own: Runs the part of this process.
    """

    def __init__(self, leader: Leader, own: Runner):
        self._leader = leader
        self._own = own
        self._number = 0
        self._failure = ""
        self._forget()

    def _forget(self) -> None:
        self._sent = SentRows()
        self._digests = Digests()
        self._in_flight = list[tuple[int, bytes]]()

    def warm_up(self) -> None:
        """See ``Runner``."""
        self._leader.send_all(WarmUp())
        try:
            self._own.warm_up()
        except Exception as error:
            self._fail(error)
            raise

    def launch(self, plans: Sequence[StepPlan]) -> None:
        """See ``Runner``."""
        number, data = self._number, encode_plans(plans, self._sent)
        self._leader.launched(number)
        self._leader.send_all(Launch(number, data))
        self._number += 1
        try:
            self._own.launch(plans)
        except Exception as error:
            self._fail(error)
            raise
        self._in_flight.append((number, data))

    def collect(self) -> list[StepResult]:
        """See ``Runner``."""
        try:
            results = self._own.collect()
        except Exception as error:
            self._fail(error)
            raise
        number, data = self._in_flight.pop(0)
        self._leader.computed(number, self._digests.add(data, results))
        return results

    def _fail(self, error: Exception) -> None:
        """Let the group end because of a step that failed here, if no other process is its reason."""
        self._failure = f"a step of rank 0 failed: {error}"
        self._leader.blame(error)

    def reset(self) -> None:
        """See ``Runner``."""
        self._leader.reset()
        self._own.reset()
        self._forget()

    def close(self) -> None:
        """See ``Runner``; the followers end."""
        try:
            self._own.close()
        finally:
            self._leader.end(self._failure)
