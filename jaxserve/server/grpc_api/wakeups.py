"""Gives the event loop all of gRPC's events at once, however many there are.

gRPC's thread queues each event (a new call, a message, the end of a call) and writes a byte to a socket. The reader on
the event loop handles the whole queue, but reads one byte a turn. Where a client ends some hundred calls at once, the
socket is full after 278 events (Linux), and the thread waits in its write until three quarters of the bytes are read,
which takes 209 turns. No call of any client goes on meanwhile: seconds, if the turns are long.
"""

import contextlib
import socket
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from typing import Any

_MOST_BYTES = 1 << 16  # more than such a socket holds


@contextlib.contextmanager
def whole_wakeups(loop: AbstractEventLoop) -> Iterator[None]:
    """Let readers of sockets that are added to an event loop in the block read all bytes that are there in one turn.

    gRPC adds its reader where the first server or channel of an event loop is made, so the block must make it. Without
    effect if there was one before, and harmless for versions of gRPC that read everything themselves.

    Args:
        loop: The event loop that runs.
    """
    add_reader = loop.add_reader

    def add(source: Any, callback: Callable[..., object], *args: Any) -> None:
        if isinstance(source, socket.socket):
            add_reader(source, _handle_all, source, callback, *args)
        else:
            add_reader(source, callback, *args)

    vars(loop)["add_reader"] = add  # gRPC has no setting for it
    try:
        yield
    finally:
        del vars(loop)["add_reader"]


def _handle_all(source: socket.socket, callback: Callable[..., object], *args: Any) -> None:
    """Call what reads a byte and handles the queue as often as there are bytes now.

    The first call handles all events, unless it fails at one, such as one of an event loop that is closed: the next
    call goes on after it. An error is raised after all calls.
    """
    num_waiting = 1
    with contextlib.suppress(BlockingIOError):  # another event loop was first
        num_waiting = max(1, len(source.recv(_MOST_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)))
    failure: Exception | None = None
    for _ in range(num_waiting):
        try:
            callback(*args)
        except BlockingIOError:
            break  # another event loop has read the others
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
