"""What a server takes at a time."""

import contextlib

import pytest

from jaxserve.errors import OverloadedError, RequestError
from jaxserve.server.auth import Caller
from jaxserve.server.errors import UnavailableError
from jaxserve.server.gate import Gate

ANYBODY = Caller("anybody", frozenset())


class Clock:
    """A clock that stands until told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_closed_until_opened_and_after_closing() -> None:
    gate = Gate()
    with pytest.raises(UnavailableError, match="starting"), gate.pass_through(ANYBODY, 1):
        pass
    gate.open(1)
    with gate.pass_through(ANYBODY, 1):
        assert gate.num_in_flight == 1
        gate.close("draining")
    with pytest.raises(UnavailableError, match="draining"), gate.pass_through(ANYBODY, 1):
        pass
    assert gate.num_in_flight == 0


def test_each_text_counts() -> None:
    gate = Gate()
    gate.open(4)
    with gate.pass_through(ANYBODY, 3):
        with pytest.raises(OverloadedError, match="3 texts in flight and takes 4; 2 more") as failure:
            with gate.pass_through(ANYBODY, 2):
                pass
        assert failure.value.retry_after_s > 0
        with gate.pass_through(ANYBODY, 1):
            assert gate.num_in_flight == 4
    assert (gate.num_in_flight, gate.num_refused) == (0, 1)


def test_what_can_never_pass_is_wrong_and_not_too_much() -> None:
    gate = Gate()
    gate.open(4)
    with pytest.raises(RequestError, match="at most 4 texts"), gate.pass_through(ANYBODY, 5):
        pass


def test_a_failed_request_gives_its_place_back() -> None:
    gate = Gate()
    gate.open(1)
    for _ in range(3):
        with contextlib.suppress(KeyError), gate.pass_through(ANYBODY, 1):
            raise KeyError
    assert gate.num_in_flight == 0


def test_a_key_has_limits_of_its_own() -> None:
    gate = Gate()
    gate.open(100)
    one = Caller("one", frozenset(), max_concurrent_requests=2)
    with gate.pass_through(one, 2), gate.pass_through(ANYBODY, 50):
        with pytest.raises(OverloadedError, match="may have 2"), gate.pass_through(one, 1):
            pass


def test_a_key_has_a_rate() -> None:
    clock = Clock()
    gate = Gate(clock)
    gate.open(100)
    one = Caller("one", frozenset(), requests_per_minute=2)
    for _ in range(2):
        with gate.pass_through(one, 1):
            clock.now += 10
    with pytest.raises(OverloadedError, match="2 requests a minute") as failure:
        with gate.pass_through(one, 1):
            pass
    assert failure.value.retry_after_s == pytest.approx(40)
    clock.now += 40
    with gate.pass_through(one, 1):
        pass
