"""What goes to the front end: a thread writes it, so that no step ever waits for a socket."""

import collections
import contextlib
import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from jaxserve.errors import JaxserveError, RequestFailedError, unforeseen
from jaxserve.outputs import RequestOutput
from jaxserve.server.engine_frames import MAX_FROM_ENGINE_BYTES, FrameError, packed
from jaxserve.server.engine_process.news import error_news, news_to_proto, weight_of
from jaxserve.server.engine_process.outbox_stream import OutboxStream
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2

logger = logging.getLogger(__name__)

LIMIT_BYTES = 8 << 20
"""Estimated bytes of outputs that may wait; above it streams count as behind, and no more are made."""
_FRAME_BYTES = 4 << 20  # more than that is not joined into one frame


class _News(NamedTuple):
    """What one stream has to say, and its estimated bytes."""

    stream: OutboxStream
    content: RequestOutput | JaxserveError
    weight: int


class Outbox:
    """Gathers what the streams of a step have to say, and sends it as one frame.

    A front end that does not read makes outputs wait here up to a limit, and behind it in the requests themselves.

    Args:
        connection: The socket to the front end.
        limit_bytes: Estimated bytes that may wait.
    """

    def __init__(self, connection: socket.socket, limit_bytes: int = LIMIT_BYTES):
        self._connection = connection
        self._limit_bytes = limit_bytes
        self._step: list[_News] = []  # the engine's thread alone
        self._news: collections.deque[_News] = collections.deque()
        self._left: collections.deque[OutboxStream] = collections.deque()
        self._messages: collections.deque[engine_pb2.FromEngine] = collections.deque()
        self._num_waiting_bytes = 0
        self._is_closing = False
        self._is_broken = False
        self._changed = threading.Condition()  # of all the above but the first
        self._thread = threading.Thread(target=self._run, name="jaxserve-outbox", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no more outputs are to be made."""
        return self._num_waiting_bytes > self._limit_bytes

    def add(self, stream: OutboxStream, content: RequestOutput | JaxserveError) -> None:
        """Takes what a stream has to say in this step. On the engine's thread."""
        self._step.append(_News(stream, content, weight_of(content)))

    def wake(self, streams: Sequence[Any]) -> None:
        """Sends what has been added. On the engine's thread."""
        del streams
        step, self._step = self._step, []
        self._hand_over(step)

    def refuse(self, stream: OutboxStream, error: JaxserveError) -> None:
        """Ends the stream of a request that does not run. On any thread."""
        self._hand_over([_News(stream, error, weight_of(error))])

    def leave(self, stream: OutboxStream) -> None:
        """Takes the stream of a request that has ended and has more to say than there is room for. On any thread."""
        with self._changed:
            self._left.append(stream)
            self._changed.notify()

    def send(self, **frame: Message) -> None:
        """Sends another frame, ahead of outputs. On any thread."""
        message = engine_pb2.FromEngine(**frame)  # pyright: ignore[reportArgumentType]
        with self._changed:
            if not self._is_broken:
                self._messages.append(message)
                self._changed.notify()

    def send_heartbeat(self) -> None:
        """Sends a heartbeat, unless another frame still waits, which says as much. On any thread."""
        if not self._messages:
            self.send(heartbeat=engine_pb2.Heartbeat())

    def close(self, timeout_s: float) -> None:
        """Sends what waits, for so long at most, and sends nothing more."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _hand_over(self, news: list[_News]) -> None:
        with self._changed:
            if not self._is_broken:
                self._news.extend(news)
                self._num_waiting_bytes += sum(one.weight for one in news)
                self._changed.notify()

    def _has_work(self) -> bool:
        return bool(self._messages or self._news or self._left)

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
                    self._write(message)
                self._write_news(*self._take())
        except OSError as error:
            logger.warning("outputs can no longer be sent: %s", error)
        except Exception:
            logger.exception("outputs can no longer be sent")
        finally:
            # Who reads from the front end, and the front end itself, notice that nothing can be sent any more.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            with self._changed:
                self._is_broken = True
                for waiting in (self._messages, self._news, self._left):
                    waiting.clear()

    def _take(self) -> tuple[list[_News], int]:
        """What goes into the next frame, and its estimated bytes."""
        taken: list[_News] = []
        weight = 0
        with self._changed:
            while self._news and weight < _FRAME_BYTES:
                taken.append(self._news.popleft())
                weight += taken[-1].weight
            left = [] if self._news else list(self._left)
            if left:
                self._left.clear()
        while left and weight < _FRAME_BYTES:
            stream = left.pop(0)
            content = stream.take_rest()
            if content is not None:
                taken.append(_News(stream, content, 0))
                weight += weight_of(content)
        with self._changed:
            self._left.extendleft(reversed(left))
        return taken, sum(one.weight for one in taken)

    def _write_news(self, taken: list[_News], weight: int) -> None:
        outputs = [(one.stream, message) for one in taken if (message := self._message(one)) is not None]
        try:
            self._write_outputs([message for _, message in outputs])
        except FrameError:
            for stream, message in outputs:
                self._write_alone(stream, message)
        with self._changed:
            self._num_waiting_bytes -= weight

    def _write_alone(self, stream: OutboxStream, message: engine_pb2.Output) -> None:
        """Sends one request's news; where even these are too long, that request fails."""
        try:
            self._write_outputs([message])
        except FrameError as error:
            logger.error("request %s: its answer is not sent: %s", stream.request_id, error)
            stream.silence()
            failure = RequestFailedError(f"request {stream.request_id} failed: its answer is too long")
            self._write_outputs([error_news(stream.number, failure)])

    def _write_outputs(self, outputs: list[engine_pb2.Output]) -> None:
        if outputs:
            self._write(engine_pb2.FromEngine(outputs=engine_pb2.Outputs(outputs=outputs)))

    def _message(self, news: _News) -> engine_pb2.Output | None:
        """A stream's news as a message; None where nobody wants them any more."""
        stream, content = news.stream, news.content
        if stream.is_silent:
            return None
        if isinstance(content, JaxserveError):
            return error_news(stream.number, content)
        try:
            return news_to_proto(stream.number, content, is_first=stream.begin())
        except Exception as error:  # whatever is in an output: it is this request's alone
            logger.exception("request %s: an output cannot be sent", stream.request_id)
            stream.silence()
            message = f"request {stream.request_id} failed: {unforeseen(error)}"
            return error_news(stream.number, RequestFailedError(message))

    def _write(self, message: engine_pb2.FromEngine) -> None:
        self._connection.sendall(packed(message, MAX_FROM_ENGINE_BYTES))
