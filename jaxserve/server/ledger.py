"""The ledger of what a server has admitted: bytes of memory, sequences, and prompt tokens that wait."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol

from jaxserve.api.errors import OverloadedError, RequestError
from jaxserve.server.auth import Caller
from jaxserve.server.byte_budget import MIN_BUDGET_BYTES, ByteBudget
from jaxserve.server.errors import OutOfMemoryError, UnavailableError
from jaxserve.server.tally import Tally

RECENT_S = 10.0
"""Seconds for which callers count as others after their last request."""


class Entry(Protocol):
    """A prompt in the ledger.

    Attributes:
        num_waiting_tokens: Tokens of the prompt that count as waiting; 0 until they are known, and once it runs.
    """

    num_waiting_tokens: int

    @property
    def caller(self) -> str:
        """Name of its caller."""
        ...

    @property
    def num_seqs(self) -> int:
        """Its sequences."""
        ...


class Ledger:
    """Counts what is admitted, and rejects what exceeds a limit.

    A request reserves the bytes of its body as they arrive, and its sequences, n for each prompt, with the bytes that
    these take once it is parsed.
    Each prompt is an entry from its submission to its end: in order of arrival as many run as steps have room for, and
    the prompt tokens of the others wait. The engine process tells the tokens of a text before it runs.

    A caller with less than an equal part of a limit, of those that have sequences in flight, is admitted even if others
    have taken all of it, so that no caller keeps another one out.

    Attributes:
        num_refused: Requests rejected because of the others in flight or of a rate.
        memory: Counts the bytes.

    Args:
        max_bytes: Most bytes of memory for what is admitted.
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(self, max_bytes: int = MIN_BUDGET_BYTES, clock: Callable[[], float] = time.monotonic):
        self.memory = ByteBudget(max_bytes)
        self._clock = clock
        self._limit: int | None = None
        self._max_num_seqs: int | None = None
        self._max_num_queued_tokens: int | None = None
        self._in_flight = Tally()  # sequences by caller
        self._left_s: dict[str, float] = {}  # when callers had none left
        self._recent: dict[str, collections.deque[float]] = {}
        self._closed_because: str | None = "the server is starting"
        self._num_running = 0
        self._waiting: dict[Entry, None] = {}
        self._waiting_tokens = Tally()  # by caller
        self.num_refused = 0

    # ------------------------------------------------------------------------------------------------ the server

    @property
    def num_in_flight(self) -> int:
        """Sequences of the requests in flight."""
        return self._in_flight.total

    @property
    def is_open(self) -> bool:
        """Whether the server accepts requests."""
        return self._closed_because is None

    def has_others(self, name: str) -> bool:
        """Return whether another caller has requests in flight, or had some seconds ago."""
        since_s = self._clock() - RECENT_S
        self._left_s = {each: left_s for each, left_s in self._left_s.items() if left_s > since_s}
        return not {name}.issuperset((*self._in_flight.names, *self._left_s))

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

    def add_bytes(self, caller: Caller, num_bytes: int) -> None:
        """Reserve bytes of a body that arrives, or of what is made of it; ``remove_bytes`` releases them.

        Raises:
            OutOfMemoryError: The requests in flight, or those of the caller, take too many bytes.
            RequestError: They are more than the caller may ever have.
        """
        try:
            self.memory.take(caller, num_bytes)
        except OutOfMemoryError:
            self.num_refused += 1
            raise

    def remove_bytes(self, caller: Caller, num_bytes: int) -> None:
        """Release bytes."""
        self.memory.give_back(caller, num_bytes)

    def check_room(self, caller: Caller) -> None:
        """Reject a request before it is parsed if not even one more sequence has room.

        Raises:
            OverloadedError: The server, or this caller, has too many sequences in flight.
        """
        self._check_overload(caller, 1)

    @contextlib.contextmanager
    def admit(self, caller: Caller, num_seqs: int = 1, num_bytes: int = 0) -> Iterator[None]:
        """Count a request's sequences, and the bytes that they take, while the block runs.

        Raises:
            UnavailableError: The server is starting or draining.
            RequestError: The request alone exceeds a limit.
            OverloadedError: The server, or this caller, has too many requests in flight.
            OutOfMemoryError: These take too many bytes.
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
        self.add_bytes(caller, num_bytes)
        self._in_flight.add(caller.name, num_seqs)
        try:
            yield
        finally:
            self.remove_bytes(caller, num_bytes)
            self._in_flight.add(caller.name, -num_seqs)
            self._left_s[caller.name] = self._clock()

    def _check_overload(self, caller: Caller, num_seqs: int) -> None:
        own_limit, num_own = caller.max_concurrent_requests, self._in_flight[caller.name]
        limit = self._limit
        is_full = limit is not None and self.num_in_flight + num_seqs > limit
        if limit is not None and is_full and not self._has_part(num_own + num_seqs, limit, caller.name):
            self._refuse(
                f"queue full: {self.num_in_flight} sequences in flight, limit {self._limit} (max_num_seqs + "
                f"max_num_queued_reqs), and this request has {num_seqs}; retry later"
            )
        if own_limit is not None and num_own + num_seqs > own_limit:
            self._refuse(
                f"this API key has {num_own} sequences in flight, limit {own_limit}, and this request has {num_seqs}; "
                "retry later"
            )

    def _has_part(self, num_own: int, limit: int, caller: str) -> bool:
        """Return whether a number is at most an equal part of a limit, of all callers in flight and this one."""
        return num_own <= limit // len({*self._in_flight.names, caller})

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
        limit, num_waiting = self._max_num_queued_tokens, self._waiting_tokens.total - entry.num_waiting_tokens
        num_own = self._waiting_tokens[entry.caller] - entry.num_waiting_tokens
        is_full = limit is not None and num_waiting + num_tokens > limit
        if limit is not None and is_full and not self._has_part(num_own + num_tokens, limit, entry.caller):
            raise OverloadedError(
                f"queue full: {num_waiting} prompt tokens waiting, limit {limit} (max_num_queued_tokens), and this "
                f"prompt has {num_tokens}; retry later"
            )
        self._note_waiting(entry, num_tokens)

    def _note_waiting(self, entry: Entry, num_tokens: int) -> None:
        num_more, entry.num_waiting_tokens = num_tokens - entry.num_waiting_tokens, num_tokens
        self._waiting_tokens.add(entry.caller, num_more)

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
        self._note_waiting(entry, 0)
