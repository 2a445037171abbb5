"""How many requests a server takes at a time: what is too many is refused before any work is done for it."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator

from jaxserve.errors import OverloadedError, RequestError
from jaxserve.server.auth import Caller
from jaxserve.server.errors import UnavailableError


class Gate:
    """Counts requests in flight, each of the n texts of each prompt as one.

    Args:
        clock: Seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._limit: int | None = None
        self._num_in_flight = 0
        self._by_caller: collections.Counter[str] = collections.Counter()
        self._recent: dict[str, collections.deque[float]] = {}
        self._closed_because: str | None = "the server is starting"
        self.num_refused = 0

    @property
    def num_in_flight(self) -> int:
        """Texts that are being made or wait to be."""
        return self._num_in_flight

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return self._closed_because is None

    def open(self, limit: int) -> None:
        """Takes requests, at most ``limit`` texts at a time."""
        self._limit = limit
        self._closed_because = None

    def close(self, reason: str) -> None:
        """Takes no more requests."""
        self._closed_because = reason

    def check_open(self) -> None:
        """Raises unless it takes requests.

        Raises:
            UnavailableError: It does not.
        """
        if self._closed_because is not None:
            raise UnavailableError(self._closed_because)

    @contextlib.contextmanager
    def pass_through(self, caller: Caller, num_texts: int) -> Iterator[None]:
        """Holds a request's place while it runs.

        Raises:
            UnavailableError: The server starts or drains.
            RequestError: More texts than the server ever takes.
            OverloadedError: The server, or this caller, has too many requests.
        """
        self.check_open()
        for limit in (self._limit, caller.max_concurrent_requests):
            if limit is not None and num_texts > limit:
                raise RequestError(f"a request may ask for at most {limit} texts in all here, got {num_texts}")
        try:
            self._check_room(caller, num_texts)
            self._check_rate(caller)
        except OverloadedError:
            self.num_refused += 1
            raise
        self._num_in_flight += num_texts
        self._by_caller[caller.name] += num_texts
        try:
            yield
        finally:
            self._num_in_flight -= num_texts
            self._by_caller[caller.name] -= num_texts

    def _check_room(self, caller: Caller, num_texts: int) -> None:
        if self._limit is not None and self._num_in_flight + num_texts > self._limit:
            raise OverloadedError(
                f"the server has {self._num_in_flight} texts in flight and takes {self._limit}; "
                f"{num_texts} more were asked for"
            )
        limit = caller.max_concurrent_requests
        if limit is not None and self._by_caller[caller.name] + num_texts > limit:
            raise OverloadedError(
                f"this API key has {self._by_caller[caller.name]} texts in flight and may have {limit}; "
                f"{num_texts} more were asked for"
            )

    def _check_rate(self, caller: Caller) -> None:
        limit = caller.requests_per_minute
        if limit is None:
            return
        now = self._clock()
        recent = self._recent.setdefault(caller.name, collections.deque())
        while recent and now - recent[0] >= 60.0:
            recent.popleft()
        if len(recent) >= limit:
            message = f"this API key may make {limit} requests a minute"
            raise OverloadedError(message, retry_after_s=60.0 - (now - recent[0]))
        recent.append(now)
