"""The requests of an engine process: limit, run and cancel them, and answer the front end's other messages."""

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine.loop import Loop, Stream
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.startup import StartedEngine
from jaxserve.errors import SHUT_DOWN, EngineDeadError, OverloadedError
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
from jaxserve.server.engine_process.outbox import Outbox, SocketSink, own_error
from jaxserve.server.engine_process.queries import Future, Queries
from jaxserve.server.engine_process.renderers import Renderers, render_job
from jaxserve.server.settings import queued_tokens_limit
from jaxserve.text.chat_prompt import read_template

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
        config: The engine's settings.
        start: The front end's settings.
        loop: Runs the engine.
        outbox: Sends messages to the front end.
        renderers: Turn conversations into prompts.
        reshard: Moves the engine to a mesh and a layout; returns what was done.
    """

    def __init__(
        self,
        started: StartedEngine,
        config: EngineConfig,
        start: Start,
        loop: Loop,
        outbox: Outbox,
        renderers: Renderers,
        reshard: Callable[[str | None, str | None], Resharded],
    ):
        self._started = started
        self._loop = loop
        self._outbox = outbox
        self._renderers = renderers
        self._queued = QueuedTokens(
            max_num_seqs(started), queued_tokens_limit(start.max_num_queued_tokens, started.plan.max_model_len)
        )
        self._chat_template = read_template(config.chat_template)
        self._content_format = start.chat_template_content_format
        self._move = reshard
        self._queries = Queries(
            started, loop, self._chat_template, self._render, self._abort, self._reshard
        )
        self._requests: dict[int, tuple[Stream, SocketSink, Place]] = {}
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
                    found[1].silence()
        elif isinstance(message, Query):
            self._query(message)
        elif isinstance(message, Stop):
            self.stop(message.drain_s)
        else:
            logger.error("dropped an unexpected message of type %s", type(message).__name__)

    def stop(self, drain_s: float) -> None:
        """End the engine's thread, and with it the process, after at most ``drain_s`` seconds. Does not wait."""
        threading.Thread(target=self._loop.stop, args=(drain_s,), daemon=True).start()

    def close(self) -> None:
        """End the processes that render conversations. Does not wait."""
        self._renderers.kill()

    def _submit(self, message: Submit) -> None:
        request = message.request
        arrival_s = time.monotonic()
        deadline_s = None if request.timeout_s is None else arrival_s + request.timeout_s
        place = self._queued.enter(request.params.n if request.pooling is None else 1)
        sink = SocketSink(self._outbox, message.number, request.request_id, self._on_end)
        stream = Stream(sink, request.request_id, deadline_s, "last")
        with self._lock:
            self._requests[message.number] = stream, sink, place

        def begin(rendered: "concurrent.futures.Future[str] | None" = None) -> None:
            def prepare() -> RequestState:
                whole = request
                if rendered is not None:
                    text = rendered.result()
                    token_ids = tuple(self._started.tokenizer.encode(text, add_special_tokens=False))
                    whole = dataclasses.replace(request, text=text, token_ids=token_ids)
                prepared = self._started.engine.prepare(whole, arrival_s)
                self._queued.note_prompt(place, prepared)
                return prepared

            try:
                self._loop.submit(stream, prepare)
            except EngineDeadError as error:
                self._loop.refuse(stream, error)

        if request.chat is None:
            begin()
            return
        try:
            rendering = self._render(request.chat, lambda: not stream.has_ended)
        except RuntimeError:  # the renderers have ended
            self._loop.refuse(stream, EngineDeadError(SHUT_DOWN))
        else:
            rendering.add_done_callback(begin)

    def _render(
        self, chat: Mapping[str, Any], is_wanted: Callable[[], bool] = lambda: True
    ) -> "concurrent.futures.Future[str]":
        def make_job() -> dict[str, Any]:
            tokenizer = self._started.tokenizer
            templates, special_tokens = tokenizer.chat_templates, tokenizer.special_tokens
            return render_job(chat, templates, self._chat_template, special_tokens, self._content_format)

        return self._renderers.submit(make_job, is_wanted)

    def _on_end(self, sink: SocketSink) -> None:
        """Free a request's place once its sink takes nothing more, and end the request if it still runs."""
        with self._lock:
            found = self._requests.pop(sink.number, None)
        if found is not None:
            stream, _, place = found
            self._queued.leave(place)
            if sink.is_silent:
                self._loop.drop(stream)

    def _abort(self, request_ids: list[str]) -> Future:
        wanted = set(request_ids)
        with self._lock:
            streams = [stream for stream, _, _ in self._requests.values() if stream.request_id in wanted]
        for stream in streams:
            stream.is_cancelled = True
        found = [stream.request_id for stream in streams]
        aborted: Future = concurrent.futures.Future()
        self._loop.abort(found).add_done_callback(lambda _: aborted.set_result(found))
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
                result = sendable_error(own_error(error, f"control method {query.method}"))
            self._outbox.send(QueryResult(query.number, result))

        self._queries.call(query.method, query.arguments).add_done_callback(send)


def max_num_seqs(started: StartedEngine) -> int:
    """Return the number of sequences that the steps of all replicas have room for."""
    return started.plan.max_num_seqs * started.plan.num_lanes
