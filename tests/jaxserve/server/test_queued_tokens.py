"""Prompt tokens that may wait, those of requests in preparation included."""

import concurrent.futures

import pytest

from jaxserve.engine.request_state import RequestState
from jaxserve.errors import OverloadedError
from jaxserve.server.engine_process.serving import Place, QueuedTokens
from tests.jaxserve.fake_engine import make_request


def prompt(num_tokens: int) -> RequestState:
    request = make_request(1)
    request.prompt_token_ids = [1] * num_tokens
    return request


def test_requests_wait_once_more_sequences_came_than_the_steps_have_room_for() -> None:
    queued = QueuedTokens(4, 100)
    places = [queued.enter(num_seqs) for num_seqs in (1, 3, 1)]
    assert [place.waits for place in places] == [False, False, True]
    queued.leave(places[0])
    assert queued.enter(1).waits
    queued.leave(places[1])
    assert not queued.enter(1).waits
    queued.resize(8)
    assert [queued.enter(num_seqs).waits for num_seqs in (4, 1, 1)] == [False, False, True]


def test_prompts_of_requests_that_wait_are_counted() -> None:
    queued = QueuedTokens(1, 100)
    queued.note_prompt(queued.enter(1), prompt(1000))  # runs at once
    first = queued.enter(1)
    queued.note_prompt(first, prompt(60))
    second = queued.enter(1)
    with pytest.raises(OverloadedError, match=r"60 prompt tokens waiting, limit 100 .* prompt has 50"):
        queued.note_prompt(second, prompt(50))
    queued.note_prompt(second, prompt(40))
    queued.leave(first)
    queued.note_prompt(queued.enter(1), prompt(60))


def test_a_prompt_waits_until_its_first_step() -> None:
    queued = QueuedTokens(1, 100)
    queued.enter(1)
    request = prompt(80)
    queued.note_prompt(queued.enter(1), request)
    late = queued.enter(1)
    with pytest.raises(OverloadedError):
        queued.note_prompt(late, prompt(80))
    request.note_scheduled(1.0)
    queued.note_prompt(late, prompt(80))


def test_a_burst_on_many_threads_cannot_pass() -> None:
    queued = QueuedTokens(4, 10_000)

    def enter(_: int) -> Place | None:
        try:
            place = queued.enter(1)
            queued.note_prompt(place, prompt(2000))
        except OverloadedError:
            return None
        return place

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = [place for place in pool.map(enter, range(1000)) if place is not None]
    assert len(found) == 4 + 5
    for place in found:
        queued.leave(place)
    assert queued._num_tokens == 0 and not queued._waiting


def test_a_request_that_left_while_it_was_prepared_holds_nothing() -> None:
    queued = QueuedTokens(1, 100)
    queued.enter(1)
    for _ in range(5):
        place = queued.enter(1)
        queued.leave(place)
        queued.note_prompt(place, prompt(60))
    queued.note_prompt(queued.enter(1), prompt(100))
