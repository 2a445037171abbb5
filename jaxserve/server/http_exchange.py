"""A request and its response on a connection of the HTTP server: uvicorn's, framed as RFC 9110 and RFC 9112 ask."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


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
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            self._ends_with_connection = self.scope["http_version"] == "1.0" and not has_length
            if self._ends_with_connection:
                self.chunked_encoding = False
        else:
            if self._ends_with_connection:
                self.expected_content_length = len(message.get("body", b""))
            if not (self.keep_alive or message.get("more_body") or not self.more_body):
                self.is_lingering = self.keep_alive = True  # so that uvicorn does not close
        await super().send(message)
