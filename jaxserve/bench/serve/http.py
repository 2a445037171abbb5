"""A small HTTP/1.1 client for many concurrent streams, which passes on each piece of a body as it arrives.

A general client spends more CPU time on each event of a stream than the engine on its token, and on few cores it takes
that time from the server. This one parses with httptools in the callback of the socket, without waking a task.
"""

import asyncio
import json
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import httptools

from jaxserve.bench.serve.records import BenchServeError

OnData = Callable[[bytes, float], None]
"""Called with each piece of a body and its arrival time."""


class HttpResponse(NamedTuple):
    """A response; the body is empty if a callback received it."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Parse the body as JSON.

        Raises:
            BenchServeError: It is not JSON.
        """
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise BenchServeError(f"expected a JSON response, got {self.body[:200]!r}") from error


class HttpClient:
    """A pool of connections to one server, reused after each response.

    Args:
        base_url: Such as ``http://127.0.0.1:8000``; its path is prepended to those of requests.
        headers: Sent with each request.
        ssl_context: For https.
        clock: Returns the time of pieces.

    Raises:
        BenchServeError: The address is invalid.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchServeError(f"expected an address such as http://127.0.0.1:8000, got {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        self._ssl = (ssl_context or ssl.create_default_context()) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        host = parts.netloc.rpartition("@")[2]  # a server refuses a Host with a user's name
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": host, **(headers or {})}.items())
        self._clock = clock
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        on_data: OnData | None = None,
    ) -> HttpResponse:
        """Send a request, with ``body`` as JSON, and return after the whole response.

        ``on_data`` receives the body of a response with status 200, piece by piece.

        Raises:
            OSError: The server cannot be reached, or the connection broke.
        """
        message = self.message(method, path, body)
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._exchange(connection, message, on_data)
            except _NoResponseError:
                continue  # the server had already closed this kept-alive connection: retry
        return await self._exchange(await self._connect(), message, on_data)

    def message(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the bytes of a request."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}"
        if body is None:
            return f"{head}\r\n".encode()
        payload = json.dumps(body).encode()
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload

    async def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._clock), self._host, self._port, ssl=self._ssl
        )
        return connection

    async def _exchange(self, connection: "_Connection", message: bytes, on_data: OnData | None) -> HttpResponse:
        is_done = False
        try:
            response = await connection.exchange(message, on_data)
            is_done = True
            return response
        finally:
            if is_done and connection.can_go_on():
                self._idle.append(connection)
            else:
                connection.close()


class _NoResponseError(ConnectionError):
    """The connection was closed before any byte of a response."""


class _Connection(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._transport: Any = None
        self._done: asyncio.Future[HttpResponse] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport; asyncio calls this."""
        self._transport = transport

    def can_go_on(self) -> bool:
        """Return whether it can send another request."""
        return self._keeps_alive and not self._transport.is_closing()

    def close(self) -> None:
        """Abort the connection: unsent data is dropped."""
        self._transport.abort()

    async def exchange(self, message: bytes, on_data: OnData | None) -> HttpResponse:
        """Send a request and wait for the end of the response."""
        if self._transport.is_closing():
            raise _NoResponseError("the server closed the connection")
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._on_data, self._headers, self._body = on_data, {}, []
        self._status, self._has_begun, self._keeps_alive, self._now = 0, False, False, 0.0
        self._transport.write(message)
        return await self._done

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; asyncio calls this."""
        if self._done is None or self._done.done():
            return
        self._has_begun = True
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__)  # an exception of on_data
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the response is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Finish or fail the exchange when the connection closes; asyncio calls this."""
        if self._done is None or self._done.done():
            return
        has_end = "content-length" in self._headers or "chunked" in self._headers.get("transfer-encoding", "")
        if self._status and not has_end and exc is None:
            self.on_message_complete()  # a body without a length ends with the connection
        elif self._has_begun:
            self._fail(exc or ConnectionError("the server closed the connection in the middle of a response"))
        else:
            self._fail(_NoResponseError("the server closed the connection without a response"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; the parser calls this."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Store the status; the parser calls this after the headers."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body; the parser calls this."""
        if self._on_data is not None and self._status == 200:
            self._on_data(body, self._now)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Finish the exchange; the parser calls this."""
        if 100 <= self._status < 200:  # such as 103 Early Hints: the response follows
            self._status, self._headers, self._body = 0, {}, []
            return
        if self._done is not None and not self._done.done():
            self._keeps_alive = self._parser.should_keep_alive()
            self._done.set_result(HttpResponse(self._status, self._headers, b"".join(self._body)))

    def _fail(self, error: BaseException | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionError("the response could not be read"))
