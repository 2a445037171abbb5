"""Outputs and other messages on their way to the front end; a thread sends them, so that no step waits for a socket."""

import collections
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxserve.engine.request_state import RequestState
from jaxserve.errors import JaxserveError, RequestFailedError, unforeseen
from jaxserve.outputs import RequestOutput
from jaxserve.server.engine_messages import (
    MAX_FROM_ENGINE_BYTES,
    FrameError,
    FromEngine,
    Heartbeat,
    Output,
    Outputs,
    pack_frame,
    sendable_error,
)

logger = logging.getLogger(__name__)

LIMIT_BYTES = 8 << 20
"""Estimated bytes of outputs that may wait to be sent; above it streams stop making outputs."""
_FRAME_BYTES = 4 << 20  # outputs beyond this many bytes go into the next frame
_OUTPUT_BYTES = 32  # estimates: of an output or completion, a token id, and one entry of its logprobs
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 32


class OutboxStream:
    """The outputs of one request, which go to the front end through the outbox.

    Args:
        outbox: Sends the outputs.
        number: The request's number in messages.
        request_id: The request's name.
        on_end: Called with the stream once it sends nothing more; on any thread.

    Attributes:
        number: The request's number in messages.
        request_id: The request's name.
        request: The request, once it is prepared.
        is_cancelled: Set if the request is aborted before it runs.
        is_silent: Set once the client has disconnected, or its outputs cannot be sent.
    """

    def __init__(self, outbox: "Outbox", number: int, request_id: str, on_end: Callable[["OutboxStream"], None]):
        self.number = number
        self.request_id = request_id
        self.request: RequestState | None = None
        self.is_cancelled = False
        self.is_silent = False
        self._outbox = outbox
        self._on_end = on_end
        self._is_behind = False
        self._is_left = False
        self._has_sent_prompt = False
        self._has_ended = False

    @property
    def readers(self) -> "Outbox":
        """What to wake after a step."""
        return self._outbox

    @property
    def is_behind(self) -> bool:
        """Whether the request has tokens that no output holds yet."""
        return self._is_behind

    def offer(self) -> bool:
        """Make the next output if the outbox has room. On the engine's thread, between steps."""
        request = self.request
        assert request is not None
        if self._has_ended or self._is_left:
            return False
        if self._outbox.is_full:
            self._is_behind = True
            if request.is_finished():
                self._is_left = True
                self._outbox.leave(self)
            return False
        output = request.next_output(with_metrics=request.is_finished())
        self._is_behind = False
        if output is None:
            return False
        self._outbox.add(self, output)
        if output.finished:
            self._end()
        return True

    def take_rest(self) -> RequestOutput | JaxserveError | None:
        """Return the last output of a finished request for which the outbox had no room. On the outbox's thread."""
        request = self.request
        assert request is not None
        self._is_behind = False
        self._end()
        try:
            return None if self.is_silent else request.next_output(with_metrics=True)
        except Exception as error:  # only this request fails
            logger.exception("request %s: cannot make its output", self.request_id)
            return RequestFailedError(f"request {self.request_id} failed: {unforeseen(error)}")

    def fail(self, error: JaxserveError) -> None:
        """End the stream with an error. On the engine's thread."""
        if self._has_ended:
            return
        self._is_behind = False
        self._outbox.add(self, error)
        self._end()

    def refuse(self, error: JaxserveError) -> None:
        """End the stream of a request that never ran. On any thread."""
        if not self._has_ended:
            self._outbox.refuse(self, error)
            self._end()

    def silence(self) -> None:
        """Send nothing more. On any thread."""
        self.is_silent = self.is_cancelled = True
        self._end()

    def message(self, content: RequestOutput | JaxserveError) -> Output:
        """Return an output as a message: the first has the prompt, the last the metrics. On the outbox's thread."""
        if isinstance(content, JaxserveError):
            return Output(self.number, sendable_error(content))
        if self._has_sent_prompt:
            content.prompt, content.prompt_token_ids = None, []
        self._has_sent_prompt = True
        return Output(self.number, content)

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._on_end(self)


class _Delta(NamedTuple):
    """A stream's output that waits to be sent, and its estimated size."""

    stream: OutboxStream
    content: RequestOutput | JaxserveError
    num_bytes: int


class Outbox:
    """Gathers the outputs of a step from its streams, and sends them as one frame.

    If the front end does not read, outputs wait here up to a limit; beyond it tokens stay in the requests.

    Args:
        connection: The socket to the front end.
        limit_bytes: Estimated bytes that may wait.
    """

    def __init__(self, connection: socket.socket, limit_bytes: int = LIMIT_BYTES):
        self._connection = connection
        self._limit_bytes = limit_bytes
        self._step: list[_Delta] = []  # the engine's thread alone
        self._deltas: collections.deque[_Delta] = collections.deque()
        self._left: collections.deque[OutboxStream] = collections.deque()
        self._messages: collections.deque[FromEngine] = collections.deque()
        self._num_waiting_bytes = 0
        self._is_closing = False
        self._is_broken = False
        self._changed = threading.Condition()  # of all the above but the first
        self._thread = threading.Thread(target=self._run, name="jaxserve-outbox", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether so much waits that streams must make no more outputs."""
        return self._num_waiting_bytes > self._limit_bytes

    def add(self, stream: OutboxStream, content: RequestOutput | JaxserveError) -> None:
        """Add a stream's output of this step. On the engine's thread."""
        self._step.append(_Delta(stream, content, _estimate_bytes(content)))

    def wake(self, streams: Sequence[Any]) -> None:
        """Send the outputs of this step. On the engine's thread."""
        del streams
        step, self._step = self._step, []
        self._enqueue(step)

    def refuse(self, stream: OutboxStream, error: JaxserveError) -> None:
        """Send the error of a request that never ran. On any thread."""
        self._enqueue([_Delta(stream, error, _estimate_bytes(error))])

    def leave(self, stream: OutboxStream) -> None:
        """Send the rest of a finished request once there is room for it. On any thread."""
        with self._changed:
            self._left.append(stream)
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

    def _enqueue(self, deltas: list[_Delta]) -> None:
        with self._changed:
            if not self._is_broken:
                self._deltas.extend(deltas)
                self._num_waiting_bytes += sum(delta.num_bytes for delta in deltas)
                self._changed.notify()

    def _has_work(self) -> bool:
        return bool(self._messages or self._deltas or self._left)

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
                    self._connection.sendall(pack_frame(message, MAX_FROM_ENGINE_BYTES))
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
                for waiting in (self._messages, self._deltas, self._left):
                    waiting.clear()

    def _take(self) -> list[_Delta]:
        """Return the outputs of the next frame. Those of ``leave`` come last; they were not counted as waiting."""
        taken: list[_Delta] = []
        num_bytes = 0
        with self._changed:
            while self._deltas and num_bytes < _FRAME_BYTES:
                taken.append(self._deltas.popleft())
                num_bytes += taken[-1].num_bytes
            left = [] if self._deltas else list(self._left)
            if left:
                self._left.clear()
        while left and num_bytes < _FRAME_BYTES:
            stream = left.pop(0)
            content = stream.take_rest()
            if content is not None:
                taken.append(_Delta(stream, content, 0))
                num_bytes += _estimate_bytes(content)
        with self._changed:
            self._left.extendleft(reversed(left))
        return taken

    def _send_outputs(self, deltas: list[_Delta]) -> None:
        sent = [(one.stream, one.stream.message(one.content)) for one in deltas if not one.stream.is_silent]
        if not sent:
            return
        try:
            frame = pack_frame(Outputs([output for _, output in sent]), MAX_FROM_ENGINE_BYTES)
        except FrameError:  # one output may be the reason
            frame = b"".join(self._pack_alone(stream, output) for stream, output in sent)
        self._connection.sendall(frame)

    def _pack_alone(self, stream: OutboxStream, output: Output) -> bytes:
        """Return one request's output as a frame; if it cannot be sent, that request fails."""
        try:
            return pack_frame(Outputs([output]), MAX_FROM_ENGINE_BYTES)
        except FrameError as error:
            logger.error("request %s: cannot send its output: %s", stream.request_id, error)
            stream.silence()
            failure = RequestFailedError(f"request {stream.request_id} failed: its output cannot be sent, see the log")
            return pack_frame(Outputs([stream.message(failure)]), MAX_FROM_ENGINE_BYTES)


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
