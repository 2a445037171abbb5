"""The thread that steps an engine, and the thread-safe calls into it. No other thread may use the engine."""

import collections
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from jaxserve.engine.request_state import RequestState
from jaxserve.engine.stats_log import StatsLogger
from jaxserve.engine.stream import OpenStreams, OutputStream, StepEngine
from jaxserve.errors import EngineDeadError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineThread:
    """Steps an engine while it has requests, and delivers outputs to streams.

    Args:
        engine: The engine, which only this thread uses from now on.
        stats: Logs statistics periodically; None for no log.
    """

    def __init__(self, engine: StepEngine, stats: StatsLogger | None = None):
        self._engine = engine
        self._stats = stats
        self._streams = OpenStreams(engine)
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._wakeup = threading.Condition()
        self._drain_until_s: float | None = None
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._has_ended_streams = threading.Event()
        self._num_done = 0
        self._is_idle = False
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the engine; None if it runs or was shut down."""
        return self._failure

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return not self._is_stopped and self._drain_until_s is None

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting requests."""
        return self._engine.num_unfinished

    @property
    def num_done(self) -> int:
        """Number of steps and commands so far; grows while the engine makes progress."""
        return self._num_done

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no work, so that ``num_done`` need not grow."""
        return self._is_idle

    def check_alive(self) -> None:
        """Raise an error unless the engine accepts requests.

        Raises:
            EngineDeadError: The engine failed or was shut down.
        """
        if not self.is_running:
            raise self._dead()

    def submit(self, stream: OutputStream, request: RequestState, deadline_s: float | None = None) -> None:
        """Submit a prepared request.

        Args:
            stream: Receives the outputs, or the error.
            request: The request.
            deadline_s: Time, in seconds of ``time.monotonic()``, after which the request fails with a
                ``DeadlineError``, waiting or running; None for no deadline.

        Raises:
            EngineDeadError: The engine failed or was shut down.
        """
        stream.request = request
        with self._wakeup:
            self.check_alive()
            self._post(lambda: self._enqueue(stream, request, deadline_s))

    def drop(self, stream: OutputStream) -> None:
        """Abort the request of a stream without a reader, even before it is submitted. Does not block."""
        stream.is_cancelled = True
        request = stream.request
        if request is not None and not request.is_finished():
            self._post(lambda: self._streams.drop(stream, request))

    def abort(self, request_ids: Iterable[str]) -> "concurrent.futures.Future[None]":
        """Abort requests; their streams end with the tokens so far and finish reason ``abort``.

        Unknown ids are ignored.
        """
        wanted = list(request_ids)

        def abort() -> None:
            for request_id in wanted:
                self._streams.abort(request_id)

        return self.call(abort)

    def call(self, function: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """Run a function on the engine's thread, between two steps.

        Raises:
            EngineDeadError: The engine failed or was shut down.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._is_stopped:
                    raise self._dead()
                future.set_result(function())
            except BaseException as error:  # a caller waits for the future, whatever happens
                future.set_exception(error)
                if isinstance(error, EngineDeadError) and not self._is_stopped:
                    raise  # the function has stopped the engine

        if not self._post(run):
            raise self._dead()
        return future

    def deliver(self, changed: Iterable[RequestState]) -> None:
        """Deliver outputs of requests that a function passed to ``call`` has changed; call it in that function."""
        self._streams.deliver(changed)

    def stop(self, drain_s: float = 0.0) -> None:
        """Stop accepting requests, wait up to ``drain_s`` seconds for in-flight ones, abort the rest, end the thread.

        Streams of aborted requests end with the tokens so far and finish reason ``abort``. May be called again, with a
        shorter ``drain_s`` taking effect.
        """
        with self._wakeup:
            until_s = time.monotonic() + drain_s
            self._drain_until_s = until_s if self._drain_until_s is None else min(until_s, self._drain_until_s)
            self._wakeup.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def wait_ended(self) -> None:
        """Block until every stream has ended because the engine failed or was stopped; devices may not be freed yet."""
        self._has_ended_streams.wait()

    def _post(self, command: Callable[[], None]) -> bool:
        """Queue a command for the thread; return False if the thread has ended."""
        with self._wakeup:
            if not self._is_stopped:
                self._inbox.append(command)
                self._wakeup.notify()
            return not self._is_stopped

    def _dead(self) -> EngineDeadError:
        error = EngineDeadError(f"the engine stopped: {self._failure or 'it was shut down'}")
        error.__cause__ = self._failure
        return error

    def _run(self) -> None:
        """Run the thread until ``stop`` is called or the engine fails."""
        try:
            while self._wait_for_work():
                while self._inbox:
                    self._inbox.popleft()()
                    self._num_done += 1
                self._streams.expire()
                if self._engine.num_unfinished:
                    self._streams.deliver(self._step())
                    self._num_done += 1
                    self._log()
        except BaseException as error:
            # An EngineDeadError has the first failure as its cause.
            self._failure = error.__cause__ or error
            logger.exception("the engine stopped")
        finally:
            self._end()

    def _step(self) -> list[RequestState]:
        """Run a step. After an interrupt or an exit in the middle of one, the next step fails its requests."""
        try:
            return self._engine.step()
        except Exception:
            raise
        except BaseException:
            logger.exception("a step was interrupted")
            return []

    def _wait_for_work(self) -> bool:
        """Block while there is no work; return whether to continue."""
        with self._wakeup:
            while not self._inbox and not self._engine.num_unfinished and self._drain_until_s is None:
                is_quiet = self._stats is None or self._stats.is_quiet
                self._is_idle = True
                self._wakeup.wait(None if is_quiet or self._stats is None else max(self._stats.remaining_s(), 0.0))
                self._is_idle = False
                self._log()
            if self._stats is not None:
                self._stats.resume()
            if self._drain_until_s is None:
                return True
            return bool(self._engine.num_unfinished or self._inbox) and time.monotonic() < self._drain_until_s

    def _log(self) -> None:
        if self._stats is not None and self._stats.is_due():
            self._stats.log(self._engine.metrics())

    def _enqueue(self, stream: OutputStream, request: RequestState, deadline_s: float | None) -> None:
        if self._is_stopped:
            self._streams.refuse(stream, self._dead())
        else:
            self._streams.enqueue(stream, request, deadline_s)

    def _end(self) -> None:
        """End all streams, run the remaining commands, and free the devices."""
        with self._wakeup:
            self._is_stopped = True
        try:
            if self._failure is None:
                self._streams.abort_all()
        except Exception as error:
            self._failure = error
        if self._failure is not None:
            self._streams.fail_all(self._dead())
        while self._inbox:
            self._inbox.popleft()()
        self._has_ended_streams.set()
        try:
            self._engine.close()
        except Exception:
            logger.exception("failed to close the engine")
        self._is_idle = True
