"""The requests of an engine process: limit, run and cancel them, and answer the front end's other messages."""

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from typing import Any

from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.preparation import Preparation
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.startup import StartedEngine
from jaxserve.errors import SHUT_DOWN, EngineDeadError, JaxserveError, RequestFailedError, unforeseen
from jaxserve.outputs import RequestOutput
from jaxserve.server.engine_messages import (
    Cancel,
    EngineInfo,
    Output,
    Outputs,
    Query,
    QueryResult,
    Stop,
    Submit,
    ToEngine,
    sendable_error,
)
from jaxserve.server.engine_process.outbox import Outbox, OutboxStream
from jaxserve.server.engine_process.queries import Future, Queries

logger = logging.getLogger(__name__)

Resharded = tuple[dict[str, Any], EngineInfo]
"""The fields of a ``ReshardReport``, and the new description of the engine."""


class Serving:
    """Runs requests, ends them, and calls control methods. One thread hands it all messages.

    Args:
        started: The engine.
        thread: Runs the engine.
        outbox: Sends messages to the front end.
        chat_template: The source of the server's own chat template, if it has one.
        reshard: Moves the engine to a mesh and a layout; returns what was done.
    """

    def __init__(
        self,
        started: StartedEngine,
        thread: EngineThread,
        outbox: Outbox,
        chat_template: str | None,
        reshard: Callable[[str | None, str | None], Resharded],
    ):
        self._started = started
        self._thread = thread
        self._outbox = outbox
        self._preparation = Preparation(thread)
        self._queries = Queries(started, thread, self._preparation, chat_template, self._abort, reshard)
        self._requests: dict[int, OutboxStream] = {}
        self._lock = threading.Lock()  # of the dict

    def handle(self, message: ToEngine) -> None:
        """Handle one message; errors go to the log, or to the request or query that caused them."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            for number in message.numbers:
                with self._lock:
                    stream = self._requests.get(number)
                if stream is not None:
                    stream.silence()
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
        with self._lock:
            self._requests[message.number] = stream
        deadline_s = None if request.timeout_s is None else message.arrival_s + request.timeout_s

        def make() -> RequestState:
            if stream.is_silent:
                raise concurrent.futures.CancelledError
            prepared = self._started.engine.prepare(request, message.arrival_s)
            if message.is_waiting:
                self._outbox.send(Outputs([Output(message.number, _prompt_of(prepared))]))
            return prepared

        def report(begun: "concurrent.futures.Future[None]") -> None:
            error = begun.exception()
            if error is not None and not stream.is_silent:
                stream.refuse(_own_error(error, f"request {request.request_id}"))

        self._preparation.begin(stream, make, deadline_s).add_done_callback(report)

    def _on_end(self, stream: OutboxStream) -> None:
        """Forget a request once its stream sends nothing more, and end the request if it still runs."""
        with self._lock:
            self._requests.pop(stream.number, None)
        if stream.is_silent:
            self._thread.drop(stream)

    def _abort(self, request_ids: list[str]) -> Future:
        wanted = set(request_ids)
        with self._lock:
            streams = [stream for stream in self._requests.values() if stream.request_id in wanted]
        for stream in streams:
            stream.is_cancelled = True
        found = [stream.request_id for stream in streams]
        aborted: Future = concurrent.futures.Future()
        self._thread.abort(found).add_done_callback(lambda _: aborted.set_result(found))
        return aborted

    def _query(self, query: Query) -> None:
        def send(future: Future) -> None:
            error = future.exception()
            if error is None:
                result = future.result()
            else:
                result = sendable_error(_own_error(error, f"control method {query.method}"))
            self._outbox.send(QueryResult(query.number, result))

        self._queries.call(query.method, query.arguments).add_done_callback(send)


def _prompt_of(request: RequestState) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        prompt=None,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[],
        finished=False,
    )


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
