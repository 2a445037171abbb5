"""Questions of the front end that are no requests for text."""

import concurrent.futures
import json
import logging
from collections.abc import Callable
from typing import Any

from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.startup import StartedEngine
from jaxserve.errors import JaxserveError, RequestError, RequestFailedError, unforeseen
from jaxserve.server.engine_process.preparation import Preparation
from jaxserve.server.engine_process.profile_recording import ProfileRecording
from jaxserve.server.engine_request import check_converted
from jaxserve.server.metric_codec import metrics_to_json
from jaxserve.server.submit_codec import chat_json

logger = logging.getLogger(__name__)

Answer = concurrent.futures.Future[Any]


class Queries:
    """Answers questions by name; each method takes a question's arguments.

    Args:
        started: The engine.
        thread: Runs it.
        preparation: Has threads and renderers.
        abort: Ends requests by name; returns those that ran or waited, once they have ended.
    """

    def __init__(
        self,
        started: StartedEngine,
        thread: EngineThread,
        preparation: Preparation,
        abort: Callable[[list[str]], Answer],
    ):
        self._started = started
        self._thread = thread
        self._preparation = preparation
        self._recording: ProfileRecording | None = None
        self._methods: dict[str, Callable[..., Answer]] = {
            "abort": abort,
            "detokenize": self._detokenize,
            "metrics": self._metrics,
            "render_chat": self._render_chat,
            "reset_prefix_cache": self._reset_prefix_cache,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
            "tokenize": self._tokenize,
            "tokenizer_info": self._tokenizer_info,
        }

    def ask(self, method: str, arguments_json: str) -> Answer:
        """What will be the answer; an error where the question is wrong."""
        try:
            if method not in self._methods:
                raise RequestError(f"there is no question {method!r}")
            return self._methods[method](**json.loads(arguments_json))
        except Exception as error:
            failed: Answer = concurrent.futures.Future()
            failed.set_exception(error)
            return failed

    def _tokenize(self, text: str, add_special_tokens: bool, with_strings: bool) -> Answer:
        tokenizer = self._started.tokenizer

        def tokenize() -> dict[str, Any]:
            token_ids = tokenizer.encode(text, add_special_tokens)
            if with_strings:
                check_converted("return_token_strs", len(token_ids))
            strings = [tokenizer.id_to_token(token) or "" for token in token_ids] if with_strings else []
            return {"token_ids": token_ids, "strings": strings}

        return self._preparation.call(tokenize)

    def _detokenize(self, token_ids: list[int], skip_special_tokens: bool) -> Answer:
        tokenizer = self._started.tokenizer
        vocab_size = self._started.plan.config.vocab_size
        outside = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if outside is not None:
            message = f"token id {outside} is out of vocabulary; expected ids from 0 to {vocab_size - 1}"
            raise RequestError(message, parameter="tokens", value=outside)
        return self._preparation.call(lambda: tokenizer.decode(token_ids, skip_special_tokens))

    def _render_chat(self, chat: dict[str, Any]) -> Answer:
        tokenizer = self._started.tokenizer
        answer: Answer = concurrent.futures.Future()

        def tokenize(rendered: "concurrent.futures.Future[str]") -> None:
            try:
                text = rendered.result()
                answer.set_result({"text": text, "token_ids": tokenizer.encode(text, add_special_tokens=False)})
            except BaseException as error:
                answer.set_exception(error)

        self._preparation.render(chat_json(chat)).add_done_callback(tokenize)
        return answer

    def _tokenizer_info(self) -> Answer:
        tokenizer, preparation = self._started.tokenizer, self._preparation
        return preparation.call(lambda: tokenizer.info(preparation.chat_template))

    def _metrics(self) -> Answer:
        answer: Answer = concurrent.futures.Future()
        answer.set_result(metrics_to_json(self._started.engine.metrics()))
        return answer

    def _reset_prefix_cache(self) -> Answer:
        return self._thread.call(self._started.engine.reset_prefix_cache)

    def _start_profile(self, directory: str) -> Answer:
        if self._recording is not None:
            raise RequestError("a profile is being recorded already")
        self._recording = recording = ProfileRecording(directory)

        def start() -> None:
            try:
                recording.begin()
            except RequestFailedError:
                self._recording = None
                raise

        return self._preparation.call(start)

    def _stop_profile(self) -> Answer:
        recording = self._recording
        if recording is None:
            raise RequestError("no profile is being recorded")

        def stop() -> None:
            recording.finish()
            self._recording = None

        return self._preparation.call(stop)


def answer_error(error: BaseException) -> JaxserveError:
    """What the front end is told of an error."""
    if isinstance(error, JaxserveError):
        return error
    logger.error("a question failed", exc_info=error)
    return RequestFailedError(f"a question failed: {unforeseen(error)}")
