"""A slow link: a relay that passes bytes on to another port some time after they have come."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def slow_relay(listen: int, target: int, delay_s: float) -> Iterator[None]:
    """Relay connections to a port of this machine to another one while the block runs.

    Args:
        listen: The port that is connected to.
        target: The port that connections are passed on to.
        delay_s: Seconds that every byte takes, in both directions.
    """
    links: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", listen))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", target))
                except OSError:  # nobody listens there yet
                    near.close()
                    continue
                links.extend((near, far))
                for source, sink in ((near, far), (far, near)):
                    _pass_on(source, sink, delay_s)

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        accepting.join()


def _pass_on(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def receive() -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + delay_s, data))

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                at_s, data = waiting.get()
                time.sleep(max(0.0, at_s - time.monotonic()))
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)

    for run in (receive, send):
        threading.Thread(target=run, daemon=True).start()
