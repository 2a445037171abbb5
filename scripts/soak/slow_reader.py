"""A client that reads its response slowly, through the smallest window that the kernel allows."""

import asyncio
import socket
import time
from collections.abc import Callable

import httptools

BUFFER_BYTES = 2048
BITE_BYTES = 256
PAUSE_S = 0.002


class _Reading:
    """Receives the parser's callbacks."""

    def __init__(self, on_data: Callable[[bytes, float], None]):
        self._on_data = on_data
        self.is_done = False

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._on_data(body, time.perf_counter())

    def on_message_complete(self) -> None:
        """The end."""
        self.is_done = True


async def read_slowly(host: str, port: int, message: bytes, on_data: Callable[[bytes, float], None]) -> int:
    """Send a request and read the response; return its status.

    Raises:
        ConnectionError: The connection ended before the response.
    """
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        connection.setblocking(False)
        await loop.sock_connect(connection, (host, port))
        await loop.sock_sendall(connection, message)
        reading = _Reading(on_data)
        parser = httptools.HttpResponseParser(reading)
        while not reading.is_done:
            data = await loop.sock_recv(connection, BITE_BYTES)
            if not data:
                raise ConnectionError("the connection ended before the response")
            parser.feed_data(data)
            await asyncio.sleep(PAUSE_S)
        return parser.get_status_code()
