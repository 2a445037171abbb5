"""Choose how many drafts a model on the device makes after each step.

Each costs a pass of the draft model, verified or not. So the number is chosen when drafts are made: the next step
verifies all of them.
"""

import itertools
from collections import deque
from typing import NamedTuple

from jaxserve.scheduling.draft_costs import MARGIN, PROBE_STEPS, Acceptance, CostsByRows, Probes, StepCosts

_PROBE_LENGTH = 2
"""Steps of a probe, of which the second is measured: the first may also do what the steps before it have left."""
_FIRST_PROBES = (4, 4, 8, 8, 8, 8)
"""Steps up to each of the first probes. After two of them the cost of drafts is known."""
_PROBE_COST = 0.01
"""Most time of probes where drafts do not pay, as a part of all steps."""


class MeasuredStep(NamedTuple):
    """The time of a step of decode rows.

    Attributes:
        number: Number of its plan.
        num_rows: Number of rows.
        num_verified: Number of drafts that it has verified.
        num_made: Number of drafts that it has made after each row.
        seconds: Time from the tokens of the step before to its own.
    """

    number: int
    num_rows: int
    num_verified: int
    num_made: int
    seconds: float


class DraftPasses:
    """Chooses the number of drafts that promises the most tokens per second, from measured acceptance and times.

    It starts with the most drafts, and stays there until steps with and without drafts have been measured. Every so
    often two steps do what seems worse, so that its measured time is not stale.

    Whether the passes that make drafts are part of the time of the step that makes them or of the step that verifies
    them depends on the device. So steps are compared that both verify and make drafts, or do neither.

    Args:
        max_drafts: Most drafts per row.
        is_adaptive: Whether to choose; if not, every step makes the most drafts.
        num_stages: Number of pipeline stages; steps of the same rows are as many plans apart.

    Attributes:
        is_adaptive: Whether it chooses.
    """

    def __init__(self, max_drafts: int, is_adaptive: bool, num_stages: int = 1):
        self._max_drafts = max_drafts
        self.is_adaptive = is_adaptive
        self._num_stages = num_stages
        self._acceptance = Acceptance(max_drafts)
        self._costs = CostsByRows()
        self._recent = [deque[MeasuredStep](maxlen=3) for _ in range(num_stages)]
        self._probes = Probes(_FIRST_PROBES, _PROBE_LENGTH * num_stages * PROBE_STEPS)
        self._probe: int | None = None
        self._num_probe_steps = 0  # left of the probe

    def choose(self, num_rows: int, budget: int) -> int:
        """Return how many drafts to make after each of ``num_rows`` rows, whose next step has room for ``budget``."""
        if not self.is_adaptive:
            return self._max_drafts
        costs = self._costs.of(num_rows)
        best, rate = self._best(num_rows, budget, costs)
        pays, most = rate > MARGIN, max(1, min(self._max_drafts, budget // num_rows))
        if self._num_probe_steps == 0:
            self._probe = None
            cost = 1.0 if pays else costs.estimate(most * num_rows)
            if self._probes.is_due(_PROBE_LENGTH * self._num_stages * (cost - 1) / _PROBE_COST):
                is_of_most = self._probes.num_made % 2 == 0 and best < most
                self._probe = most if is_of_most else 0 if pays else best
                self._num_probe_steps = _PROBE_LENGTH * self._num_stages
        if self._probe is None:
            return best if pays else 0
        self._num_probe_steps -= 1
        return min(self._probe, most)

    def add_row(self, num_drafts: int, num_accepted: int, num_rows: int = 1) -> None:
        """Count the accepted drafts of a row, of those that were verified; or of ``num_rows`` rows like it."""
        self._acceptance.add(num_drafts, num_accepted, num_rows)

    def add_step(self, step: MeasuredStep) -> None:
        """Add a step, in the order of plans."""
        recent = self._recent[step.number % self._num_stages]
        recent.append(step)
        if len(recent) < 3 or any(b.number - a.number != self._num_stages for a, b in itertools.pairwise(recent)):
            return
        first, second, third = recent
        if not first.num_rows == second.num_rows == third.num_rows or min(first.seconds, third.seconds) <= 0:
            return
        if _is_plain(first) and third.num_verified and second.num_made and third.num_made:
            self.add_cost(step.num_rows, third.num_verified, third.seconds / first.seconds)
        elif _is_plain(third) and first.num_verified and first.num_made and not second.num_made:
            self.add_cost(step.num_rows, first.num_verified, first.seconds / third.seconds)

    def add_cost(self, num_rows: int, num_drafts: int, cost: float) -> None:
        """Add the measured time of a step with drafts, relative to one without."""
        self._costs.of(num_rows).add(num_drafts, cost)

    def _best(self, num_rows: int, budget: int, costs: StepCosts) -> tuple[int, float]:
        """Return how many drafts per row promise the most tokens per second, at least one, and how many times those of
        a step without drafts these are."""
        best, best_rate, gain = 1, 0.0, 0.0
        for count, expected in enumerate(self._acceptance.expected, 1):
            if count > 1 and count * num_rows > budget:
                break
            gain += expected
            rate = (1 + gain) / costs.estimate(count * num_rows)
            if rate > best_rate:
                best, best_rate = count, rate
        return best, best_rate


def _is_plain(step: MeasuredStep) -> bool:
    """Whether a step neither verifies drafts nor makes any."""
    return not step.num_verified and not step.num_made
