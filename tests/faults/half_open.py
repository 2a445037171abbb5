"""A peer that is gone without a word: what it sent came, and nothing comes of it any more."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class Relay:
    """Passes bytes on between clients and a server until it is told to stop; its connections then stay open.

    Attributes:
        target: Where clients connect to.

    Args:
        host: Of the server.
        port: Of the server.
    """

    def __init__(self, host: str, port: int):
        self._address = (host, port)
        self._is_stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def stop_passing(self) -> None:
        """Passes nothing on any more, and closes nothing."""
        self._is_stopped.set()

    def close(self) -> None:
        """Ends the connections."""
        self.stop_passing()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._address)
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._is_stopped.is_set():
                    return
                sink.sendall(data)


@contextlib.contextmanager
def relay(target: str) -> Iterator[Relay]:
    """A relay in front of a server, given as ``host:port``."""
    host, _, port = target.rpartition(":")
    found = Relay(host, int(port))
    try:
        yield found
    finally:
        found.close()
