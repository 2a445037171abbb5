"""What ends a sequence."""

import random

import pytest

from jaxserve.api.structured_params import RepetitionDetectionParams
from jaxserve.scheduling.endings import Ending, ends_in_repetition, find_ending
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import SchedulerLimits
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from tests.sequences import Taken
from tests.sequences import make_sequence as a_sequence


class Script(Taken):
    """A constraint that is complete with one token."""

    def __init__(self, last: int):
        super().__init__()
        self.last = last

    def mask(self) -> bytes | None:
        return None

    def accept(self, token: int) -> bool:
        self.taken.append(token)
        return token == self.last


def make_sequence(**fields: object) -> Sequence:
    settings: dict[str, object] = {"max_length": 10, "stop_ids": {9: None, 8: 8}, **fields}
    return a_sequence("a", [1, 2, 7], 2, **settings)  # pyright: ignore[reportArgumentType]


def push(sequence: Sequence, token: int) -> Ending | None:
    sequence.token_ids.append(token)
    return find_ending(sequence, token)


def test_stop_tokens_say_which_unless_they_end_every_text():
    assert push(make_sequence(), 5) is None
    assert push(make_sequence(), 8) == Ending("stop", 8)
    assert push(make_sequence(), 9) == Ending("stop", None)
    assert push(make_sequence(max_length=4), 8) == Ending("stop", 8)


def test_length_ends_it_and_only_length_below_the_least():
    assert push(make_sequence(max_length=4), 5) == Ending("length")
    assert push(make_sequence(min_tokens=3), 8) is None
    assert push(make_sequence(min_tokens=3, max_length=4), 8) == Ending("length")
    repetition = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
    assert push(make_sequence(min_tokens=3, repetition=repetition), 7) is None
    assert push(make_sequence(min_tokens=2, repetition=repetition), 7) == Ending("repetition", "repetition_detected")


def test_a_constraint_takes_every_token_but_a_stop_token():
    constraint = Script(last=6)
    sequence = make_sequence(constraint=constraint)
    assert push(sequence, 5) is None
    assert push(sequence, 9) == Ending("stop", None)
    assert push(sequence, 6) == Ending("stop", None)
    assert constraint.taken == [5, 6]
    assert push(make_sequence(constraint=Script(last=6), max_length=4), 6) == Ending("stop", None)


def repeats(prompt: list[int], output: list[int], params: RepetitionDetectionParams) -> bool:
    """Whether an output ends in a repetition, which is asked after each token or after all."""
    sequence, at_once = (a_sequence("r", [*prompt], len(prompt), 1000, repetition=params) for _ in range(2))
    found = False
    for token in output:
        sequence.token_ids.append(token)
        found = ends_in_repetition(sequence)
    at_once.token_ids += output
    assert ends_in_repetition(at_once) is found
    return found


def test_long_repetitions_in_a_long_output():
    """Longer than what is kept of the output."""
    rng = random.Random(1)
    pattern = rng.choices(range(50), k=300)
    params = RepetitionDetectionParams(max_pattern_size=300, min_pattern_size=300, min_count=3)
    output = rng.choices(range(50), k=2000) + pattern * 3
    assert [repeats([1], one, params) for one in (output[:-1], output, [*output, 50])] == [False, True, False]
    assert not repeats([1], pattern[:-1] * 8, params)


@pytest.mark.parametrize(
    ("output", "shortest", "longest", "count", "expected"),
    [
        ([3, 3], 0, 1, 2, True),
        ([3, 3], 2, 2, 2, False),
        ([3, 4, 3, 4], 0, 1, 2, False),
        ([3, 4, 3, 4], 0, 2, 2, True),
        ([3, 4, 3, 4], 0, 2, 3, False),
        ([4, 3, 4], 0, 2, 2, False),  # the rest of the pattern is in the prompt
        ([3, 3, 3, 3], 2, 5, 2, True),
        ([3, 3], 0, 0, 2, False),
    ],
)
def test_repetitions(output: list[int], shortest: int, longest: int, count: int, expected: bool):
    params = RepetitionDetectionParams(max_pattern_size=longest, min_pattern_size=shortest, min_count=count)
    assert repeats([3], output, params) is expected


def test_repetitions_against_a_search_of_all():
    rng = random.Random(0)
    num_found = 0
    for _ in range(5000):
        prompt, output = rng.choices([1, 2], k=rng.randint(1, 5)), rng.choices([1, 2, 3], k=rng.randint(1, 14))
        shortest, longest, count = rng.randint(1, 4), rng.randint(1, 6), rng.randint(2, 4)
        params = RepetitionDetectionParams(
            max_pattern_size=max(longest, shortest), min_pattern_size=shortest, min_count=count
        )
        expected = any(
            len(output) >= size * count and output[-size * count :] == output[-size:] * count
            for size in range(shortest, max(longest, shortest) + 1)
        )
        assert repeats(prompt, output, params) is expected
        num_found += expected
    assert num_found > 200


class Broken:
    """A constraint that fails, at once or with its first token."""

    def __init__(self, fails_at_once: bool):
        self.fails_at_once = fails_at_once

    def mask(self) -> bytes | None:
        if self.fails_at_once:
            raise RuntimeError("no mask")
        return None

    def accept(self, token: int) -> bool:
        raise RuntimeError(f"token {token} is not mine")


@pytest.mark.parametrize(("fails_at_once", "message"), [(True, "no mask"), (False, "token 7 is not mine")])
def test_a_constraint_that_fails_ends_its_own_sequence(fails_at_once: bool, message: str) -> None:
    scheduler = Scheduler(SchedulerLimits(4, 16), PageAllocator(8, 4))
    healthy = a_sequence("healthy", [1, 2, 3], 3, 8)
    broken = a_sequence("broken", [1, 2, 3], 3, 8, constraint=Broken(fails_at_once))
    scheduler.add(healthy)
    scheduler.add(broken)
    while scheduler.num_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.complete(plan, [[7]] * plan.num_rows)
    assert (broken.finish_reason, str(broken.error)) == ("error", message)
    assert (healthy.finish_reason, healthy.error) == ("length", None)
    assert scheduler.allocator.num_free == 8
