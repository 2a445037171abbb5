"""What verifying drafts brings and costs, as measured: how often drafts are accepted, and how long steps take."""

import bisect
import math
import statistics
from collections import deque
from collections.abc import Sequence

PROBE_STEPS = 64
"""Of this many steps for which there are drafts, one does what seems worse."""
MARGIN = 1.03
"""Times as many tokens per second that drafts must promise: times are noisy."""
_FIRST_RATE = 0.9  # acceptance of drafts that have not been tried
_FIRST_WEIGHT = 1.0  # as many drafts
_DECAY = 0.99  # of counts, with each further draft: about the last 100 count
_FEW_PAIRS, _MOST_PAIRS = 2, 9  # of which the median counts


class Acceptance:
    """Measured probability that drafts of one kind are accepted, by position.

    Args:
        max_drafts: Most drafts per row.
    """

    def __init__(self, max_drafts: int):
        self._tried = [0.0] * max_drafts
        self._accepted = [0.0] * max_drafts
        self._expected: list[float] | None = None

    def add(self, num_drafts: int, num_accepted: int, num_rows: int = 1) -> None:
        """Count the drafts of rows that are alike up to the first that was not accepted."""
        kept = _DECAY**num_rows
        new = (1 - kept) / (1 - _DECAY)
        for position in range(min(num_accepted + 1, num_drafts)):
            self._tried[position] = self._tried[position] * kept + new
            self._accepted[position] = self._accepted[position] * kept + new * (position < num_accepted)
        self._expected = None

    @property
    def expected(self) -> list[float]:
        """For each position the probability that all drafts up to it are accepted.

        A position that has hardly been tried counts like the one before it.
        """
        if self._expected is None:
            rate, product, found = _FIRST_RATE, 1.0, list[float]()
            for tried, accepted in zip(self._tried, self._accepted, strict=True):
                rate = (accepted + _FIRST_WEIGHT * rate) / (tried + _FIRST_WEIGHT)
                product *= rate
                found.append(product)
            self._expected = found
        return self._expected


class StepCosts:
    """Measured time of steps with about as many rows, by their number of drafts, relative to a step without.

    Steps that follow each other are compared, so that neither growing contexts nor other programs on the machine count.
    """

    def __init__(self) -> None:
        self._latest: dict[int, deque[float]] = {}
        self._known: list[tuple[int, float]] = [(0, 1.0)]  # numbers of drafts, in order, and the median of their costs

    def add(self, num_drafts: int, cost: float) -> None:
        """Add a step."""
        size = round(2 ** (round(2 * math.log2(num_drafts)) / 2))
        latest = self._latest.setdefault(size, deque(maxlen=_MOST_PAIRS))
        latest.append(max(cost, 1.0))  # less is noise, and would say that wrong drafts pay
        if len(latest) >= _FEW_PAIRS:
            index = bisect.bisect_left(self._known, size, key=_size)
            is_new = index == len(self._known) or self._known[index][0] != size
            self._known[index : index + (not is_new)] = [(size, statistics.median(latest))]

    def estimate(self, num_drafts: int) -> float:
        """Return the cost of a step, interpolated; above the largest number that was measured, that one's."""
        index = bisect.bisect_left(self._known, num_drafts, key=_size)
        if index == len(self._known):
            return self._known[-1][1]
        size, cost = self._known[index]
        if size == num_drafts:
            return cost
        size_below, cost_below = self._known[index - 1]
        return cost_below + (cost - cost_below) * (num_drafts - size_below) / (size - size_below)


class CostsByRows:
    """The costs of steps, apart by their number of rows."""

    def __init__(self) -> None:
        self._tables: dict[int, StepCosts] = {}

    def of(self, num_rows: int) -> StepCosts:
        """Return those of steps with about as many rows."""
        key = round(4 * math.log2(num_rows))
        if key not in self._tables:
            self._tables[key] = StepCosts()
        return self._tables[key]


class Probes:
    """Says which steps do what seems worse, so that its measured time is not stale.

    Args:
        first: Steps up to each of the first probes.
        later: Steps up to each of the later ones.

    Attributes:
        num_made: Number of probes so far.
    """

    def __init__(self, first: Sequence[int], later: int = PROBE_STEPS):
        self._first = first
        self._later = later
        self.num_made = 0
        self._num_steps = 0

    def is_due(self, fewest_steps: float = 0.0) -> bool:
        """Count a step, and return whether it is a probe: the last one is ``fewest_steps`` before it at least."""
        self._num_steps += 1
        every = self._first[self.num_made] if self.num_made < len(self._first) else self._later
        if self._num_steps < max(every, fewest_steps):
            return False
        self._num_steps = 0
        self.num_made += 1
        return True


def _size(cell: tuple[int, float]) -> int:
    return cell[0]
