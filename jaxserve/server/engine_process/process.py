"""The life of an engine process: start, serve, end."""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from google.protobuf.message import DecodeError

from checkpoints import CheckpointError
from jaxserve.config import SERVING_DEFAULTS, EngineConfig
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.startup import start_engine
from jaxserve.engine.stats_log import StatsLogger
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.server.engine_frames import HEADER, MAX_TO_ENGINE_BYTES, checked_length, error_to_proto
from jaxserve.server.engine_process.outbox import Outbox
from jaxserve.server.engine_process.ready import ready_message
from jaxserve.server.engine_process.renderers import Renderers
from jaxserve.server.engine_process.serving import Serving
from jaxserve.server.engine_process.watchdog import Watchdog
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2

logger = logging.getLogger(__name__)

EXIT_FAILED = 70
"""Exit status after a failure of the engine: EX_SOFTWARE."""
EXIT_BAD_START = 2
"""Exit status where the engine could not start."""
_FLUSH_S = 5.0


class Inbox:
    """Reads frames on a thread of its own from the beginning, so that a front end that goes is always noticed.

    Args:
        connection: The socket to the front end.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._serve: Callable[[engine_pb2.ToEngine], None] = _before_ready
        self._on_gone: Callable[[], None] = _exit_at_once

    def read_start(self) -> engine_pb2.Start:
        """The first frame.

        Raises:
            ConfigError: It is another.
        """
        for frame in self._frames():
            if frame.WhichOneof("frame") != "start":
                raise ConfigError(f"the first frame must be start, got {frame.WhichOneof('frame')}")
            threading.Thread(target=self._run, name="jaxserve-inbox", daemon=True).start()
            return frame.start
        sys.exit(0)

    def serve(self, handle: Callable[[engine_pb2.ToEngine], None], on_gone: Callable[[], None]) -> None:
        """From now on hands all frames over.

        Args:
            handle: Gets each.
            on_gone: Called once, when the front end has gone.
        """
        self._serve, self._on_gone = handle, on_gone

    def _run(self) -> None:
        for frame in self._frames():
            try:
                self._serve(frame)
            except Exception:  # nothing that one frame does may end the others' engine
                logger.exception("a frame is dropped")
        self._on_gone()

    def _frames(self) -> Iterator[engine_pb2.ToEngine]:
        """Every frame that can be read, until the front end has gone."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                try:
                    length = checked_length(HEADER.unpack(self._read(HEADER.size))[0], MAX_TO_ENGINE_BYTES)
                except ValueError:  # where the next frame begins nobody knows
                    logger.exception("the front end cannot be understood")
                    return
                body = self._read(length)
                try:
                    frame = engine_pb2.ToEngine.FromString(body)
                except DecodeError:
                    logger.exception("a frame is dropped")
                    continue
                yield frame

    def _read(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._connection.recv(min(length - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def run(descriptor: int) -> NoReturn:
    """Runs an engine for the front end at the other end of a socket, until one of them ends.

    Args:
        descriptor: Of the socket, inherited.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the front end, which says when to end
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    inbox, outbox = Inbox(connection), Outbox(connection)
    try:
        start = inbox.read_start()
        thread, serving = _serve(start, inbox, outbox)
    except Exception as error:
        if not isinstance(error, JaxserveError | CheckpointError):
            logger.exception("the engine could not start")
        outbox.send(failure=engine_pb2.Failure(error=error_to_proto(_as_start_error(error))))
        _exit(outbox, EXIT_BAD_START)
    thread.wait_ended()
    serving.close()
    if thread.failure is None:
        thread.stop()
        _exit(outbox, 0)
    error = JaxserveError(f"the engine stopped: {thread.failure}")
    outbox.send(failure=engine_pb2.Failure(error=error_to_proto(error)))
    _exit(outbox, EXIT_FAILED)


def _serve(start: engine_pb2.Start, inbox: Inbox, outbox: Outbox) -> tuple[EngineThread, Serving]:
    """Starts the engine, and what hands it requests."""
    renderers = Renderers(start.chat_template_timeout_s)
    arguments = {**SERVING_DEFAULTS, **json.loads(start.engine_arguments_json)}
    config = EngineConfig.from_arguments(**{"model": "demo", **arguments})
    started = start_engine(config)
    logger.info("%s", started.ledger)
    stats = None if config.disable_log_stats else StatsLogger(started.ledger.device)
    thread = EngineThread(started.engine, stats)
    serving = Serving(started, config, start, thread, outbox, renderers)
    inbox.serve(serving.handle, lambda: serving.stop(0.0))
    outbox.send(ready=ready_message(started, config))
    Watchdog(thread, outbox, start.watchdog_timeout_s)
    return thread, serving


def _as_start_error(error: Exception) -> JaxserveError:
    """What the front end is told; damaged checkpoints and wrong values are settings to mend."""
    if isinstance(error, JaxserveError):
        return error
    if isinstance(error, ValueError):
        return ConfigError(str(error))
    return JaxserveError(f"{type(error).__name__}: {error}")


def _before_ready(frame: engine_pb2.ToEngine) -> None:
    if frame.WhichOneof("frame") == "stop":
        _exit_at_once()
    logger.error("a frame of kind %s came before the engine was ready", frame.WhichOneof("frame"))


def _exit_at_once() -> None:
    os._exit(0)


def _exit(outbox: Outbox, status: int) -> NoReturn:
    """Ends the process once all is sent: at once, since what a failed device or a template holds up would keep it."""
    outbox.close(_FLUSH_S)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
