"""Prepare requests off the engine's thread: tokenize the prompt, wait for the grammar, submit."""

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.stream import OutputStream
from jaxserve.errors import SHUT_DOWN, DeadlineError, EngineDeadError
from jaxserve.structured_output.grammars import copy_error

T = TypeVar("T")

_NUM_THREADS = 2  # more would only slow the steps down


class Preparation:
    """Prepares requests on its own threads and submits them to the engine's thread. Thread-safe.

    Args:
        thread: The engine's thread.
    """

    def __init__(self, thread: EngineThread):
        self._thread = thread
        self._pool = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "jaxserve-prepare")

    def begin(
        self, stream: OutputStream, make: Callable[[], RequestState], deadline_s: float | None = None
    ) -> "concurrent.futures.Future[None]":
        """Prepare a request and submit it.

        Args:
            stream: Receives the request's outputs.
            make: Validates and tokenizes the prompt; called on another thread.
            deadline_s: As in ``EngineThread.submit``.

        Returns:
            A future that is done once the request is submitted, and fails if it cannot be. Cancelling it prevents the
            submission.
        """
        begun: concurrent.futures.Future[None] = concurrent.futures.Future()

        def prepare() -> None:
            with _errors_to(begun):
                if deadline_s is not None and deadline_s <= time.monotonic():
                    raise DeadlineError("deadline exceeded before the request was prepared")
                request = make()
                if request.grammar is None:
                    submit(request)
                else:
                    request.grammar.add_done_callback(lambda _: submit(request))

        def submit(request: RequestState) -> None:
            with _errors_to(begun):
                error = None if request.grammar is None else request.grammar.exception()
                if error is not None:
                    self._thread.check_alive()
                    raise copy_error(error) from error
                if begun.set_running_or_notify_cancel():
                    self._thread.submit(stream, request, deadline_s)
                    begun.set_result(None)

        try:
            self._pool.submit(prepare)
        except RuntimeError:  # the pool is shut down
            begun.set_exception(EngineDeadError(SHUT_DOWN))
        return begun

    def call(self, function: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """Run a short function on the same threads.

        Raises:
            RuntimeError: The threads have ended.
        """
        return self._pool.submit(function)

    def close(self, *, wait: bool) -> None:
        """End the threads, after submitting all requests if ``wait``; else drop those not yet submitted."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)


@contextlib.contextmanager
def _errors_to(future: "concurrent.futures.Future[None]") -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # a panic in a Rust tokenizer is a BaseException
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # the future was cancelled
            future.set_exception(error)
