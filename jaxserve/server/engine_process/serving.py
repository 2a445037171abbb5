"""The requests of an engine process: limit, run and cancel them, and answer the front end's other messages."""

import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.preparation import Preparation
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.startup import StartedEngine
from jaxserve.errors import SHUT_DOWN, EngineDeadError, JaxserveError, OverloadedError, RequestFailedError, unforeseen
from jaxserve.server.engine_messages import (
    Cancel,
    EngineInfo,
    Query,
    QueryResult,
    Start,
    Stop,
    Submit,
    ToEngine,
    sendable_error,
)
from jaxserve.server.engine_process.outbox import Outbox, OutboxStream
from jaxserve.server.engine_process.queries import Future, Queries
from jaxserve.server.settings import queued_tokens_limit

logger = logging.getLogger(__name__)

Resharded = tuple[dict[str, Any], EngineInfo]
"""The fields of a ``ReshardReport``, and the new description of the engine."""


@dataclasses.dataclass(eq=False)
class Place:
    """A request among those that run, wait or are being prepared.

    Attributes:
        num_seqs: Its sequences.
        waits: Whether the steps had no room for it when it arrived.
        num_tokens: Tokens of its prompt; 0 until they are known.
        request: The request, once it is prepared.
        has_left: Whether it has ended.
    """

    num_seqs: int
    waits: bool
    num_tokens: int = 0
    request: RequestState | None = None
    has_left: bool = False


class QueuedTokens:
    """Counts the prompt tokens of waiting requests, and rejects requests above the limit. Any thread may use it.

    Only the engine process can count them, because only it tokenizes; the front end counts sequences
    (``request_limits``).

    Args:
        max_num_seqs: Sequences that the steps have room for; the requests of others wait.
        max_num_queued_tokens: Most prompt tokens of waiting requests; the samples of a request share its prompt.
    """

    def __init__(self, max_num_seqs: int, max_num_queued_tokens: int):
        self._max_num_seqs = max_num_seqs
        self._max_num_queued_tokens = max_num_queued_tokens
        self._num_seqs = 0
        self._num_tokens = 0
        self._waiting: dict[Place, None] = {}
        self._lock = threading.Lock()

    def resize(self, max_num_seqs: int) -> None:
        """Let another number of sequences not wait, from the next request on."""
        with self._lock:
            self._max_num_seqs = max_num_seqs

    def enter(self, num_seqs: int) -> Place:
        """Count a new request's sequences."""
        with self._lock:
            self._num_seqs += num_seqs
            return Place(num_seqs, waits=self._num_seqs > self._max_num_seqs)

    def note_prompt(self, place: Place, request: RequestState) -> None:
        """Count a prepared request's prompt, if the request has to wait.

        Raises:
            OverloadedError: Too many prompt tokens wait.
        """
        if not place.waits:
            return
        num_tokens = len(request.prompt_token_ids)
        with self._lock:
            if place.has_left:  # cancelled meanwhile
                return
            if self._num_tokens + num_tokens > self._max_num_queued_tokens:
                for other in list(self._waiting):
                    if other.request is not None and other.request.scheduled_s is not None:
                        self._forget(other)
            if self._num_tokens + num_tokens > self._max_num_queued_tokens:
                raise OverloadedError(
                    f"queue full: {self._num_tokens} prompt tokens waiting, limit {self._max_num_queued_tokens} "
                    f"(max_num_queued_tokens), and this prompt has {num_tokens}; retry later"
                )
            place.num_tokens, place.request = num_tokens, request
            self._num_tokens += num_tokens
            self._waiting[place] = None

    def leave(self, place: Place) -> None:
        """Stop counting a request. Call it once for each."""
        with self._lock:
            place.has_left = True
            self._num_seqs -= place.num_seqs
            self._forget(place)

    def _forget(self, place: Place) -> None:
        if place in self._waiting:
            del self._waiting[place]
            self._num_tokens -= place.num_tokens
            place.request = None


class Serving:
    """Runs requests, ends them, and calls control methods. One thread hands it all messages.

    Args:
        started: The engine.
        start: The front end's settings.
        thread: Runs the engine.
        outbox: Sends messages to the front end.
        chat_template: The source of the server's own chat template, if it has one.
        reshard: Moves the engine to a mesh and a layout; returns what was done.
    """

    def __init__(
        self,
        started: StartedEngine,
        start: Start,
        thread: EngineThread,
        outbox: Outbox,
        chat_template: str | None,
        reshard: Callable[[str | None, str | None], Resharded],
    ):
        self._started = started
        self._thread = thread
        self._outbox = outbox
        self._queued = QueuedTokens(
            max_num_seqs(started), queued_tokens_limit(start.max_num_queued_tokens, started.plan.max_model_len)
        )
        self._preparation = Preparation(thread)
        self._move = reshard
        self._queries = Queries(started, thread, self._preparation, chat_template, self._abort, self._reshard)
        self._requests: dict[int, tuple[OutboxStream, Place]] = {}
        self._lock = threading.Lock()  # of the dict

    def handle(self, message: ToEngine) -> None:
        """Handle one message; errors go to the log, or to the request or query that caused them."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            for number in message.numbers:
                with self._lock:
                    found = self._requests.get(number)
                if found is not None:
                    found[0].silence()
        elif isinstance(message, Query):
            self._query(message)
        elif isinstance(message, Stop):
            self.stop(message.drain_s)
        else:
            logger.error("dropped an unexpected message of type %s", type(message).__name__)

    def stop(self, drain_s: float) -> None:
        """End the engine's thread, and with it the process, after at most ``drain_s`` seconds. Does not wait."""
        threading.Thread(target=self._thread.stop, args=(drain_s,), daemon=True).start()

    def close(self) -> None:
        """End the threads that prepare requests. Does not wait."""
        self._preparation.close(wait=False)

    def _submit(self, message: Submit) -> None:
        request = message.request
        stream = OutboxStream(self._outbox, message.number, request.request_id, self._on_end)
        place = self._queued.enter(request.params.n if request.pooling is None else 1)
        with self._lock:
            self._requests[message.number] = stream, place
        deadline_s = None if request.timeout_s is None else message.arrival_s + request.timeout_s

        def make() -> RequestState:
            if stream.is_silent:
                raise concurrent.futures.CancelledError
            prepared = self._started.engine.prepare(request, message.arrival_s)
            self._queued.note_prompt(place, prepared)
            return prepared

        def report(begun: "concurrent.futures.Future[None]") -> None:
            error = begun.exception()
            if error is not None and not stream.is_silent:
                stream.refuse(_own_error(error, f"request {request.request_id}"))

        self._preparation.begin(stream, make, deadline_s).add_done_callback(report)

    def _on_end(self, stream: OutboxStream) -> None:
        """Free a request's place once its stream sends nothing more, and end the request if it still runs."""
        with self._lock:
            found = self._requests.pop(stream.number, None)
        if found is not None:
            self._queued.leave(found[1])
        if stream.is_silent:
            self._thread.drop(stream)

    def _abort(self, request_ids: list[str]) -> Future:
        wanted = set(request_ids)
        with self._lock:
            streams = [stream for stream, _ in self._requests.values() if stream.request_id in wanted]
        for stream in streams:
            stream.is_cancelled = True
        found = [stream.request_id for stream in streams]
        aborted: Future = concurrent.futures.Future()
        self._thread.abort(found).add_done_callback(lambda _: aborted.set_result(found))
        return aborted

    def _reshard(self, mesh: str | None, layout: str | None) -> Resharded:
        moved = self._move(mesh, layout)
        _, info = moved
        self._queued.resize(info.model.max_num_seqs)
        return moved

    def _query(self, query: Query) -> None:
        def send(future: Future) -> None:
            error = future.exception()
            if error is None:
                result = future.result()
            else:
                result = sendable_error(_own_error(error, f"control method {query.method}"))
            self._outbox.send(QueryResult(query.number, result))

        self._queries.call(query.method, query.arguments).add_done_callback(send)


def _own_error(error: BaseException, what: str) -> JaxserveError:
    """Return the error that the client gets if ``what`` fails; any but our own errors is a bug, and is logged."""
    if isinstance(error, JaxserveError):
        return error
    if isinstance(error, concurrent.futures.CancelledError):
        return EngineDeadError(SHUT_DOWN)
    logger.error("%s failed", what, exc_info=error)
    return RequestFailedError(f"{what} failed: {unforeseen(error)}")


def max_num_seqs(started: StartedEngine) -> int:
    """Return the number of sequences that the steps of all replicas have room for."""
    return started.plan.max_num_seqs * started.plan.num_lanes
