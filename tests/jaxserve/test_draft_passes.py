"""How many drafts a model on the device makes, on a machine whose times are known."""

import statistics

import pytest

from jaxserve.scheduling.draft_costs import PROBE_STEPS
from jaxserve.scheduling.draft_passes import DraftPasses, MeasuredStep


def run(
    num_steps: int, right: int, cost: float, is_adaptive: bool = True, num_stages: int = 1, makes_first: bool = False
) -> list[int]:
    """The drafts that each of a row's steps makes, of which the first ``right`` are accepted.

    Times grow with each step, as those of growing contexts do. A draft costs ``cost``, half of it to make: in the step
    that makes it or, if ``makes_first``, between its tokens and those of the next.
    """
    passes, found = DraftPasses(4, is_adaptive, num_stages), list[int]()
    for number in range(num_steps):
        made, verified = passes.choose(1, 100), found[-num_stages] if len(found) >= num_stages else 0
        found.append(made)
        if verified:
            passes.add_row(verified, min(verified, right))
        seconds = (1 + cost / 2 * (verified + (verified if makes_first else made))) * 1.001**number
        passes.add_step(MeasuredStep(number, 1, verified, made, seconds))
    return found


@pytest.mark.parametrize("makes_first", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_passes_follow_what_pays(makes_first: bool, num_stages: int) -> None:
    """All drafts, none and some: those that are right pay unless they cost more than the step."""
    given = {"makes_first": makes_first, "num_stages": num_stages}
    assert run(2000, 4, 0.2, **given).count(4) > 0.97 * 2000
    for right, cost in ((0, 0.1), (4, 2.0)):
        found = run(4500, right, cost, **given)
        assert found[0] == 4, "nothing is known at first"
        assert sum(map(bool, found[12 * num_stages : 40])) <= 3, "a few steps tell"
        assert 1 <= len([made for made in found[1000:] if made]) <= 3500 / PROBE_STEPS + 4
    assert statistics.mode(run(2000, 2, 0.3, **given)[-50:]) == 2


def test_what_costs_much_is_tried_seldom() -> None:
    """Probes take a hundredth of the time."""
    found = run(4000, 4, 3.0)[1000:]
    assert sum(1 + 3 * made for made in found if made) <= 0.02 * len(found)


def test_a_fixed_number_is_made_whatever_it_costs() -> None:
    assert set(run(300, 0, 9.0, is_adaptive=False)) == {4}


def test_no_more_are_made_than_the_next_step_verifies() -> None:
    found = [DraftPasses(8, is_adaptive=True).choose(4, budget) for budget in (32, 31, 12, 2)]
    assert found == [8, 7, 3, 1]
