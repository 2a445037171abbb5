"""A connection of the HTTP server: uvicorn's, with limits on clients and without uvicorn's deviations from the RFCs.

uvicorn has no limits on header bytes and on the time clients take for httptools (only ``h11_max_incomplete_event_size``
for h11, and a timeout of idle connections), so its protocol is subclassed and its transport wrapped. Its framing of
requests and responses is corrected here too, as RFC 9110 and RFC 9112 ask.
"""

import asyncio
import logging
import re
import urllib.parse
from collections import deque
from http import HTTPStatus
from typing import Any, Literal, cast

import httptools
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxserve.server.connections import FULL_RESPONSE, ConnectionLimits, TransferLimits
from jaxserve.server.http_api.responses import error_object, json_text
from jaxserve.server.http_transport import WatchedTransport

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
"""Limit on the URL and headers of a request together, and on its trailers."""

_LINGER_S = 30.0
MAX_PIPELINED = 16
"""Requests of a connection that are parsed before the responses to those before them have left."""
_SLICE_BYTES = {"head": 512, "body": 4096}
"""Bytes that are parsed at once: the shortest request has 28."""
_MAX_SHOWN = 200
_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")  # RFC 3986: a host's name or address, and a port


class _RefusedError(Exception):
    """A request that gets an error instead of being passed on.

    Args:
        status: The HTTP status.
        message: What was wrong.
    """

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


class Exchange(RequestResponseCycle):
    """One request and its response.

    uvicorn sends chunked responses and "100 Continue" to HTTP/1.0 clients too, asks for bodies that have arrived, and
    closes a connection while the client is still sending, which may reset it before the client has read the response.

    Attributes:
        is_lingering: Whether the connection must be closed once the rest of the request has arrived.
    """

    is_lingering = False
    _ends_with_connection = False  # neither chunks nor a length tell where the response ends

    async def run_asgi(self, app: Any) -> None:
        """Respond to the request; reset the connection if its end would make part of a response look whole."""
        await super().run_asgi(app)
        if self._ends_with_connection and not (self.response_complete or self.disconnected):
            self.transport.abort()

    async def receive(self) -> Any:
        """Return the next part of the body; ask the client for it only if it waits for that."""
        if self.body or not self.more_body:
            self.waiting_for_100_continue = False
        return await super().receive()

    async def send(self, message: Any) -> None:
        """Send the response's head or a part of its body."""
        if message["type"] == "http.response.start":
            # Whether a client that was not told to go on sends its body nevertheless is up to the client.
            if self.waiting_for_100_continue and self.more_body and not self.body:
                self.keep_alive = False
            if self.scope["http_version"] == "1.0" and b"content-length" not in dict(message.get("headers", ())):
                self._ends_with_connection, self.chunked_encoding = True, False
        else:
            if self._ends_with_connection:
                self.expected_content_length = len(message.get("body", b""))
            if not (self.keep_alive or message.get("more_body") or not self.more_body):
                self.is_lingering = self.keep_alive = True  # so that uvicorn does not close
        await super().send(message)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits against slow and endless requests, which ignores requests for other protocols.

    Headers must be complete within the time limit, counted from the start of the connection or the first byte after
    the last request; so must the rest of a body whose response was sent before it had arrived. Responses must be read
    in time (see ``WatchedTransport``).

    Pipelined requests are parsed only as responses leave: what arrives beyond a few is kept as bytes, and not read.

    Args:
        limits: What clients must keep up with.
        connections: Limits the connections; None: it does not.
        settings: uvicorn's own settings.
    """

    def __init__(self, limits: TransferLimits, connections: ConnectionLimits | None = None, **settings: Any):
        super().__init__(**settings)
        self._limits, self._limit_s = limits, limits.stall_s
        self._connections = connections
        self._address: str | None = None  # under which the connection counts
        self._unparsed = bytearray()
        self._state: Literal["idle", "headers", "body"] = "idle"
        self._deadline: asyncio.TimerHandle | None = None
        self._has_progressed = False
        self._num_idle_bytes = 0  # bytes received since the parser last reported anything except a header
        self._exchanges = deque[Exchange]()  # whose responses are not complete, in order
        self._refusal: bytes | None = None  # sent after the responses to earlier requests; what arrives is dropped

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client has connected."""
        self._transport_below = transport
        peer: Any = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        if self._connections is not None and not self._connections.enter(address):
            logger.info("refusing a connection of %s: too many", address or "a Unix socket")
            transport.write(FULL_RESPONSE)
            transport.close()
            return
        self._address = address
        super().connection_made(transport)
        self._watched = WatchedTransport(transport, self._limits, self.loop)
        self.transport = cast("asyncio.Transport", self._watched)
        self._begin_deadline(self._limit_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        vars(self._transport_below)["_read_ready_cb"] = None  # else it is in a cycle, with Python before 3.12
        if self._address is None:
            self.parser = None
            return
        if self._connections is not None:
            self._connections.leave(self._address)
        self._end_deadline()
        self._watched.stop()
        for exchange in self._exchanges:  # uvicorn tells the last one only
            exchange.disconnected = True
            exchange.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes that arrived."""
        if self._refusal is not None or self._address is None:
            return
        if self._unparsed:
            self._unparsed += data
            self._go_on()
        else:
            self._take_in(data)

    def _go_on(self) -> None:
        """Parse bytes that have waited if there is room for more requests."""
        is_open = self._refusal is None and not self.transport.is_closing()
        if is_open and len(self.pipeline) < MAX_PIPELINED:
            data, self._unparsed = bytes(self._unparsed), bytearray()
            self._take_in(data)
        if self._unparsed:
            self.flow.pause_reading()

    def _take_in(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._has_progressed = False
        view, start = memoryview(data), 0
        try:
            while start < len(data) and len(self.pipeline) < MAX_PIPELINED:
                end = start + _SLICE_BYTES["body" if self._state == "body" else "head"]
                self._parse(view[start:end])
                start = end
            self._unparsed += view[start:]
        except httptools.HttpParserError as error:
            self._refuse(error)
            return
        if self.transport.is_closing():
            return
        self._num_idle_bytes = 0 if self._has_progressed else self._num_idle_bytes + len(data)
        if self._num_idle_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_long())
        elif self._state == "headers" or (self._state == "idle" and not self._has_progressed):
            self._begin_deadline(self._limit_s)

    def _parse(self, data: memoryview) -> None:
        """Parse bytes. The parser stops at a request for another protocol: a new one goes on in this protocol.

        Raises:
            HttpParserError: Bytes that are no HTTP, or a request that is refused.
        """
        rest = data
        while True:
            assert self.parser is not None
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                version = self.parser.get_http_version().encode()
                head = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
                head += b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head + b"\r\n")
            else:
                return

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._state = "headers"

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has arrived, or a trailer, which is dropped."""
        if self._state == "headers":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """All headers have arrived: pass the request on, or let it wait until those before it have their responses."""
        assert self.parser is not None
        method, version = self.parser.get_method().decode("ascii"), self.parser.get_http_version()
        if self.parser.should_upgrade() and method != "CONNECT":
            return  # ``_parse`` begins this request again
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            raise _headers_too_long()  # they came at once: ``data_received`` counts those that come bit by bit
        _check_head(method, version, self.headers)
        raw_path, query = _path_of(method, self.url)
        self.scope["method"], self.scope["http_version"] = method, version
        self.scope["path"] = self.root_path + urllib.parse.unquote(raw_path.decode("ascii"))
        self.scope["raw_path"] = self.root_path.encode("ascii") + raw_path
        self.scope["query_string"] = query
        self.cycle = exchange = Exchange(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and version != "1.0",
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self._progress("body")
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            task = self.loop.create_task(exchange.run_asgi(self.app))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
        else:
            waiting: Any = (exchange, self.app)
            self.pipeline.appendleft(waiting)
            if len(self.pipeline) >= MAX_PIPELINED:
                self.flow.pause_reading()  # until then reading goes on, to notice a client that disconnects

    def on_body(self, body: bytes) -> None:
        """A part of the body has arrived."""
        self._has_progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request has arrived."""
        assert self.parser is not None
        if self.parser.should_upgrade():
            return
        self._progress("idle")
        super().on_message_complete()
        exchange: Any = self.cycle
        if exchange.is_lingering and exchange.response_complete:
            self.transport.close()

    def on_response_complete(self) -> None:
        """The response is complete."""
        exchange = self._exchanges.popleft()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if exchange.is_lingering:
            if self.transport.can_write_eof():  # TLS cannot
                self.transport.write_eof()
            self._begin_deadline(min(self._limit_s or _LINGER_S, _LINGER_S))
        elif self._refusal is not None and not self._exchanges:
            self._send_refusal()
        elif self._state == "body" and self.cycle.response_complete:
            self._begin_deadline(self._limit_s)
        if self._unparsed:
            self._go_on()

    def _progress(self, state: Literal["idle", "body"]) -> None:
        self._state, self._has_progressed = state, True
        self._end_deadline()

    def _refuse(self, error: Exception) -> None:
        """Respond to a request that cannot be read, after the responses to those before it, and close the connection.

        Args:
            error: An error of the parser, or one that a callback raised, which the parser has wrapped.
        """
        cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
        status = cause.status if isinstance(cause, _RefusedError) else 400
        message = str(cause) if isinstance(cause, _RefusedError) else f"invalid HTTP request: {cause}"[:_MAX_SHOWN]
        logger.info("refusing a request of %s: %s", self.client, message)
        self._end_deadline()
        if self._state == "body":
            broken = self.cycle
            if broken.response_complete:
                self.transport.close()
                return
            if broken.response_started:
                self.transport.abort()
                return
            self._exchanges.pop()
            if self._exchanges:
                self.pipeline.popleft()
            broken.disconnected = True
            broken.message_event.set()
        is_head = self._state != "idle" and self.parser is not None and self.parser.get_method() == b"HEAD"
        body = json_text(error_object(HTTPException(status, message))).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
        head += b"".join(b"%s: %s\r\n" % header for header in headers)
        self._refusal = head + b"\r\n" + (b"" if is_head else body)
        if not self._exchanges:
            self._send_refusal()

    def _send_refusal(self) -> None:
        assert self._refusal is not None
        self.transport.write(self._refusal)
        self.transport.close()

    def _begin_deadline(self, limit_s: float) -> None:
        if self._deadline is None and limit_s:
            self._deadline = self.loop.call_later(limit_s, self._expire, limit_s)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self, limit_s: float) -> None:
        self._deadline = None
        if self.flow.read_paused:  # the server is the one that does not read
            self._begin_deadline(limit_s)
            return
        logger.info("a request of %s did not arrive within %g s: closing the connection", self.client, limit_s)
        self.transport.abort()


def _headers_too_long() -> _RefusedError:
    return _RefusedError(431, f"the URL and headers must have at most {MAX_HEADER_BYTES} bytes together")


def _check_head(method: str, version: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Check what the parser does not.

    Raises:
        _RefusedError: RFC 9110 or RFC 9112 do not allow the request, or this server does not support it.
    """
    if version not in ("1.0", "1.1"):
        raise _RefusedError(505, f"HTTP/{version} is not supported; use HTTP/1.1 or HTTP/1.0")
    if method == "CONNECT":
        raise _RefusedError(501, "the method CONNECT is not supported: this server is no proxy")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        raise _RefusedError(400, f"invalid HTTP request: expected one Host header, got {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        shown = hosts[0][:_MAX_SHOWN].decode("latin-1")
        raise _RefusedError(400, f"invalid HTTP request: expected a name and port as Host, got {shown!r}")
    codings = b",".join(value for name, value in headers if name == b"transfer-encoding").lower().split(b",")
    if codings != [b""] and version == "1.0":
        raise _RefusedError(400, "invalid HTTP request: HTTP/1.0 has no Transfer-Encoding")
    if codings[-1].strip() == b"chunked" and len(codings) > 1:  # the parser refuses those that do not end so
        raise _RefusedError(501, "the only supported Transfer-Encoding is chunked")


def _path_of(method: str, target: bytes) -> tuple[bytes, bytes]:
    """Return the path and the query of a request target: a path, a whole URL, or * for OPTIONS.

    Raises:
        _RefusedError: It is none of them.
    """
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        url = None
    if url is not None and (url.path or url.schema) and (url.path != b"*" or method == "OPTIONS"):
        return url.path or (b"*" if method == "OPTIONS" and not url.query else b"/"), url.query or b""
    shown = target[:_MAX_SHOWN].decode("latin-1")
    raise _RefusedError(400, f"invalid HTTP request: expected a path or a URL as its target, got {shown!r}")
