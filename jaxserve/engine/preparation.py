"""From a prompt to a running request: tokenize it off the engine's thread, wait for its grammar, submit it."""

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.stream import OutputStream
from jaxserve.errors import SHUT_DOWN, DeadlineError, EngineDeadError
from jaxserve.structured_output.grammars import own_error

T = TypeVar("T")

_NUM_THREADS = 2  # more would only take time from the steps


class Preparation:
    """Prepares requests on threads of its own and submits them to the engine's thread. Any thread may use it.

    Args:
        thread: Runs the requests.
    """

    def __init__(self, thread: EngineThread):
        self._thread = thread
        self._pool = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "jaxserve-prepare")

    def begin(
        self, stream: OutputStream, make: Callable[[], RequestState], deadline_s: float | None = None
    ) -> "concurrent.futures.Future[None]":
        """Prepare a request and submit it.

        Args:
            stream: Gets the request's outputs.
            make: Checks and tokenizes the prompt; called on another thread.
            deadline_s: As in ``EngineThread.submit``.

        Returns:
            A future that is done once the request is submitted, and fails with the error of whatever went wrong before.
            Cancelling it keeps the request from being submitted.
        """
        begun: concurrent.futures.Future[None] = concurrent.futures.Future()

        def prepare() -> None:
            with _errors_to(begun):
                if deadline_s is not None and deadline_s <= time.monotonic():
                    raise DeadlineError("the deadline has passed before the request was prepared")
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
                    raise own_error(error) from error
                if begun.set_running_or_notify_cancel():
                    self._thread.submit(stream, request, deadline_s)
                    begun.set_result(None)

        try:
            self._pool.submit(prepare)
        except RuntimeError:  # the threads have ended
            begun.set_exception(EngineDeadError(SHUT_DOWN))
        return begun

    def call(self, function: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """Run a short function on the same threads.

        Raises:
            RuntimeError: They have ended.
        """
        return self._pool.submit(function)

    def close(self, *, wait: bool) -> None:
        """End the threads: once all begun requests are submitted, or without waiting and without submitting them."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)


@contextlib.contextmanager
def _errors_to(future: "concurrent.futures.Future[None]") -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # a panic in a Rust tokenizer is no Exception
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            future.set_exception(error)
