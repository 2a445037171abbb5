"""A connection of the HTTP server: uvicorn's, with limits on header bytes and on the time clients take.

uvicorn has neither for httptools (only ``h11_max_incomplete_event_size`` for h11, and a timeout of idle connections),
so its protocol is subclassed and its transport wrapped.
"""

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
from typing import Any, Literal, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
"""Limit on the URL, headers and trailers of a request together."""

_TOO_LONG = b"the request's headers are too long"
_TOO_LONG_REPLY = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_TOO_LONG), _TOO_LONG)
)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits against slow and endless requests.

    Headers must be complete within the time limit, counted from the start of the connection or the first byte after
    the last request; so must the rest of a body whose response was sent before it had arrived. Responses must be read
    in time (see ``WatchedTransport``).

    Args:
        limit_s: Seconds that a client may take; 0: no limit.
        settings: uvicorn's own settings.
    """

    def __init__(self, limit_s: float, **settings: Any):
        super().__init__(**settings)
        self._limit_s = limit_s
        self._state: Literal["idle", "headers", "body"] = "idle"
        self._deadline: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._has_progressed = False
        self._num_idle_bytes = 0  # that came since the parser last had something for us but a header

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._watched = WatchedTransport(transport, self._limit_s, self.loop)
        self.transport = cast("asyncio.Transport", self._watched)
        self._begin_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._end_deadline()
        self._watched.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes that arrived."""
        self._has_progressed = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._num_idle_bytes = 0 if self._has_progressed else self._num_idle_bytes + len(data)
        if self._num_idle_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()
        elif self._state == "headers" or (self._state == "idle" and not self._has_progressed):
            self._begin_deadline()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._state, self._num_header_bytes = "headers", 0

    def on_url(self, url: bytes) -> None:
        """A part of the URL has arrived."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header or trailer has arrived."""
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """All headers have arrived."""
        self._progress("body")
        super().on_headers_complete()
        assert self.parser is not None
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the parser takes what follows for the other protocol

    def on_body(self, body: bytes) -> None:
        """A part of the body has arrived."""
        self._has_progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request has arrived."""
        self._progress("idle")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The response is complete."""
        super().on_response_complete()
        if self._state == "body" and self.cycle.response_complete and not self.transport.is_closing():
            self._begin_deadline()

    def send_400_response(self, msg: str) -> None:
        """Respond to a request that the parser rejected."""
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()
        else:
            super().send_400_response(msg)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: HTTP upgrade requests are answered as plain HTTP/1.1."""

    def _progress(self, state: Literal["idle", "body"]) -> None:
        self._state, self._has_progressed = state, True
        self._end_deadline()

    def _count(self, num_bytes: int) -> None:
        """Count header bytes; the parser turns the error into its own."""
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too long")

    def _refuse_headers(self) -> None:
        logger.info("a request of %s has more than %d bytes of headers", self.client, MAX_HEADER_BYTES)
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
        else:
            self.transport.write(_TOO_LONG_REPLY)
            self.transport.close()

    def _begin_deadline(self) -> None:
        if self._deadline is None and self._limit_s:
            self._deadline = self.loop.call_later(self._limit_s, self._expire)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if self.flow.read_paused:  # the server is the one that does not read
            self._begin_deadline()
            return
        logger.info("a request of %s did not arrive within %g s: closing the connection", self.client, self._limit_s)
        self.transport.abort()


class WatchedTransport:
    """A transport that is aborted if its client receives nothing of what is written for too long.

    uvicorn's ``send`` returns before the whole response has left, and closing a transport waits for its buffer; so the
    buffer itself is watched. Slow clients are fine as long as the other side acknowledges some bytes.

    Args:
        transport: The wrapped transport.
        limit_s: Seconds without a received byte; 0: no limit.
        loop: The event loop.
    """

    def __init__(self, transport: asyncio.Transport, limit_s: float, loop: asyncio.AbstractEventLoop):
        self._transport = transport
        self._limit_s = limit_s
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None
        self._num_written = 0
        self._num_taken = 0
        self._since_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes, now or later."""
        self._num_written += len(data)
        self._transport.write(data)
        if self._handle is None and self._limit_s and self._num_buffered():
            self._num_taken, self._since_s = self._count_taken(), self._loop.time()
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
        if num_taken > self._num_taken:
            self._since_s = now_s
        elif now_s - self._since_s >= self._limit_s:
            client = self._transport.get_extra_info("peername")
            logger.info("the client %s received nothing for %g s: closing the connection", client, self._limit_s)
            self.abort()
            return
        self._num_taken = num_taken
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
