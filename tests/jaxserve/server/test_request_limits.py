"""What a server takes at a time."""

import contextlib

import pytest

from jaxserve.errors import OverloadedError, RequestError
from jaxserve.server.auth import Caller
from jaxserve.server.errors import UnavailableError
from jaxserve.server.request_limits import RequestLimits

ANYBODY = Caller("anybody", frozenset())


class Clock:
    """A clock that stands until told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_closed_until_opened_and_after_closing() -> None:
    limits = RequestLimits()
    with pytest.raises(UnavailableError, match="starting"), limits.admit(ANYBODY, 1):
        pass
    limits.open(1)
    with limits.admit(ANYBODY, 1):
        assert limits.num_in_flight == 1
        limits.close("draining")
    with pytest.raises(UnavailableError, match="draining"), limits.admit(ANYBODY, 1):
        pass
    assert limits.num_in_flight == 0


def test_each_text_counts() -> None:
    limits = RequestLimits()
    limits.open(4)
    with limits.admit(ANYBODY, 3):
        with pytest.raises(
            OverloadedError, match="queue full: 3 sequences in flight, limit 4 .*, and this request has 2; retry later"
        ) as failure:
            with limits.admit(ANYBODY, 2):
                pass
        assert failure.value.retry_after_s > 0
        with limits.admit(ANYBODY, 1):
            assert limits.num_in_flight == 4
    assert (limits.num_in_flight, limits.num_refused) == (0, 1)


def test_what_can_never_pass_is_wrong_and_not_too_much() -> None:
    limits = RequestLimits()
    limits.open(4)
    with pytest.raises(RequestError, match="at most 4 sequences"), limits.admit(ANYBODY, 5):
        pass


def test_a_failed_request_gives_its_place_back() -> None:
    limits = RequestLimits()
    limits.open(1)
    for _ in range(3):
        with contextlib.suppress(KeyError), limits.admit(ANYBODY, 1):
            raise KeyError
    assert limits.num_in_flight == 0


def test_a_key_has_limits_of_its_own() -> None:
    limits = RequestLimits()
    limits.open(100)
    one = Caller("one", frozenset(), max_concurrent_requests=2)
    with limits.admit(one, 2), limits.admit(ANYBODY, 50):
        with pytest.raises(OverloadedError, match="2 sequences in flight, limit 2"), limits.admit(one, 1):
            pass


def test_a_key_has_a_rate() -> None:
    clock = Clock()
    limits = RequestLimits(clock)
    limits.open(100)
    one = Caller("one", frozenset(), requests_per_minute=2)
    for _ in range(2):
        with limits.admit(one, 1):
            clock.now += 10
    with pytest.raises(OverloadedError, match="2 requests per minute") as failure:
        with limits.admit(one, 1):
            pass
    assert failure.value.retry_after_s == pytest.approx(40)
    clock.now += 40
    with limits.admit(one, 1):
        pass
