"""Limits on requests in flight, for the server and per API key; the engine process limits waiting prompt tokens."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator

from jaxserve.errors import OverloadedError, RequestError
from jaxserve.server.auth import Caller
from jaxserve.server.errors import UnavailableError


class RequestLimits:
    """Counts sequences in flight, n for each prompt of a request, and rejects requests above a limit.

    Attributes:
        num_in_flight: Sequences of the requests in flight.
        num_refused: Requests rejected because of the others in flight or of a rate.

    Args:
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._limit: int | None = None
        self._by_caller: collections.Counter[str] = collections.Counter()
        self._recent: dict[str, collections.deque[float]] = {}
        self._closed_because: str | None = "the server is starting"
        self.num_in_flight = 0
        self.num_refused = 0

    @property
    def is_open(self) -> bool:
        """Whether the server accepts requests."""
        return self._closed_because is None

    def open(self, limit: int) -> None:
        """Accept requests, at most ``limit`` sequences at a time: those that run and those that wait."""
        self._limit = limit
        self._closed_because = None

    def close(self, reason: str) -> None:
        """Reject all requests from now on."""
        self._closed_because = reason

    def check_open(self) -> None:
        """Check that the server accepts requests.

        Raises:
            UnavailableError: It does not.
        """
        if self._closed_because is not None:
            raise UnavailableError(self._closed_because)

    @contextlib.contextmanager
    def admit(self, caller: Caller, num_seqs: int = 1) -> Iterator[None]:
        """Count a request while the block runs.

        Raises:
            UnavailableError: The server is starting or draining.
            RequestError: The request alone exceeds a limit.
            OverloadedError: The server, or this caller, has too many requests in flight.
        """
        self.check_open()
        for limit in (self._limit, caller.max_concurrent_requests):
            if limit is not None and num_seqs > limit:
                raise RequestError(
                    f"a request may ask for at most {limit} sequences, n for each prompt; got {num_seqs}"
                )
        error = self._overload(caller, num_seqs)
        if error is not None:
            self.num_refused += 1
            raise error
        self.num_in_flight += num_seqs
        self._by_caller[caller.name] += num_seqs
        try:
            yield
        finally:
            self.num_in_flight -= num_seqs
            self._by_caller[caller.name] -= num_seqs

    def _overload(self, caller: Caller, num_seqs: int) -> OverloadedError | None:
        """Return why a request must be retried later; if it need not, count it for its caller's rate."""
        if self._limit is not None and self.num_in_flight + num_seqs > self._limit:
            return OverloadedError(
                f"queue full: {self.num_in_flight} sequences in flight, limit {self._limit} (max_num_seqs + "
                f"max_num_queued_reqs), and this request has {num_seqs}; retry later"
            )
        limit, num_own = caller.max_concurrent_requests, self._by_caller[caller.name]
        if limit is not None and num_own + num_seqs > limit:
            return OverloadedError(
                f"this API key has {num_own} sequences in flight, limit {limit}, and this request has {num_seqs}; "
                "retry later"
            )
        rate = caller.requests_per_minute
        if rate is None:
            return None
        now, recent = self._clock(), self._recent.setdefault(caller.name, collections.deque())
        while recent and now - recent[0] >= 60.0:
            recent.popleft()
        if len(recent) >= rate:
            message = f"this API key may send {rate} requests per minute"
            return OverloadedError(message, retry_after_s=60.0 - (now - recent[0]))
        recent.append(now)
        return None
