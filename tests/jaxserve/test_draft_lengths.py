"""How many drafts a step verifies, by measured acceptance and times, on a machine whose times are known."""

import itertools

import pytest

from jaxserve.scheduling.draft_costs import PROBE_STEPS, Acceptance, StepCosts
from jaxserve.scheduling.draft_lengths import Choice, DraftLengths, Proposed


def run(
    num_steps: int, accepted: list[int], cost_of_draft: float, proposed: int = 4, is_adaptive: bool = True
) -> list[int]:
    """The drafts of each step: rows whose first drafts are right, and times relative to a step without drafts.

    Times grow with each step, as those of growing contexts do.
    """
    chooser, is_ahead, found = DraftLengths(4, is_adaptive, can_wait=True), False, list[int]()
    for number in range(num_steps):
        lengths, waits = chooser.choose([Proposed(proposed, is_ahead=is_ahead)] * len(accepted), budget=100)
        for length, right in zip(lengths, accepted, strict=True):
            if length:
                chooser.add_row(Proposed(proposed), length, min(length, right))
        found.append(sum(lengths))
        seconds = 1 + cost_of_draft * found[-1] + 0.1 * (not is_ahead)
        chooser.add_step(len(accepted), is_ahead, found[-1], seconds * 1.001**number)
        is_ahead = not waits
    return found


def test_all_drafts_are_verified_while_they_pay() -> None:
    found = run(2000, [4], cost_of_draft=0.2)
    assert found[:8] == [4] * 8 and found.count(4) > 0.98 * len(found)


@pytest.mark.parametrize(("accepted", "cost_of_draft"), [([0], 0.0), ([4], 2.0)])
def test_drafts_that_do_not_pay_are_left_out(accepted: list[int], cost_of_draft: float) -> None:
    found = run(2000, accepted, cost_of_draft)
    assert found[0] == 4, "nothing is known at first"
    late = found[400:]
    probes = [index for index, count in enumerate(late) if count]
    assert 1 <= len(probes) <= 0.02 * len(late)
    assert all(after - before > PROBE_STEPS for before, after in itertools.pairwise(probes))


def test_as_many_are_verified_as_pay() -> None:
    """The first two drafts are right; the others cost as much."""
    assert max(run(2000, [2], cost_of_draft=0.3)[-50:]) == 2


def test_rows_compete_for_the_budget() -> None:
    chooser = DraftLengths(8, is_adaptive=True, can_wait=True)
    for _ in range(50):
        chooser.add_row(Proposed(2), 2, 0)
        chooser.add_row(Proposed(8), 8, 8)
    rows, known = [Proposed(2), Proposed(8), Proposed(0)], Proposed(8, is_constrained=True)
    assert chooser.choose(rows, budget=6) == Choice([0, 6, 0], waits=True)
    assert chooser.choose([Proposed(0)] * 3, budget=6) == Choice([0, 0, 0], waits=False)
    ahead = [row._replace(is_ahead=True) for row in rows]
    assert chooser.choose([*ahead, known], budget=12) == Choice([0, 0, 0, 4], waits=True), "the others would be guesses"
    pipeline = DraftLengths(8, is_adaptive=True, can_wait=False)
    assert pipeline.choose(ahead[1:2], budget=6).lengths == [6]


def test_a_fixed_number_is_verified_whatever_it_costs() -> None:
    assert set(run(500, [0], 9.0, is_adaptive=False)) == {4}


def test_acceptance_is_that_of_the_latest_drafts() -> None:
    acceptance = Acceptance(3)
    assert acceptance.expected == pytest.approx([0.9, 0.81, 0.729]), "of drafts that have not been tried"
    for _ in range(30):
        acceptance.add(num_drafts=3, num_accepted=1)
    assert acceptance.expected == pytest.approx([1, 0, 0], abs=0.04)
    for _ in range(500):
        acceptance.add(num_drafts=3, num_accepted=3)
    assert acceptance.expected == pytest.approx([1, 1, 1], abs=0.05)


def test_costs_are_medians_and_interpolated() -> None:
    costs = StepCosts()
    assert costs.estimate(5) == 1
    costs.add(4, 1.4)
    assert costs.estimate(4) == 1, "one pair of steps says little"
    for cost in (1.4, 9.0):
        costs.add(4, cost)
    assert [costs.estimate(count) for count in (0, 2, 4, 9)] == pytest.approx([1, 1.2, 1.4, 1.4])
    for cost in (2.0, 0.5):
        for _ in range(9):
            costs.add(4, cost)
        assert costs.estimate(4) == max(cost, 1), "no step is faster for its drafts"
