"""From a message of the front end to a request that runs: everything before the engine's thread sees it."""

import concurrent.futures
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.startup import StartedEngine
from jaxserve.errors import SHUT_DOWN, DeadlineError, EngineDeadError, JaxserveError, RequestFailedError, unforeseen
from jaxserve.request import PromptInput, parse_prompt
from jaxserve.server.engine_process.outbox_stream import OutboxStream
from jaxserve.server.engine_process.queue_limits import Place, QueueLimits
from jaxserve.server.engine_process.renderers import Renderers, render_job
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2
from jaxserve.server.submit_codec import chat_of, fit_of, params_of
from jaxserve.structured_output.grammars import own_error
from jaxserve.text.chat_prompt import read_template

logger = logging.getLogger(__name__)

_NUM_THREADS = 2  # more would only take time from the steps


class Preparation:
    """Checks, renders, tokenizes and admits requests on threads of its own; whatever goes wrong is one request's error.

    Args:
        started: The engine.
        thread: Runs it.
        limits: What may wait.
        renderers: Make prompts of conversations.
        chat_template: The source, or the name of a file, of a template in place of the model's.
        content_format: What templates see of contents: ``auto``, ``string`` or ``openai``.

    Attributes:
        chat_template: The source of the template in place of the model's, if there is one.
    """

    def __init__(
        self,
        started: StartedEngine,
        thread: EngineThread,
        limits: QueueLimits,
        renderers: Renderers,
        chat_template: str | None,
        content_format: str = "auto",
    ):
        self._started = started
        self._engine = started.engine
        self._thread = thread
        self._limits = limits
        self._renderers = renderers
        self.chat_template = read_template(chat_template)
        self._content_format = content_format
        self._pool = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "jaxserve-prepare")

    def begin(self, stream: OutboxStream, message: engine_pb2.Submit, place: Place) -> None:
        """Prepares a request and lets it run; what goes wrong goes to its stream."""
        arrival_s = time.monotonic()
        if message.WhichOneof("prompt") == "chat":
            arguments_json = message.chat.arguments_json

            def read(rendered: "concurrent.futures.Future[str]") -> PromptInput:
                return self._chat_prompt(rendered.result(), message)

            def prepare(rendered: "concurrent.futures.Future[str]") -> None:
                self.run(stream, lambda: self._prepare(stream, message, place, arrival_s, lambda: read(rendered)))

            def is_wanted() -> bool:
                return not stream.is_silent

            self.run(stream, lambda: self.render(arguments_json, is_wanted).add_done_callback(prepare))
        else:
            self.run(stream, lambda: self._prepare(stream, message, place, arrival_s, lambda: _plain_prompt(message)))

    def run(self, stream: OutboxStream, work: Callable[[], Any]) -> None:
        """Does a part of a request's preparation on another thread."""
        try:
            self._pool.submit(self._guarded, stream, work)
        except RuntimeError:
            stream.refuse(EngineDeadError(SHUT_DOWN))

    def call(self, function: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
        """Runs something short on the same threads.

        Raises:
            RuntimeError: They have ended.
        """
        return self._pool.submit(function)

    def render(
        self, arguments_json: str, is_wanted: Callable[[], bool] = lambda: True
    ) -> "concurrent.futures.Future[str]":
        """The prompt of a conversation, as soon as it is rendered; not, if it is no longer wanted when its turn comes.

        Raises:
            RequestError: The conversation is wrong.
        """
        tokenizer = self._started.tokenizer
        chat: Mapping[str, Any] = chat_of(arguments_json)
        special_tokens = tokenizer.special_tokens
        job = render_job(chat, tokenizer.chat_templates, self.chat_template, special_tokens, self._content_format)
        return self._renderers.submit(job, is_wanted)

    def close(self) -> None:
        """Ends the processes; what is being prepared is of no more use. Does not wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._renderers.kill()

    def _guarded(self, stream: OutboxStream, work: Callable[[], Any]) -> None:
        """Where an exception of one request's preparation ends."""
        if stream.is_silent:
            return
        try:
            work()
        except JaxserveError as error:
            stream.refuse(error)
        except concurrent.futures.CancelledError:
            stream.refuse(EngineDeadError(SHUT_DOWN))
        except BaseException as error:  # whatever a tokenizer may raise: a panic of Rust's is no Exception
            logger.exception("request %s could not be prepared", stream.request_id)
            stream.refuse(RequestFailedError(f"request {stream.request_id} failed: {unforeseen(error)}"))

    def _chat_prompt(self, text: str, message: engine_pb2.Submit) -> PromptInput:
        token_ids = self._started.tokenizer.encode(text, add_special_tokens=False)
        salt = message.cache_salt if message.HasField("cache_salt") else None
        return PromptInput(text, tuple(token_ids), None, salt, fit_of(message), is_chat=True)

    def _prepare(
        self,
        stream: OutboxStream,
        message: engine_pb2.Submit,
        place: Place,
        arrival_s: float,
        read: Callable[[], PromptInput],
    ) -> None:
        deadline_s = arrival_s + message.timeout_s if message.HasField("timeout_s") else None
        if deadline_s is not None and deadline_s <= time.monotonic():
            raise DeadlineError("the deadline has passed before the request was prepared")
        request = self._engine.prepare(
            read(),
            params_of(message),
            request_id=message.request_id,
            priority=message.priority,
            arrival_s=arrival_s,
        )
        self._limits.note_prompt(place, request)
        if request.grammar is None:
            self._submit(stream, request, deadline_s)
        else:
            request.grammar.add_done_callback(
                lambda grammar: self._guarded(stream, lambda: self._with_grammar(stream, request, deadline_s, grammar))
            )

    def _with_grammar(
        self,
        stream: OutboxStream,
        request: RequestState,
        deadline_s: float | None,
        grammar: "concurrent.futures.Future[Any]",
    ) -> None:
        error = grammar.exception()
        if error is not None:
            self._thread.check_alive()
            raise own_error(error) from error
        self._submit(stream, request, deadline_s)

    def _submit(self, stream: OutboxStream, request: RequestState, deadline_s: float | None) -> None:
        if stream.is_silent:
            return
        self._thread.submit(stream, request, deadline_s)


def _plain_prompt(message: engine_pb2.Submit) -> PromptInput:
    """A prompt of text or token ids, checked."""
    given: dict[str, Any] = {}
    if message.WhichOneof("prompt") == "token_ids":
        given["prompt_token_ids"] = list(message.token_ids.ids)
    else:
        given["prompt"] = message.text
    if message.HasField("cache_salt"):
        given["cache_salt"] = message.cache_salt
    prompt = parse_prompt(given)
    return PromptInput(prompt.prompt, prompt.prompt_token_ids, None, prompt.cache_salt, fit_of(message))
