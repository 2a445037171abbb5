"""The requests of an engine process: limit, run and cancel them, and answer the front end's other messages."""

import logging
import threading
from collections.abc import Callable
from typing import Any

from jaxserve.api.errors import EngineDeadError
from jaxserve.api.outputs import RequestOutput
from jaxserve.engine.loop import Loop
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.startup import StartedEngine
from jaxserve.server.engine_process.outbox import Outbox, SocketStream, own_error
from jaxserve.server.engine_process.queries import Future, Queries, text_cost
from jaxserve.server.wire import (
    Cancel,
    EngineInfo,
    Outputs,
    Query,
    QueryResult,
    Stop,
    Submit,
    ToEngine,
    sendable_error,
)

logger = logging.getLogger(__name__)

Resharded = tuple[dict[str, Any], EngineInfo, dict[str, Any]]
"""The fields of a ``ReshardReport``, the new description of the engine, and the settings with which it starts there."""


class Serving:
    """Runs requests, ends them, and calls control methods. One thread hands it all messages.

    Args:
        started: The engine.
        loop: Runs the engine.
        outbox: Sends messages to the front end.
        chat_template: The source of the server's own chat template, if it has one.
        reshard: Moves the engine to a mesh and a layout; returns what was done.
    """

    def __init__(
        self,
        started: StartedEngine,
        loop: Loop,
        outbox: Outbox,
        chat_template: str | None,
        reshard: Callable[[str | None, str | None], Resharded],
    ):
        self._started = started
        self._loop = loop
        self._outbox = outbox
        self._queries = Queries(started, loop, chat_template, reshard)
        self._requests: dict[int, SocketStream] = {}
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
                    found.silence()
        elif isinstance(message, Query):
            self._query(message)
        elif isinstance(message, Stop):
            self.stop(message.drain_s)
        else:
            logger.error("dropped an unexpected message of type %s", type(message).__name__)

    def stop(self, drain_s: float) -> None:
        """End the engine's thread, and with it the process, after at most ``drain_s`` seconds. Does not wait."""
        threading.Thread(target=self._loop.stop, args=(drain_s,), daemon=True).start()

    def _submit(self, message: Submit) -> None:
        request = message.request
        deadline_s = None if request.timeout_s is None else message.arrival_s + request.timeout_s
        stream = SocketStream(
            outbox=self._outbox,
            number=message.number,
            turn=request.turn,
            on_end=self._on_end,
            request_id=request.request_id,
            deadline_s=deadline_s,
            metrics="last" if message.has_metrics else "none",
        )
        with self._lock:
            self._requests[message.number] = stream

        def prepare() -> RequestState:
            prepared = self._started.engine.prepare(request, message.arrival_s)
            prepared.sends_arrays = True
            if message.is_waiting:
                self._outbox.send(Outputs([(message.number, _prompt_of(prepared))]))
            return prepared

        try:
            self._loop.submit(stream, prepare, request.turn, text_cost(request.text))
        except EngineDeadError as error:
            self._loop.refuse(stream, error)

    def _on_end(self, stream: SocketStream) -> None:
        """Forget a request once its stream takes nothing more, and end the request if it still runs."""
        with self._lock:
            found = self._requests.pop(stream.number, None)
        if found is not None and stream.is_silent:
            self._loop.drop(stream)

    def _query(self, query: Query) -> None:
        def send(future: Future) -> None:
            error = future.exception()
            if error is None:
                result = future.result()
            else:
                result = sendable_error(own_error(error, f"control method {query.method}"))
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


def max_num_seqs(started: StartedEngine) -> int:
    """Return the number of sequences that the steps of all replicas have room for."""
    return started.plan.max_num_seqs * started.plan.num_lanes
