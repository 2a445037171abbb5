"""The runner of an engine whose devices are those of several processes, in the process that plans its steps."""

from collections.abc import Sequence

from jaxserve.device.build import EnginePlan
from jaxserve.device.runner_interface import Runner, StepResult
from jaxserve.group.digests import Digests
from jaxserve.group.leader import Leader
from jaxserve.group.messages import Launch, WarmUp
from jaxserve.group.own_part import OwnPart
from jaxserve.group.results import decode_results, merged
from jaxserve.group.stage_ranks import StageRanks
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.plan_codec import SentRows, encode_plans


def lead(leader: Leader, own: Runner, plan: EnginePlan) -> "GroupRunner":
    """Wait until all followers are loaded; return the runner of all processes.

    Args:
        leader: The connections to the followers.
        own: Runs the part of this process.
        plan: What all processes run.
    """
    leader.wait_ready()
    return GroupRunner(leader, own if plan.num_stages == 1 else OwnPart(own), StageRanks.of(plan))


class GroupRunner:
    """A ``Runner`` that sends every plan to the followers before it launches its own part of the step.

    Args:
        leader: The connections to the followers, which are ready.
        own: Runs the part of this process.
        ranks: The ranks of each stage.
    """

    def __init__(self, leader: Leader, own: Runner, ranks: StageRanks):
        self._leader = leader
        self._own = own
        self._ranks = ranks
        self._number = 0
        self._failure = ""
        self._forget()

    def _forget(self) -> None:
        self._sent = SentRows()
        self._digests = Digests()
        self._digests_of_plans = Digests()
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
        number, data = self._in_flight[0]
        try:
            results = self._own.collect()
            if self._ranks.reporters:
                found = {rank: decode_results(self._leader.results(rank, number)) for rank in self._ranks.reporters}
                results = merged(results, found, self._ranks.first_of_last)
        except Exception as error:
            self._fail(error)
            raise
        self._in_flight.pop(0)
        digests = self._digests.add(data, results), self._digests_of_plans.add(data, [])
        self._leader.computed(number, *digests, self._ranks.ranks[-1])
        self._leader.check()
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
