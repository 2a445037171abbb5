"""A transport that is aborted if its client does not read."""

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
from typing import Any

from jaxserve.server.connections import TransferLimits

logger = logging.getLogger(__name__)


class WatchedTransport:
    """A transport that is aborted if its client receives nothing of what is written for too long.

    uvicorn's ``send`` returns before the whole response has left, and closing a transport waits for its buffer; so the
    buffer itself is watched. Slow clients are fine as long as the other side acknowledges enough bytes.

    Args:
        transport: The wrapped transport.
        limits: Seconds without a received byte, and the fewest bytes per second that the client receives in that time
            while more wait.
        loop: The event loop.
    """

    def __init__(self, transport: asyncio.Transport, limits: TransferLimits, loop: asyncio.AbstractEventLoop):
        self._transport = transport
        self._limit_s = limits.stall_s
        self._least = max(2 * limits.bytes_per_s * limits.stall_s, 1.0)  # of two such periods
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None
        self._num_written = 0
        self._num_taken = 0
        self._since_s = self._progress_s = 0.0
        self._num_latest = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes, now or later."""
        self._num_written += len(data)
        self._transport.write(data)
        if self._handle is None and self._limit_s and self._num_buffered():
            self._num_taken = self._num_latest = self._count_taken()
            self._since_s = self._progress_s = self._loop.time()
            self._look_later()

    def close(self) -> None:
        """Close the connection once the buffer is sent."""
        if not self._transport.is_closing():
            self._transport.close()

    def abort(self) -> None:
        """Reset the connection, dropping what the kernel has buffered."""
        with contextlib.suppress(OSError):
            at_once = struct.pack("ii", 1, 0)
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self._transport.abort()

    def stop(self) -> None:
        """Stop watching: the connection has ended."""
        if self._handle is not None:
            self._handle.cancel()

    def _look_later(self) -> None:
        self._handle = self._loop.call_later(self._limit_s / 4, self._look)

    def _look(self) -> None:
        self._handle = None
        if not self._num_buffered():
            return
        num_taken, now_s = self._count_taken(), self._loop.time()
        num_new = num_taken - self._num_taken
        if num_taken > self._num_latest:
            self._num_latest, self._progress_s = num_taken, now_s
        if num_new >= self._least:
            self._since_s, self._num_taken = now_s, num_taken
        has_stalled = now_s - self._progress_s >= self._limit_s
        if has_stalled or now_s - self._since_s >= 2 * self._limit_s:
            client = self._transport.get_extra_info("peername")
            shown = "nothing" if has_stalled else f"only {num_new} bytes"
            limit_s = self._limit_s if has_stalled else 2 * self._limit_s
            logger.info("the client %s received %s for %g s: closing the connection", client, shown, limit_s)
            self.abort()
            return
        self._look_later()

    def _count_taken(self) -> int:
        return self._num_written - self._num_buffered() - _num_in_kernel(self._transport)

    def _num_buffered(self) -> int:
        """Return the bytes buffered in this process, including those below TLS, which asyncio does not count."""
        below = getattr(getattr(self._transport, "_ssl_protocol", None), "_transport", None)
        num_below = below.get_write_buffer_size() if isinstance(below, asyncio.Transport) else 0
        return self._transport.get_write_buffer_size() + num_below


def _num_in_kernel(transport: asyncio.Transport) -> int:
    """Return the bytes that the kernel has not sent, or sent without acknowledgement; 0 if unknown."""
    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):
        return 0
    return struct.unpack("i", found)[0]
