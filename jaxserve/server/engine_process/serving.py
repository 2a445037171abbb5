"""The requests of an engine process: run and cancel them, and answer the front end's other messages."""

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.preparation import Preparation
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.startup import StartedEngine
from jaxserve.errors import SHUT_DOWN, EngineDeadError, JaxserveError, RequestFailedError, unforeseen
from jaxserve.request import PromptFit, PromptInput, parse_prompt
from jaxserve.server.engine_messages import Cancel, Query, QueryResult, Start, Stop, Submit, ToEngine, sendable_error
from jaxserve.server.engine_process.outbox import Outbox, OutboxStream
from jaxserve.server.engine_process.queries import Future, Queries
from jaxserve.server.engine_process.queued_tokens import Place, QueuedTokens
from jaxserve.server.engine_process.renderers import Renderers, render_job
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.settings import queued_tokens_limit
from jaxserve.text.chat_prompt import read_template

logger = logging.getLogger(__name__)


class Serving:
    """Runs requests, ends them, and calls control methods. One thread hands it all messages.

    Args:
        started: The engine.
        config: The engine's settings.
        start: The front end's settings.
        thread: Runs the engine.
        outbox: Sends messages to the front end.
        renderers: Turn conversations into prompts.
    """

    def __init__(
        self,
        started: StartedEngine,
        config: EngineConfig,
        start: Start,
        thread: EngineThread,
        outbox: Outbox,
        renderers: Renderers,
    ):
        self._started = started
        self._thread = thread
        self._outbox = outbox
        self._renderers = renderers
        self._queued = QueuedTokens(
            max_num_seqs(started), queued_tokens_limit(start.max_num_queued_tokens, started.plan.max_model_len)
        )
        self._preparation = Preparation(thread)
        self._chat_template = read_template(config.chat_template)
        self._content_format = start.chat_template_content_format
        self._queries = Queries(started, thread, self._preparation, self._chat_template, self._render, self._abort)
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
        """End the threads and processes that prepare requests. Does not wait."""
        self._preparation.close(wait=False)
        self._renderers.kill()

    def _submit(self, message: Submit) -> None:
        request = message.request
        stream = OutboxStream(self._outbox, message.number, message.request_id, self._on_end)
        place = self._queued.enter(request.params.n if request.pooling is None else 1)
        with self._lock:
            self._requests[message.number] = stream, place
        arrival_s = time.monotonic()
        deadline_s = None if request.timeout_s is None else arrival_s + request.timeout_s

        def begin(read: Callable[[], PromptInput]) -> None:
            def make() -> RequestState:
                if stream.is_silent:
                    raise concurrent.futures.CancelledError
                prepared = self._started.engine.prepare(
                    read(),
                    request.pooling or request.params,
                    request_id=message.request_id,
                    priority=request.priority,
                    arrival_s=arrival_s,
                )
                self._queued.note_prompt(place, prepared)
                return prepared

            self._preparation.begin(stream, make, deadline_s).add_done_callback(lambda begun: _report(stream, begun))

        if request.chat is None:
            begin(lambda: _prompt(request))
            return

        def tokenize(rendered: "concurrent.futures.Future[str]") -> PromptInput:
            text = rendered.result()
            token_ids = self._started.tokenizer.encode(text, add_special_tokens=False)
            return PromptInput(text, tuple(token_ids), None, request.cache_salt, _fit(request), is_chat=True)

        try:
            rendering = self._render(request.chat, lambda: not stream.is_silent)
        except RuntimeError:  # the renderers have ended
            stream.refuse(EngineDeadError(SHUT_DOWN))
        else:
            rendering.add_done_callback(lambda rendered: begin(lambda: tokenize(rendered)))

    def _render(
        self, chat: Mapping[str, Any], is_wanted: Callable[[], bool] = lambda: True
    ) -> "concurrent.futures.Future[str]":
        def make_job() -> dict[str, Any]:
            tokenizer = self._started.tokenizer
            templates, special_tokens = tokenizer.chat_templates, tokenizer.special_tokens
            return render_job(chat, templates, self._chat_template, special_tokens, self._content_format)

        return self._renderers.submit(make_job, is_wanted)

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

    def _query(self, query: Query) -> None:
        def send(future: Future) -> None:
            error = future.exception()
            if error is None:
                result = future.result()
            elif isinstance(error, JaxserveError):
                result = sendable_error(error)
            else:
                logger.error("control method %s failed", query.method, exc_info=error)
                result = RequestFailedError(f"control method {query.method} failed: {unforeseen(error)}")
            self._outbox.send(QueryResult(query.number, result))

        self._queries.call(query.method, query.arguments).add_done_callback(send)


def _report(stream: OutboxStream, begun: "concurrent.futures.Future[None]") -> None:
    """End the stream of a request that could not be prepared."""
    error = begun.exception()
    if error is None or stream.is_silent:
        return
    if isinstance(error, JaxserveError):
        stream.refuse(error)
    elif isinstance(error, concurrent.futures.CancelledError):
        stream.refuse(EngineDeadError(SHUT_DOWN))
    else:
        logger.error("request %s could not be prepared", stream.request_id, exc_info=error)
        stream.refuse(RequestFailedError(f"request {stream.request_id} failed: {unforeseen(error)}"))


def _prompt(request: EngineRequest) -> PromptInput:
    """Check a prompt of text or token ids."""
    given: dict[str, Any] = {"prompt": request.text}
    if request.token_ids is not None:
        given = {"prompt_token_ids": list(request.token_ids)}
    if request.cache_salt is not None:
        given["cache_salt"] = request.cache_salt
    prompt = parse_prompt(given)
    return PromptInput(prompt.prompt, prompt.prompt_token_ids, None, prompt.cache_salt, _fit(request))


def _fit(request: EngineRequest) -> PromptFit:
    return PromptFit(
        is_strict=request.is_strict_length,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        add_special_tokens=request.add_special_tokens,
    )


def max_num_seqs(started: StartedEngine) -> int:
    """Return the number of sequences that the steps of all replicas have room for."""
    return started.plan.max_num_seqs * len(started.plan.programs)
