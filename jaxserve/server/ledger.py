"""The ledger of what a server has admitted: bytes of bodies, sequences, and prompt tokens that wait."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol

from jaxserve.api.errors import OverloadedError, RequestError
from jaxserve.server.auth import Caller
from jaxserve.server.errors import UnavailableError

MAX_BODY_BYTES = 256 << 20
"""Most bytes of request bodies that are held at a time, unless 16 bodies of the longest kind have more."""


class Entry(Protocol):
    """A prompt in the ledger.

    Attributes:
        num_waiting_tokens: Tokens of the prompt that count as waiting; 0 until they are known, and once it runs.
    """

    num_waiting_tokens: int

    @property
    def num_seqs(self) -> int:
        """Its sequences."""
        ...


class Ledger:
    """Counts what is admitted, and rejects what exceeds a limit.

    A request reserves the bytes of its body as they arrive and its sequences, n for each prompt, once it is parsed.
    Each prompt is an entry from its submission to its end: in order of arrival as many run as steps have room for, and
    the prompt tokens of the others wait. The engine process tells the tokens of a text before it runs.

    Attributes:
        num_in_flight: Sequences of the requests in flight.
        num_refused: Requests rejected because of the others in flight or of a rate.

    Args:
        max_body_bytes: Most bytes of bodies at a time.
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES, clock: Callable[[], float] = time.monotonic):
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._limit: int | None = None
        self._max_num_seqs: int | None = None
        self._max_num_queued_tokens: int | None = None
        self._num_body_bytes = 0
        self._by_caller: collections.Counter[str] = collections.Counter()
        self._recent: dict[str, collections.deque[float]] = {}
        self._closed_because: str | None = "the server is starting"
        self._num_running = 0
        self._waiting: dict[Entry, None] = {}
        self._num_waiting_tokens = 0
        self.num_in_flight = 0
        self.num_refused = 0

    # ------------------------------------------------------------------------------------------------ the server

    @property
    def is_open(self) -> bool:
        """Whether the server accepts requests."""
        return self._closed_because is None

    def open(self, limit: int, *, max_num_seqs: int | None = None, max_num_queued_tokens: int | None = None) -> None:
        """Accept requests.

        Args:
            limit: Most sequences at a time: those that run and those that wait.
            max_num_seqs: Most sequences that run; None: nothing waits.
            max_num_queued_tokens: Most prompt tokens that wait; None: no limit.
        """
        self._limit, self._max_num_seqs, self._max_num_queued_tokens = limit, max_num_seqs, max_num_queued_tokens
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

    # ------------------------------------------------------------------------------------------------ a request

    def add_bytes(self, num_bytes: int) -> None:
        """Reserve bytes of a body that arrives; ``remove_bytes`` releases them.

        Raises:
            OverloadedError: The bodies of the requests in flight have too many bytes.
        """
        if self._num_body_bytes + num_bytes > self._max_body_bytes:
            self._refuse(
                f"queue full: the requests in flight have {self._num_body_bytes} bytes, limit {self._max_body_bytes}; "
                "retry later"
            )
        self._num_body_bytes += num_bytes

    def remove_bytes(self, num_bytes: int) -> None:
        """Release bytes of a body."""
        self._num_body_bytes -= num_bytes

    def check_room(self, caller: Caller) -> None:
        """Reject a request before it is parsed if not even one more sequence has room.

        Raises:
            OverloadedError: The server, or this caller, has too many sequences in flight.
        """
        self._check_overload(caller, 1)

    @contextlib.contextmanager
    def admit(self, caller: Caller, num_seqs: int = 1) -> Iterator[None]:
        """Count a request's sequences while the block runs.

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
        self._check_overload(caller, num_seqs)
        if caller.requests_per_minute is not None:
            self._check_rate(caller.name, caller.requests_per_minute)
        self.num_in_flight += num_seqs
        self._by_caller[caller.name] += num_seqs
        try:
            yield
        finally:
            self.num_in_flight -= num_seqs
            self._by_caller[caller.name] -= num_seqs

    def _check_overload(self, caller: Caller, num_seqs: int) -> None:
        if self._limit is not None and self.num_in_flight + num_seqs > self._limit:
            self._refuse(
                f"queue full: {self.num_in_flight} sequences in flight, limit {self._limit} (max_num_seqs + "
                f"max_num_queued_reqs), and this request has {num_seqs}; retry later"
            )
        own_limit, num_own = caller.max_concurrent_requests, self._by_caller[caller.name]
        if own_limit is not None and num_own + num_seqs > own_limit:
            self._refuse(
                f"this API key has {num_own} sequences in flight, limit {own_limit}, and this request has {num_seqs}; "
                "retry later"
            )

    def _check_rate(self, name: str, rate: int) -> None:
        """Count a request for its caller's rate."""
        now, recent = self._clock(), self._recent.setdefault(name, collections.deque())
        while recent and now - recent[0] >= 60.0:
            recent.popleft()
        if len(recent) >= rate:
            self._refuse(f"this API key may send {rate} requests per minute", 60.0 - (now - recent[0]))
        recent.append(now)

    def _refuse(self, message: str, retry_after_s: float = 1.0) -> NoReturn:
        self.num_refused += 1
        raise OverloadedError(message, retry_after_s=retry_after_s)

    # ------------------------------------------------------------------------------------------------- a prompt

    @contextlib.contextmanager
    def entered(self, entry: Entry) -> Iterator[bool]:
        """Have a prompt in the ledger while the block runs; yield whether it waits until others end."""
        waits = bool(self._waiting) or not self._has_room(entry)
        if waits:
            self._waiting[entry] = None
        else:
            self._num_running += entry.num_seqs
        try:
            yield waits
        finally:
            self._leave(entry)

    def is_waiting(self, entry: Entry) -> bool:
        """Whether a prompt waits until others end."""
        return entry in self._waiting

    def note_prompt(self, entry: Entry, num_tokens: int) -> None:
        """Note the tokens of a prompt, if it still waits.

        Raises:
            OverloadedError: Too many prompt tokens wait.
        """
        if entry not in self._waiting:
            return
        limit, num_waiting = self._max_num_queued_tokens, self._num_waiting_tokens - entry.num_waiting_tokens
        if limit is not None and num_waiting + num_tokens > limit:
            raise OverloadedError(
                f"queue full: {num_waiting} prompt tokens waiting, limit {limit} (max_num_queued_tokens), and this "
                f"prompt has {num_tokens}; retry later"
            )
        entry.num_waiting_tokens, self._num_waiting_tokens = num_tokens, num_waiting + num_tokens

    def _leave(self, entry: Entry) -> None:
        """Remove a prompt. The next ones in order run if there is room for them."""
        if entry in self._waiting:
            self._stop_waiting(entry)
        else:
            self._num_running -= entry.num_seqs
        while self._waiting and self._has_room(first := next(iter(self._waiting))):
            self._stop_waiting(first)
            self._num_running += first.num_seqs

    def _has_room(self, entry: Entry) -> bool:
        limit = self._max_num_seqs
        return limit is None or not self._num_running or self._num_running + entry.num_seqs <= limit

    def _stop_waiting(self, entry: Entry) -> None:
        del self._waiting[entry]
        self._num_waiting_tokens -= entry.num_waiting_tokens
        entry.num_waiting_tokens = 0
