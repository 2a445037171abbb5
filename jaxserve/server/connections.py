"""Limits on the connections of a listener, and what keeps the process alive when they take all descriptors."""

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.server.tally import Tally

logger = logging.getLogger(__name__)

FULL_RESPONSE = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
"""What a client gets whose connection is one too many."""
_LOG_INTERVAL_S = 60.0
MAX_LINES_PER_MINUTE = 60
"""Lines of the log about clients, of one kind."""


class TransferLimits(NamedTuple):
    """What clients must keep up with.

    Attributes:
        stall_s: Seconds that a client may take for the next bytes, of its request or in reading the response; 0: any.
        bytes_per_s: Fewest bytes per second, on average, once those seconds are over.
    """

    stall_s: float
    bytes_per_s: float = 0.0


class ConnectionLimits:
    """Counts the connections of a listener, in all and by address.

    Args:
        most: Most connections.
        most_per_address: Most of one address.
    """

    def __init__(self, most: int, most_per_address: int):
        self._most = most
        self._most_per_address = most_per_address
        self._open = Tally()  # by address

    def enter(self, address: str) -> bool:
        """Count a connection, of an address or of "" for a Unix socket; return whether it is allowed.

        ``leave`` must follow if it is.
        """
        is_full = self._open.total >= self._most
        if is_full or (address and self._open[address] >= self._most_per_address):
            return False
        self._open.add(address, 1)
        return True

    def leave(self, address: str) -> None:
        """Forget a connection that was allowed."""
        self._open.add(address, -1)


def raise_open_files_limit() -> None:
    """Let this process and its children open as many files, and so connections, as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class AcceptFailures:
    """Handler of an event loop's errors that logs failures to accept connections once a minute, and others at once.

    asyncio reports each of thousands of failed attempts with a traceback, and tries again every second.

    Args:
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._num_failed = 0
        self._next_s = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error."""
        if not str(context.get("message", "")).startswith("socket.accept() out of system resource"):
            loop.default_exception_handler(context)
            return
        self._num_failed += 1
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + _LOG_INTERVAL_S
            why = context.get("exception")
            logger.error("connections cannot be accepted: %s; failed attempts so far: %d", why, self._num_failed)


class FewLines(logging.Filter):
    """Lets few lines of each kind through in a minute: any client can cause them, without a key, as often as it likes.

    The next line of a kind tells how many were left out. Lines of one kind have one format.

    Args:
        most: Most lines of a kind in a minute.
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(self, most: int = MAX_LINES_PER_MINUTE, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._most = most
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # by format: when a minute began, and lines since then

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is written."""
        now_s, kind = self._clock(), str(record.msg)
        begin_s, number = self._seen.get(kind, (now_s, 0))
        num_left_out = 0
        if now_s >= begin_s + _LOG_INTERVAL_S:
            num_left_out, begin_s, number = max(0, number - self._most), now_s, 0
        self._seen[kind] = begin_s, number + 1
        if num_left_out:
            record.msg = f"{kind}; %d lines like this were left out before"
            record.args = (*record.args, num_left_out) if isinstance(record.args, tuple) else (num_left_out,)
        return number < self._most
