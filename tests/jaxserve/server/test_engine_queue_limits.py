"""What may wait: sequences and prompt tokens, with requests in preparation counted."""

import concurrent.futures

import pytest

from jaxserve import RequestError
from jaxserve.engine.request_state import RequestState
from jaxserve.errors import OverloadedError
from jaxserve.server.engine_process.queue_limits import Place, QueueLimits
from tests.jaxserve.fake_engine import make_request


def prompt(num_tokens: int) -> RequestState:
    request = make_request(1)
    request.prompt_token_ids = [1] * num_tokens
    return request


def test_sequences_that_find_no_place_wait_and_few_may() -> None:
    limits = QueueLimits(4, 2, 100)
    places = [limits.enter(1) for _ in range(6)]
    assert [place.waits for place in places] == [False] * 4 + [True] * 2
    with pytest.raises(
        OverloadedError, match=r"2 sequences wait and at most 2 may .*; 1 more were asked for"
    ) as caught:
        limits.enter(1)
    assert caught.value.retry_after_s > 0
    limits.leave(places[0])
    assert limits.enter(1).waits


def test_each_sample_counts() -> None:
    limits = QueueLimits(4, 2, 100)
    place = limits.enter(3)
    with pytest.raises(OverloadedError):
        limits.enter(4)
    limits.enter(3)
    limits.leave(place)
    limits.enter(3)


def test_more_samples_than_ever_run_and_wait_together_are_wrong() -> None:
    with pytest.raises(RequestError, match="n must be at most 6 here, got 7"):
        QueueLimits(4, 2, 100).enter(7)


def test_prompts_of_requests_that_wait_are_counted() -> None:
    limits = QueueLimits(1, 10, 100)
    limits.note_prompt(limits.enter(1), prompt(1000))  # runs at once
    first = limits.enter(1)
    limits.note_prompt(first, prompt(60))
    second = limits.enter(1)
    with pytest.raises(OverloadedError, match=r"60 prompt tokens wait and at most 100 may .*; 50 more were asked for"):
        limits.note_prompt(second, prompt(50))
    limits.note_prompt(second, prompt(40))
    limits.leave(first)
    limits.note_prompt(limits.enter(1), prompt(60))


def test_a_prompt_waits_until_its_first_step() -> None:
    limits = QueueLimits(1, 10, 100)
    limits.enter(1)
    request = prompt(80)
    limits.note_prompt(limits.enter(1), request)
    late = limits.enter(1)
    with pytest.raises(OverloadedError):
        limits.note_prompt(late, prompt(80))
    request.note_scheduled(1.0)
    limits.note_prompt(late, prompt(80))


def test_a_burst_on_many_threads_cannot_pass() -> None:
    limits = QueueLimits(4, 6, 10_000)

    def enter(_: int) -> Place | None:
        try:
            place = limits.enter(1)
            limits.note_prompt(place, prompt(2000))
        except OverloadedError:
            return None
        return place

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = [place for place in pool.map(enter, range(1000)) if place is not None]
    assert len(found) == 4 + 5
    for place in found:
        limits.leave(place)
    assert limits._num_tokens == 0 and not limits._waiting


def test_a_request_that_left_while_it_was_prepared_holds_nothing() -> None:
    limits = QueueLimits(1, 10, 100)
    limits.enter(1)
    for _ in range(5):
        place = limits.enter(1)
        limits.leave(place)
        limits.note_prompt(place, prompt(60))
    limits.note_prompt(limits.enter(1), prompt(100))
