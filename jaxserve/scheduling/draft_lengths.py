"""Choose how many drafts each row of a step verifies, for the most tokens per second.

What is expected is measured: how often drafts are accepted, and how long steps take. Nothing here affects the tokens of
a sequence, only the number of steps that it takes.
"""

import itertools
import operator
from collections.abc import Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType
from typing import Literal, NamedTuple

from jaxserve.scheduling.draft_costs import MARGIN, Acceptance, CostsByRows, Probes
from jaxserve.scheduling.draft_passes import DraftPasses
from jaxserve.scheduling.plan import SchedulerLimits


class Proposed(NamedTuple):
    """The drafts that are proposed for a row.

    Attributes:
        num_tokens: Their number.
        is_constrained: Whether a constraint allows, or even forces, each of them.
        is_ahead: Whether the tokens before them are not all known.
    """

    num_tokens: int
    is_constrained: bool = False
    is_ahead: bool = False


class Choice(NamedTuple):
    """What a step does.

    Attributes:
        lengths: Number of drafts of each row.
        waits: Whether the next plan should wait for the tokens of this step.
    """

    lengths: list[int]
    waits: bool


class DraftLengths:
    """Chooses the number of drafts of each row, and whether the next plan waits for their tokens.

    A step that waits has better drafts than one that is launched ahead, but the device has nothing to do while the host
    plans it. Every so often a step does what seems worse, so that its measured time is not stale.

    Args:
        max_drafts: Most drafts per row.
        is_adaptive: Whether to choose; if not, each row verifies all its drafts.
        can_wait: Whether plans can wait for tokens: not in a pipeline, nor for drafts that are made on the device.

    Attributes:
        is_adaptive: Whether it chooses.
        passes: Chooses how many drafts are made on the device, all of which are verified; None if the host makes them.
    """

    def __init__(self, max_drafts: int, is_adaptive: bool, can_wait: bool, passes: DraftPasses | None = None):
        self._max_drafts = max_drafts
        self.is_adaptive = is_adaptive
        self.passes = passes
        self._can_wait = can_wait
        self._acceptance: dict[tuple[bool, int], Acceptance] = {}
        self._costs = CostsByRows()
        self._probes = Probes(_FIRST_PROBES)
        self._probe: _Probe | None = None  # what the next step does
        self._latest: _MeasuredStep | None = None
        self._overlaps = False

    @classmethod
    def within(cls, limits: SchedulerLimits) -> "DraftLengths":
        """Return one for a scheduler with these limits."""
        most, is_adaptive = limits.max_draft_tokens, limits.adapts_drafts
        if not limits.num_lookahead:
            return cls(most, is_adaptive, limits.can_wait)
        return cls(most, False, limits.can_wait, DraftPasses(most, is_adaptive, limits.num_stages))

    def choose(self, proposed: Items[Proposed], budget: int) -> Choice:
        """Choose for the decode rows of a step, which may have ``budget`` drafts together."""
        everything, nothing = _cut(proposed, budget), [0] * len(proposed)
        if not any(everything):
            return Choice(everything, False)
        if not self.is_adaptive:
            return Choice(everything, self._can_wait)
        best, rate = self._best(proposed, budget)
        pays, lengths = rate > MARGIN, nothing
        if pays:
            rows = zip(proposed, best, strict=True)
            lengths = [0 if row.is_ahead and self._can_wait else length for row, length in rows]
        if self._probe is not None:
            lengths = {"none": nothing, "best": best, "all": everything}[self._probe]
            self._probe = None
        elif self._probes.is_due():
            self._probe = _PROBES[pays][self._probes.num_made % 2]
            pays = self._probe != "none"
        return Choice(lengths, pays and self._can_wait)

    def add_row(self, proposed: Proposed, num_drafts: int, num_accepted: int, num_rows: int = 1) -> None:
        """Count the accepted drafts of a row, of those that were verified; or of ``num_rows`` rows like it."""
        if self.passes is None:
            self._kind(proposed).add(num_drafts, num_accepted, num_rows)
        elif not proposed.is_constrained:
            self.passes.add_row(num_drafts, num_accepted, num_rows)

    def add_step(self, num_rows: int, is_ahead: bool, num_drafts: int, seconds: float) -> None:
        """Add the measured time of a step of decode rows, from the tokens of the step before."""
        self._overlaps = self._overlaps or is_ahead
        step, before = _MeasuredStep(num_rows, is_ahead, num_drafts, seconds), self._latest
        self._latest = step
        if before is None or before.num_rows != num_rows or min(before.seconds, seconds) <= 0:
            return
        plain, drafting = (step, before) if before.num_drafts else (before, step)
        is_usual = plain.is_ahead or not self._overlaps
        if drafting.num_drafts and not plain.num_drafts and is_usual:
            self._costs.of(num_rows).add(drafting.num_drafts, drafting.seconds / plain.seconds)

    def _best(self, proposed: Items[Proposed], budget: int) -> tuple[list[int], float]:
        """Return how many drafts of each row promise the most tokens per second, at least one, and how many times those
        of a step without drafts these are."""
        gains = [
            (gain, index)
            for index, row in enumerate(proposed)
            if row.num_tokens
            for gain in self._kind(row).expected[: row.num_tokens]
        ]
        gains = sorted(gains, key=operator.itemgetter(0), reverse=True)[:budget]
        sums, num_rows = [*itertools.accumulate(gain for gain, _ in gains)], len(proposed)
        table, count, best, best_rate = self._costs.of(num_rows), len(gains), 0, 0.0
        while count:
            rate = (1 + sums[count - 1] / num_rows) / table.estimate(count)
            if rate > best_rate:
                best, best_rate = count, rate
            count //= 2
        lengths = [0] * num_rows
        for _, row in gains[:best]:
            lengths[row] += 1
        return lengths, best_rate

    def _kind(self, proposed: Proposed) -> Acceptance:
        key = proposed.is_constrained, proposed.num_tokens.bit_length()
        if key not in self._acceptance:
            self._acceptance[key] = Acceptance(self._max_drafts)
        return self._acceptance[key]


_FIRST_PROBES = (8,) * 6  # steps up to each
_Probe = Literal["none", "best", "all"]
_PROBES: Mapping[bool, tuple[_Probe, _Probe]] = MappingProxyType({True: ("none", "all"), False: ("best", "all")})
"""Probes in turns, where drafts are verified and where they are not."""


class _MeasuredStep(NamedTuple):
    num_rows: int
    is_ahead: bool
    num_drafts: int
    seconds: float


def _cut(proposed: Items[Proposed], budget: int) -> list[int]:
    """Return the number of drafts of each row as far as the budget goes, first come, first served."""
    found = list[int]()
    for row in proposed:
        found.append(min(row.num_tokens, budget))
        budget -= found[-1]
    return found
