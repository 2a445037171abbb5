"""One request's outputs on their way to the front end."""

import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxserve.engine.request_state import RequestState
from jaxserve.engine.stream import Readers
from jaxserve.errors import JaxserveError, RequestFailedError, unforeseen
from jaxserve.outputs import RequestOutput

logger = logging.getLogger(__name__)


@runtime_checkable
class Room(Readers, Protocol):
    """What a stream needs of the outbox that it lies in."""

    @property
    def is_full(self) -> bool:
        """Whether no more outputs are to be made."""
        ...

    def add(self, stream: "OutboxStream", content: RequestOutput | JaxserveError) -> None:
        """Takes what a stream has to say in this step."""
        ...

    def leave(self, stream: "OutboxStream") -> None:
        """Takes the stream of a request that has ended and has more to say than there is room for."""
        ...

    def refuse(self, stream: "OutboxStream", error: JaxserveError) -> None:
        """Ends the stream of a request that does not run."""
        ...


class OutboxStream:
    """A stream of an engine process: has no reader of its own, only its place in the frames.

    Args:
        outbox: Sends what comes.
        number: The front end's for the request.
        request_id: Its name.
        on_end: Called once when nothing more will be said, with this; on any thread.

    Attributes:
        number: The front end's for the request.
        request_id: Its name.
        request: The request, once it is prepared.
        is_cancelled: Set where the request is aborted before it runs.
        is_silent: Set where nobody reads any more.
    """

    def __init__(self, outbox: Room, number: int, request_id: str, on_end: Callable[["OutboxStream"], None]):
        self.number = number
        self.request_id = request_id
        self.request: RequestState | None = None
        self.is_cancelled = False
        self.is_silent = False
        self._outbox = outbox
        self._on_end = on_end
        self._is_behind = False
        self._is_left = False
        self._has_begun = False
        self._has_ended = False

    @property
    def readers(self) -> Readers:
        """Who is to be woken."""
        return self._outbox

    @property
    def is_behind(self) -> bool:
        """Whether the request has news that no output holds yet."""
        return self._is_behind

    def offer(self) -> bool:
        """Makes the next output if the outbox has room. On the engine's thread, between steps."""
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
        output = request.next_output(with_metrics=True)
        self._is_behind = False
        if output is None:
            return False
        self._outbox.add(self, output)
        if output.finished:
            self._end()
        return True

    def take_rest(self) -> RequestOutput | JaxserveError | None:
        """What a request that has ended still has to say. On the outbox' thread: nobody else touches it any more."""
        request = self.request
        assert request is not None
        self._is_behind = False
        self._end()
        try:
            return None if self.is_silent else request.next_output(with_metrics=True)
        except Exception as error:  # whatever is in an output: it is this request's alone
            logger.exception("request %s: no output could be made", self.request_id)
            return RequestFailedError(f"request {self.request_id} failed: {unforeseen(error)}")

    def fail(self, error: JaxserveError) -> None:
        """Ends the stream with an error. On the engine's thread."""
        if self._has_ended:
            return
        self._is_behind = False
        self._outbox.add(self, error)
        self._end()

    def refuse(self, error: JaxserveError) -> None:
        """Ends the stream of a request that does not run. On any thread."""
        if not self._has_ended:
            self._outbox.refuse(self, error)
            self._end()

    def silence(self) -> None:
        """Nothing more is said: nobody reads any more, or it cannot be sent. On any thread."""
        self.is_silent = self.is_cancelled = True
        self._end()

    def begin(self) -> bool:
        """Whether this is the first output that is sent. On the outbox' thread."""
        is_first = not self._has_begun
        self._has_begun = True
        return is_first

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._on_end(self)
