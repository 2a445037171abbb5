"""Outputs and other messages on their way to the front end; a thread sends them, so that no step waits for a socket."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxserve.api.errors import SHUT_DOWN, EngineDeadError, JaxserveError, RequestFailedError, unforeseen
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.turns import Turn, TurnQueue
from jaxserve.engine.stream import Content, Stream
from jaxserve.frames import FrameError
from jaxserve.server.tally import Tally
from jaxserve.server.wire import (
    MAX_FROM_ENGINE_BYTES,
    FromEngine,
    Heartbeat,
    Outputs,
    pack,
    sendable_error,
)

logger = logging.getLogger(__name__)

LIMIT_BYTES = 8 << 20
"""Estimated bytes of outputs that may wait to be sent; above it unfinished requests make no outputs."""
_FRAME_BYTES = 512 << 10  # outputs beyond this many bytes go into the next frame, so that other keys get their turns
_OUTPUT_BYTES = 32  # estimates: of an output or completion, a token id, and one entry of its logprobs
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 32


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class SocketStream(Stream):
    """The outputs of a request go to the front end through the outbox.

    Attributes:
        outbox: The outbox.
        number: The request's number in messages.
        turn: Whose turn its outputs take.
        on_end: Called with the stream once it takes nothing more; on any thread.
        is_silent: Set once the client has disconnected, or its outputs cannot be sent.
        has_prompt: Whether an output with the prompt has been taken.
    """

    outbox: "Outbox"
    number: int
    turn: Turn
    on_end: Callable[["SocketStream"], None]
    is_silent: bool = False
    has_prompt: bool = False

    @property
    def readers(self) -> "Outbox":
        """See ``Stream``."""
        return self.outbox

    @property
    def has_room(self) -> bool:
        """Whether the outbox has room for more outputs of its key."""
        return not self.outbox.is_full(self.turn.key)

    def sendable(self, content: Content) -> RequestOutput | JaxserveError:
        """Return an output or an error as it is sent: only the first output has the prompt. On any thread."""
        if isinstance(content, BaseException):
            self.on_end(self)
            return sendable_error(own_error(content, f"request {self.request_id}"))
        if self.has_prompt:
            content.prompt, content.prompt_token_ids = None, []
        self.has_prompt = True
        if content.finished:
            self.on_end(self)
        return content

    def silence(self) -> None:
        """Send nothing more. On any thread."""
        self.is_silent = True
        self.on_end(self)


def own_error(error: BaseException, what: str) -> JaxserveError:
    """Return the error that the client gets if ``what`` fails; any but our own errors is a bug, and is logged."""
    if isinstance(error, JaxserveError):
        return error
    if isinstance(error, concurrent.futures.CancelledError):
        return EngineDeadError(SHUT_DOWN)
    logger.error("%s failed", what, exc_info=error)
    return RequestFailedError(f"{what} failed: {unforeseen(error)}")


class _Waiting(NamedTuple):
    """A request's output with its estimated size, that waits to be sent."""

    stream: SocketStream
    content: RequestOutput | JaxserveError
    num_bytes: int


class Outbox:
    """Sends the outputs of a step as one frame, and other messages before them.

    If the front end does not read, outputs wait here up to a limit. Beyond it tokens stay in the requests until these
    have finished. API keys take turns, and each has a part of the room: large outputs of one hold up no other's.

    Args:
        connection: The socket to the front end.
        limit_bytes: Estimated bytes that may wait.
    """

    def __init__(self, connection: socket.socket, limit_bytes: int = LIMIT_BYTES):
        self._connection = connection
        self._limit_bytes = limit_bytes
        self._messages: list[FromEngine] = []
        self._waiting = TurnQueue[_Waiting]()
        self._num_bytes = Tally()  # by key, of those that are being sent too
        self._is_closing = False
        self._is_broken = False
        self._changed = threading.Condition()  # of all the above
        self._thread = threading.Thread(target=self._run, name="jaxserve-outbox", daemon=True)
        self._thread.start()

    def is_full(self, key: str = "") -> bool:
        """Whether an API key has no more room here: its unfinished requests must make no more outputs."""
        return self._num_bytes[key] > self._limit_bytes / max(1, len(self._num_bytes.names))

    def take(self, contents: Sequence[tuple[SocketStream, Content]]) -> None:
        """See ``Readers``."""
        sendable = [(stream, stream.sendable(content)) for stream, content in contents]
        added = [_Waiting(stream, content, _estimate_bytes(content)) for stream, content in sendable]
        with self._changed:
            for one in () if self._is_broken else added:
                self._waiting.put(one, one.stream.turn, one.num_bytes)
                self._num_bytes.add(one.stream.turn.key, one.num_bytes)
            self._changed.notify()

    def send(self, message: FromEngine) -> None:
        """Send another message, before the outputs that wait. On any thread."""
        with self._changed:
            if not self._is_broken:
                self._messages.append(message)
            self._changed.notify()

    def send_heartbeat(self) -> None:
        """Send a heartbeat, unless something else waits, which does as well. On any thread."""
        if not (self._messages or self._waiting.keys):
            self.send(Heartbeat())

    def close(self, timeout_s: float) -> None:
        """Send what waits, for at most ``timeout_s`` seconds, and then nothing more."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _take(self) -> tuple[list[FromEngine], list[_Waiting]]:
        """Wait for something to send; return messages and outputs to send next, none at the end."""
        outputs: list[_Waiting] = []
        num_bytes = 0
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._waiting.keys or self._is_closing)
            messages, self._messages = self._messages, []
            while self._waiting.keys and num_bytes < _FRAME_BYTES:
                outputs.append(self._waiting.take(self._waiting.keys))
                num_bytes += outputs[-1].num_bytes
        return messages, outputs

    def _run(self) -> None:
        try:
            while any(taken := self._take()):
                messages, outputs = taken
                frames = [pack(message, MAX_FROM_ENGINE_BYTES) for message in messages]
                self._connection.sendall(b"".join([*frames, *_frames(outputs)]))
                with self._changed:
                    for one in outputs:
                        self._num_bytes.add(one.stream.turn.key, -one.num_bytes)
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
                self._waiting.clear()


def _frames(taken: Sequence[_Waiting]) -> Iterator[bytes]:
    """Yield outputs as one frame; a request whose output cannot be sent fails alone."""
    outputs = [(one.stream, one.content) for one in taken if not one.stream.is_silent]
    if not outputs:
        return
    try:
        yield _pack_outputs(outputs)
    except FrameError:  # one output may be the reason
        yield from (_pack_alone(stream, content) for stream, content in outputs)


def _pack_outputs(outputs: Sequence[tuple[SocketStream, Any]]) -> bytes:
    return pack(Outputs([(stream.number, content) for stream, content in outputs]), MAX_FROM_ENGINE_BYTES)


def _pack_alone(stream: SocketStream, content: Any) -> bytes:
    try:
        return _pack_outputs([(stream, content)])
    except FrameError as error:
        logger.error("request %s: cannot send its output: %s", stream.request_id, error)
        stream.silence()
        failure = RequestFailedError(f"request {stream.request_id} failed: its output cannot be sent, see the log")
        return _pack_outputs([(stream, failure)])


def _estimate_bytes(content: RequestOutput | JaxserveError) -> int:
    """Estimate the size of an output cheaply; the prompt does not count, because it is not copied."""
    if isinstance(content, JaxserveError):
        return _OUTPUT_BYTES
    num_bytes = _OUTPUT_BYTES + _logprobs_bytes(content.prompt_logprobs)
    for output in content.outputs:
        num_bytes += _OUTPUT_BYTES + len(output.text) + _TOKEN_BYTES * len(output.token_ids)
        num_bytes += _logprobs_bytes(output.logprobs)
    return num_bytes


def _logprobs_bytes(logprobs: Sequence[Any] | None) -> int:
    """Estimate the size of log-probabilities by those of the last position; a prompt has none at its first."""
    return _LOGPROB_BYTES * len(logprobs) * (len(logprobs[-1] or ()) + 1) if logprobs else 0
