"""Control methods: what the front end asks the engine process besides running requests."""

import concurrent.futures
import logging
import os
import tempfile
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxserve.api.errors import RequestError, RequestFailedError
from jaxserve.api.turns import SHARED_TURN, Turn
from jaxserve.engine.loop import Loop
from jaxserve.engine.metrics import PREFIX
from jaxserve.engine.startup import StartedEngine
from jaxserve.group.facts import model_files
from jaxserve.server.converted_tokens import check_converted
from sharding import LAYOUTS

logger = logging.getLogger(__name__)

_MAX_MOVES = 4  # all but one are refused
_TEXT_OF_ONE = 4096  # characters, which take as long as all else
Future = concurrent.futures.Future[Any]


class Queries:
    """Calls control methods by name.

    Args:
        started: The engine.
        loop: Runs the engine.
        chat_template: The source of the server's own chat template, if it has one.
        reshard: Moves the engine to a mesh and a layout; returns what was done and the engine's new description.
    """

    def __init__(
        self,
        started: StartedEngine,
        loop: Loop,
        chat_template: str | None,
        reshard: Callable[[str | None, str | None], Any],
    ):
        self._started = started
        self._loop = loop
        self._chat_template = chat_template
        self._move = reshard
        self._moves = concurrent.futures.ThreadPoolExecutor(_MAX_MOVES, "jaxserve-reshard")
        self._recording: ProfileRecording | None = None
        self._methods: dict[str, Callable[..., Future]] = {
            "abort": loop.abort,
            "detokenize": self._detokenize,
            "metrics": self._metrics,
            "model_files": self._model_files,
            "reshard": self._reshard,
            "reset_prefix_cache": self._reset_prefix_cache,
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
            "tokenize": self._tokenize,
            "tokenizer_info": self._tokenizer_info,
        }

    def call(self, method: str, arguments: Mapping[str, Any]) -> Future:
        """Call a method; the future has its result or its error."""
        try:
            if method not in self._methods:
                raise RequestError(f"unknown control method {method!r}")
            return self._methods[method](**arguments)
        except Exception as error:
            failed: Future = concurrent.futures.Future()
            failed.set_exception(error)
            return failed

    def _tokenize(self, text: str, add_special_tokens: bool, with_strings: bool, turn: Turn = SHARED_TURN) -> Future:
        tokenizer = self._started.tokenizer

        def tokenize() -> tuple[bytes, list[str]]:
            token_ids = tokenizer.encode(text, add_special_tokens)
            if with_strings:
                check_converted("return_token_strs", len(token_ids))
            strings = [tokenizer.id_to_token(token) or "" for token in token_ids] if with_strings else []
            return array("i", token_ids).tobytes(), strings

        return self._loop.call_aside(tokenize, turn, text_cost(text))

    def _detokenize(self, token_ids: list[int], skip_special_tokens: bool, turn: Turn = SHARED_TURN) -> Future:
        tokenizer = self._started.tokenizer
        vocab_size = self._started.plan.config.vocab_size
        outside = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if outside is not None:
            message = f"token id {outside} is out of vocabulary; expected ids from 0 to {vocab_size - 1}"
            raise RequestError(message, parameter="tokens", value=outside)
        return self._loop.call_aside(lambda: tokenizer.decode(token_ids, skip_special_tokens), turn)

    def _tokenizer_info(self) -> Future:
        tokenizer = self._started.tokenizer
        return self._loop.call_aside(lambda: tokenizer.info(self._chat_template))

    def _metrics(self) -> Future:
        metrics: Future = concurrent.futures.Future()
        leader = self._started.leader
        others = [] if leader is None else leader.metrics(PREFIX)
        metrics.set_result([*self._started.engine.metrics(), *others])
        return metrics

    def _model_files(self) -> Future:
        return self._loop.call_aside(lambda: model_files(self._started.plan.directory))

    def _reset_prefix_cache(self) -> Future:
        return self._loop.call(self._started.engine.reset_prefix_cache)

    def _reshard(self, mesh: str | None, layout: str | None) -> Future:
        """Move the engine, on another thread because compiling takes long."""
        if layout is not None and layout not in LAYOUTS:  # no file of the server is run for a client
            raise RequestError(f"expected one of {', '.join(LAYOUTS)}", parameter="layout", value=layout)

        def move() -> Any:
            try:
                return self._move(mesh, layout)
            except ValueError as error:  # a mesh or layout that cannot be
                raise RequestError(str(error)) from error

        return self._moves.submit(move)

    def _start_profile(self, directory: str) -> Future:
        if self._recording is not None:
            raise RequestError("a profile is being recorded already")
        self._recording = recording = ProfileRecording(directory)

        def start() -> None:
            try:
                recording.begin()
            except RequestFailedError:
                self._recording = None
                raise

        return self._loop.call_aside(start)

    def _stop_profile(self) -> Future:
        recording = self._recording
        if recording is None:
            raise RequestError("no profile is being recorded")

        def stop() -> None:
            recording.finish()
            self._recording = None

        return self._loop.call_aside(stop)


def text_cost(text: str | None) -> float:
    """Return what it costs to tokenize a text beside a short one."""
    return 1.0 + len(text or "") / _TEXT_OF_ONE


class ProfileRecording:
    """A profile that JAX records from ``begin`` to ``finish``, one at a time.

    Args:
        directory: The folder of its files; created if it does not exist.
    """

    def __init__(self, directory: str):
        self._directory = directory
        self._session: Any = None

    def begin(self) -> None:
        """Start to record.

        Raises:
            RequestFailedError: The directory is not writable (JAX would say so only at the end), or JAX cannot record.
        """
        directory = self._directory
        try:
            os.makedirs(directory, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            message = f"cannot record a profile: directory {directory!r} is not writable: {error.strerror}"
            raise RequestFailedError(message) from error
        try:
            self._session = jax.profiler.start_trace(directory)
        except Exception as error:
            logger.exception("cannot record a profile")
            raise RequestFailedError("cannot record a profile; see the server's log") from error

    def finish(self) -> None:
        """Stop recording and write the profile.

        Raises:
            RequestFailedError: The profile cannot be written; ``finish`` may be called again.
        """
        # JAX 0.12 and later return a session, which ends even if it cannot be written. Earlier versions return none,
        # and their recording goes on until it is written.
        session = self._session
        try:
            if session is None or session.is_running:
                jax.profiler.stop_trace()
            else:
                session.export_profile_data(self._directory)
        except Exception as error:
            logger.exception("the profile cannot be written")
            raise RequestFailedError("the profile cannot be written; the log says why") from error
