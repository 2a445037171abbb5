"""The runner of an engine whose devices are those of several processes, in the process that plans its steps."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from jaxserve.device.build import EnginePlan
from jaxserve.device.runner import LocalRunner
from jaxserve.device.runner_interface import Runner, StepResult
from jaxserve.group.digests import Digests
from jaxserve.group.leader import Leader
from jaxserve.group.messages import Launch, WarmUp
from jaxserve.group.own_part import OwnPart
from jaxserve.group.results import decode_results, merged
from jaxserve.group.stage_ranks import StageRanks, slice_ranks
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.plan_codec import SentRows, encode_plans


def lead(leader: Leader, own: Sequence[LocalRunner], plan: EnginePlan) -> "list[GroupRunner]":
    """Wait until all followers are loaded; return the runner of each data slice.

    Args:
        leader: The connections to the followers.
        own: Runs the part of this process of each data slice.
        plan: What all processes run.
    """
    leader.wait_ready()
    return _runners(leader, own, plan, _Shared())


def _runners(leader: Leader, own: Sequence[LocalRunner], plan: EnginePlan, shared: "_Shared") -> "list[GroupRunner]":
    parts = zip(own, slice_ranks(plan), strict=True)
    return [GroupRunner(leader, each, ranks, index, shared) for index, (each, ranks) in enumerate(parts)]


class _Shared:
    """What the runners of all data slices of a group have in common.

    Attributes:
        numbers: The numbers of the steps to come: all processes launch those of all data slices in one order.
        num_open: Number of runners that are not closed.
        failure: Why the group ends; empty: nothing has failed.
    """

    def __init__(self):
        self.numbers = itertools.count()
        self.num_open = 0
        self.failure = ""


class GroupRunner:
    """A ``Runner`` that sends every plan to the followers before it launches its own part of the step.

    Args:
        leader: The connections to the followers, which are ready.
        own: Runs the part of this process.
        ranks: The ranks of each stage.
        replica: Index of the data slice.
        shared: What all data slices have in common; None: there is no other.
    """

    def __init__(
        self, leader: Leader, own: LocalRunner, ranks: StageRanks, replica: int = 0, shared: _Shared | None = None
    ):
        self._leader = leader
        self._shared = shared or _Shared()
        self._shared.num_open += 1
        self._replica = replica
        self._local = own
        self._own: Runner = own if len(ranks.ranks) == 1 else OwnPart(own)
        self._ranks = ranks
        self._forget()

    def replaced(self, own: Sequence[LocalRunner], plan: EnginePlan) -> "list[GroupRunner]":
        """Return the runners that follow those of a group, which were all released.

        Args:
            own: Runs the part of this process of each data slice.
            plan: What all processes run from now on.
        """
        return _runners(self._leader, own, plan, self._shared)

    def release(self) -> LocalRunner:
        """Return the part of this process, in which no step is in flight; this runner cannot be used afterwards."""
        assert not self._in_flight, "steps are in flight"
        if isinstance(self._own, OwnPart):
            self._own.release()
        self._shared.num_open -= 1
        return self._local

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Let the group end if the block raises an error."""
        try:
            yield
        except Exception as error:
            self._fail(error)
            raise

    def _forget(self) -> None:
        self._sent = SentRows()
        self._digests = Digests()
        self._digests_of_plans = Digests()
        self._in_flight = list[tuple[int, bytes]]()

    def warm_up(self) -> None:
        """See ``Runner``."""
        self._leader.send_all(WarmUp(self._replica))
        with self.failing():
            self._own.warm_up()

    def launch(self, plans: Sequence[StepPlan]) -> None:
        """See ``Runner``."""
        number, data = next(self._shared.numbers), encode_plans(plans, self._sent)
        self._leader.launched(number)
        self._leader.send_all(Launch(number, data, self._replica))
        with self.failing():
            self._own.launch(plans)
        self._in_flight.append((number, data))

    def collect(self) -> list[StepResult]:
        """See ``Runner``."""
        number, data = self._in_flight[0]
        with self.failing():
            results = self._own.collect()
            if self._ranks.reporters:
                found = {rank: decode_results(self._leader.results(rank, number)) for rank in self._ranks.reporters}
                results = merged(results, found, self._ranks.first_of_last)
        self._in_flight.pop(0)
        digests = self._digests.add(data, results), self._digests_of_plans.add(data, [])
        self._leader.computed(number, *digests, self._ranks.ranks[-1])
        self._leader.check()
        return results

    def _fail(self, error: Exception) -> None:
        """Let the group end because of a step or a move that failed here, if no other process is its reason."""
        self._shared.failure = f"a step of rank 0 failed: {error}"
        self._leader.blame(error)

    def reset(self) -> None:
        """See ``Runner``."""
        self._leader.reset(self._replica)
        self._own.reset()
        self._forget()

    def close(self) -> None:
        """See ``Runner``; the followers end with the last data slice, or at once if the group has failed."""
        try:
            self._own.close()
        finally:
            self._shared.num_open -= 1
            if self._shared.failure or not self._shared.num_open:
                self._leader.end(self._shared.failure)
