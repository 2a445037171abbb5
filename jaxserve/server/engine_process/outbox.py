"""Outputs and other messages on their way to the front end; a thread sends them, so that no step waits for a socket."""

import collections
import concurrent.futures
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxserve.api.errors import SHUT_DOWN, EngineDeadError, JaxserveError, RequestFailedError, unforeseen
from jaxserve.api.outputs import RequestOutput
from jaxserve.server.wire import (
    MAX_FROM_ENGINE_BYTES,
    FrameError,
    FromEngine,
    Heartbeat,
    Output,
    Outputs,
    pack,
    sendable_error,
)

logger = logging.getLogger(__name__)

LIMIT_BYTES = 8 << 20
"""Estimated bytes of outputs that may wait to be sent; above it unfinished requests make no outputs."""
_FRAME_BYTES = 4 << 20  # outputs beyond this many bytes go into the next frame
_OUTPUT_BYTES = 32  # estimates: of an output or completion, a token id, and one entry of its logprobs
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 32


class SocketSink:
    """Sends the outputs of one request to the front end through the outbox.

    Args:
        outbox: Sends the outputs.
        number: The request's number in messages.
        request_id: The request's name.
        on_end: Called with the sink once it takes nothing more; on any thread.

    Attributes:
        readers: The outbox.
        number: The request's number in messages.
        request_id: The request's name.
        is_silent: Set once the client has disconnected, or its outputs cannot be sent.
    """

    def __init__(self, outbox: "Outbox", number: int, request_id: str, on_end: Callable[["SocketSink"], None]):
        self.readers = outbox
        self.number = number
        self.request_id = request_id
        self.is_silent = False
        self._on_end = on_end
        self._has_sent_prompt = False

    @property
    def has_room(self) -> bool:
        """Whether the outbox has room for more outputs."""
        return not self.readers.is_full

    def put(self, content: RequestOutput | BaseException) -> None:
        """Send an output or an error. On any thread; then wake the outbox."""
        if isinstance(content, BaseException):
            content = sendable_error(own_error(content, f"request {self.request_id}"))
        self.readers.add(self, content)
        if isinstance(content, BaseException) or content.finished:
            self._on_end(self)

    def silence(self) -> None:
        """Send nothing more. On any thread."""
        self.is_silent = True
        self._on_end(self)

    def message(self, content: RequestOutput | JaxserveError) -> Output:
        """Return an output as a message; only the first one has the prompt. On the outbox's thread."""
        if isinstance(content, RequestOutput):
            if self._has_sent_prompt:
                content.prompt, content.prompt_token_ids = None, []
            self._has_sent_prompt = True
        return Output(self.number, content)


def own_error(error: BaseException, what: str) -> JaxserveError:
    """Return the error that the client gets if ``what`` fails; any but our own errors is a bug, and is logged."""
    if isinstance(error, JaxserveError):
        return error
    if isinstance(error, concurrent.futures.CancelledError):
        return EngineDeadError(SHUT_DOWN)
    logger.error("%s failed", what, exc_info=error)
    return RequestFailedError(f"{what} failed: {unforeseen(error)}")


class _Delta(NamedTuple):
    """A request's output that waits to be sent, and its estimated size."""

    sink: SocketSink
    content: RequestOutput | JaxserveError
    num_bytes: int


class Outbox:
    """Gathers the outputs of a step from its sinks, and sends them as one frame.

    If the front end does not read, outputs wait here up to a limit. Beyond it tokens stay in the requests until these
    have finished.

    Args:
        connection: The socket to the front end.
        limit_bytes: Estimated bytes that may wait.
    """

    def __init__(self, connection: socket.socket, limit_bytes: int = LIMIT_BYTES):
        self._connection = connection
        self._limit_bytes = limit_bytes
        self._step: collections.deque[_Delta] = collections.deque()
        self._deltas: collections.deque[_Delta] = collections.deque()
        self._messages: collections.deque[FromEngine] = collections.deque()
        self._num_waiting_bytes = 0
        self._is_closing = False
        self._is_broken = False
        self._changed = threading.Condition()  # of all the above but the first
        self._thread = threading.Thread(target=self._run, name="jaxserve-outbox", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether so much waits that unfinished requests must make no more outputs."""
        return self._num_waiting_bytes > self._limit_bytes

    def add(self, sink: SocketSink, content: RequestOutput | JaxserveError) -> None:
        """Add an output or an error, which the next ``wake`` sends. On any thread."""
        self._step.append(_Delta(sink, content, _estimate_bytes(content)))

    def wake(self, sinks: Sequence[Any]) -> None:
        """Send the outputs that were added. On any thread."""
        del sinks
        with self._changed:
            while self._step:
                delta = self._step.popleft()
                if not self._is_broken:
                    self._deltas.append(delta)
                    self._num_waiting_bytes += delta.num_bytes
            self._changed.notify()

    def send(self, message: FromEngine) -> None:
        """Send another message, before waiting outputs. On any thread."""
        with self._changed:
            if not self._is_broken:
                self._messages.append(message)
                self._changed.notify()

    def send_heartbeat(self) -> None:
        """Send a heartbeat, unless another message waits, which does as well. On any thread."""
        if not self._messages:
            self.send(Heartbeat())

    def close(self, timeout_s: float) -> None:
        """Send what waits, for at most ``timeout_s`` seconds, and then nothing more."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _has_work(self) -> bool:
        return bool(self._messages or self._deltas)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._has_work() or self._is_closing)
                    if not self._has_work():
                        return
                    messages = list(self._messages)
                    self._messages.clear()
                for message in messages:
                    self._connection.sendall(pack(message, MAX_FROM_ENGINE_BYTES))
                deltas = self._take()
                self._send_outputs(deltas)
                with self._changed:
                    self._num_waiting_bytes -= sum(delta.num_bytes for delta in deltas)
        except OSError as error:
            logger.warning("outputs can no longer be sent: %s", error)
        except Exception:
            logger.exception("outputs can no longer be sent")
        finally:
            # The thread that reads from the front end, and the front end itself, must notice.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            with self._changed:
                self._is_broken = True
                self._messages.clear()
                self._deltas.clear()

    def _take(self) -> list[_Delta]:
        """Return the outputs of the next frame."""
        taken: list[_Delta] = []
        num_bytes = 0
        with self._changed:
            while self._deltas and num_bytes < _FRAME_BYTES:
                taken.append(self._deltas.popleft())
                num_bytes += taken[-1].num_bytes
        return taken

    def _send_outputs(self, deltas: list[_Delta]) -> None:
        sent = [(one.sink, one.sink.message(one.content)) for one in deltas if not one.sink.is_silent]
        if not sent:
            return
        try:
            frame = pack(Outputs([output for _, output in sent]), MAX_FROM_ENGINE_BYTES)
        except FrameError:  # one output may be the reason
            frame = b"".join(self._pack_alone(sink, output) for sink, output in sent)
        self._connection.sendall(frame)

    def _pack_alone(self, sink: SocketSink, output: Output) -> bytes:
        """Return one request's output as a frame; if it cannot be sent, that request fails."""
        try:
            return pack(Outputs([output]), MAX_FROM_ENGINE_BYTES)
        except FrameError as error:
            logger.error("request %s: cannot send its output: %s", sink.request_id, error)
            sink.silence()
            failure = RequestFailedError(f"request {sink.request_id} failed: its output cannot be sent, see the log")
            return pack(Outputs([sink.message(failure)]), MAX_FROM_ENGINE_BYTES)


def _estimate_bytes(content: RequestOutput | JaxserveError) -> int:
    """Estimate the size of an output cheaply; the prompt does not count, because it is not copied."""
    if isinstance(content, JaxserveError):
        return _OUTPUT_BYTES
    num_bytes = _OUTPUT_BYTES
    for output in content.outputs:
        num_bytes += _OUTPUT_BYTES + len(output.text) + _TOKEN_BYTES * len(output.token_ids)
        if output.logprobs:
            num_bytes += _LOGPROB_BYTES * len(output.logprobs) * (len(output.logprobs[0]) + 1)
    return num_bytes
