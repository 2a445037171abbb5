"""The loop that steps an engine on a thread of its own, and feeds streams of outputs."""

import concurrent.futures
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from jaxserve.api.errors import (
    SHUT_DOWN,
    DeadlineError,
    EngineDeadError,
    JaxserveError,
    RequestFailedError,
    unforeseen,
)
from jaxserve.api.turns import SHARED_TURN, FairThreads, Turn
from jaxserve.engine.command_thread import CommandThread
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.stats_log import StatsLogger
from jaxserve.engine.stream import Content, StepEngine, Stream, deadline_error, hand_over
from jaxserve.structured_output.grammars import copy_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_THREADS = 2  # more would only slow the steps down


class Loop(CommandThread):
    """Prepares requests, steps an engine while it has any, and hands outputs to the readers of streams. Thread-safe.

    An output is made when its stream has room for it, or if it is the last; until then tokens stay in the request.

    Args:
        engine: The engine, which only the loop's thread steps from now on.
        stats: Logs statistics periodically; None for no log.
        is_on_demand: Whether to step only while a caller waits for a stream: from ``begin`` or ``want`` to its output.
            Then streams that are open at the end fail; else they end with the tokens so far.
    """

    def __init__(self, engine: StepEngine, stats: StatsLogger | None = None, is_on_demand: bool = False):
        super().__init__("jaxserve-engine", "it was closed" if is_on_demand else "it was shut down")
        self._engine = engine
        self._stats = stats
        self._is_on_demand = is_on_demand
        self._preparing: set[Stream] = set()
        self._open: dict[RequestState, Stream] = {}
        self._wanted: set[Stream] = set()
        self._behind: dict[Stream, RequestState] = {}
        self._next_deadline_s = math.inf
        self._lock = threading.RLock()
        self._drain_until_s: float | None = None
        self._has_ended_streams = threading.Event()
        self._pool = FairThreads(_NUM_THREADS, "jaxserve-prepare")
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return not self._is_stopped and self._drain_until_s is None

    def submit(
        self, stream: Stream, prepare: Callable[[], RequestState], turn: Turn = SHARED_TURN, cost: float = 1.0
    ) -> None:
        """Prepare a request on another thread, wait for its grammar, and queue it.

        Errors end the stream, except the following.

        Args:
            stream: Of the request.
            prepare: Validates and tokenizes the prompt.
            turn: Whose turn the preparation takes.
            cost: What it costs beside that of others.

        Raises:
            EngineDeadError: The engine failed or was shut down.
        """
        with self._lock:
            if not self.is_running:
                raise self._dead()
            self._preparing.add(stream)
            self._pool.submit(self._prepare, stream, prepare, turn=turn, cost=cost)

    def begin(self, streams: Sequence[Stream]) -> None:
        """Queue prepared requests together, and step until each has an output. An error ends all of the streams.

        Raises:
            EngineDeadError: The engine failed or was shut down.
        """
        self._post(lambda: self._begin(streams))

    def want(self, stream: Stream) -> None:
        """Step until the stream has another output.

        Raises:
            EngineDeadError: The engine failed or was shut down.
        """
        self._post(lambda: self._want(stream))

    def refuse(self, stream: Stream, error: BaseException) -> None:
        """End the stream of a request that is not queued, unless it has ended."""
        with self._lock:
            is_first = not stream.has_ended
            stream.has_ended = True
            self._preparing.discard(stream)
        if is_first:
            stream.readers.take([(stream, error)])

    def drop(self, stream: Stream) -> None:
        """End a stream without a reader, and abort its request. Does not block."""
        stream.has_ended = True
        request = stream.request
        if request is not None and not request.is_finished():
            with contextlib.suppress(EngineDeadError):
                self._post(lambda: self._drop(stream, request))

    def drop_all(self, streams: Sequence[Stream]) -> None:
        """Drop streams, and wait until the pages of their requests are free, unless this is the loop's thread."""
        for stream in streams:
            self.drop(stream)
        if not self._is_own_thread:
            with contextlib.suppress(EngineDeadError):
                self.run(lambda: None)

    def abort(self, request_ids: Iterable[str]) -> "concurrent.futures.Future[list[str]]":
        """Abort requests; their streams end with the tokens so far and finish reason ``abort``.

        Returns:
            The ids among these that are of unfinished requests. Once the future is done, the pages of the requests are
            free; those that are still being prepared end before they run.
        """
        wanted = set(request_ids) - {""}  # streams without a name of the caller's

        def abort() -> list[str]:
            preparing = [stream for stream in tuple(self._preparing) if stream.request_id in wanted]
            for stream in preparing:
                stream.is_cancelled = True
            found = {stream: request for request, stream in self._open.items() if request.request_id in wanted}
            self._abort(found)
            return [*(stream.request_id for stream in preparing), *(request.request_id for request in found.values())]

        return self.call(abort)

    def call_aside(
        self, function: Callable[[], T], turn: Turn = SHARED_TURN, cost: float = 1.0
    ) -> "concurrent.futures.Future[T]":
        """Run a short function on the threads that prepare requests; ``turn`` and ``cost`` as for ``submit``.

        Raises:
            EngineDeadError: The engine failed or was shut down.
        """
        try:
            return self._pool.submit(function, turn=turn, cost=cost)
        except RuntimeError:
            raise EngineDeadError(SHUT_DOWN) from None

    def deliver(self, changed: Iterable[RequestState]) -> None:
        """Hand over outputs of requests that a step, or a function passed to ``call``, has changed. On its thread."""
        streams, self._behind = self._behind, {}
        for request in changed:
            stream = self._open.get(request)
            if stream is not None and (not stream.is_read_whole or request.is_finished()):
                streams[stream] = request
        self._offer(streams)

    def stop(self, drain_s: float = 0.0) -> None:
        """Stop accepting requests, wait up to ``drain_s`` seconds for in-flight ones, abort the rest, end the thread.

        Streams of aborted requests end with the tokens so far and finish reason ``abort``. May be called again, with a
        shorter ``drain_s`` taking effect.
        """
        with self._lock:
            until_s = time.monotonic() + drain_s
            self._drain_until_s = until_s if self._drain_until_s is None else min(until_s, self._drain_until_s)
        self._inbox.put(lambda: None)  # wakes the thread
        if not self._is_own_thread:
            self._thread.join()

    def join_preparation(self) -> None:
        """Wait for the threads that prepare requests to end, once the loop has stopped."""
        self._pool.shutdown()

    def wait_ended(self) -> None:
        """Block until every stream has ended because the engine failed or was stopped; devices may not be freed yet."""
        self._has_ended_streams.wait()

    # ---------------------------------------------------------------- other threads

    def _prepare(self, stream: Stream, prepare: Callable[[], RequestState]) -> None:
        """Prepare a request, and queue it once its grammar is compiled."""
        try:
            if stream.has_ended:
                raise concurrent.futures.CancelledError
            if stream.deadline_s is not None and stream.deadline_s <= time.monotonic():
                raise DeadlineError("deadline exceeded before the request was prepared")
            request = stream.request = prepare()
        except BaseException as error:  # a panic in a Rust tokenizer is a BaseException
            self.refuse(stream, error)
            return
        if request.grammar is None:
            self._post_prepared(stream)
        else:
            request.grammar.add_done_callback(lambda grammar: self._post_prepared(stream, grammar.exception()))

    def _post_prepared(self, stream: Stream, error: BaseException | None = None) -> None:
        """Queue a request, or end its stream because its grammar is invalid or the engine stops."""
        with self._lock:
            if self.is_running and error is None:
                self._inbox.put(lambda: self._enqueue(stream))
                return
        if self.is_running and error is not None:
            failure = copy_error(error)
            failure.__cause__ = error
        else:
            failure = self._dead()
        self.refuse(stream, failure)

    # ---------------------------------------------------------------- the loop's thread

    def _run(self) -> None:
        """Run the thread until ``stop`` is called or the engine fails."""
        try:
            while self._drain_until_s is None or self._may_go_on(self._drain_until_s):
                timeout_s = None if self._stats is None else self._stats.wait_s()
                command = self._next_command(not self._can_step(), timeout_s)
                if command is not None:
                    command()
                    self.num_done += 1
                    continue
                if self._next_deadline_s <= (now := time.monotonic()):
                    self._expire(now)
                if self._can_step():
                    self.deliver(self._engine.step())
                    self.num_done += 1
                if self._stats is not None and self._stats.is_due():
                    self._stats.log(self._engine.metrics())
        except BaseException as error:
            # An EngineDeadError has the first failure as its cause.
            self.failure = error.__cause__ or error
            logger.exception("the engine stopped")
        finally:
            self._end()

    def _may_go_on(self, drain_until_s: float) -> bool:
        """Whether the loop, which was told to stop, still drains."""
        has_work = self._engine.num_unfinished > 0 or not self._inbox.empty()
        return has_work and not self._is_on_demand and time.monotonic() < drain_until_s

    def _can_step(self) -> bool:
        """Whether there is a request and, on demand, a caller that waits for an output."""
        return self._engine.num_unfinished > 0 and (not self._is_on_demand or bool(self._wanted))

    def _begin(self, streams: Sequence[Stream]) -> None:
        """Queue prepared requests, whose outputs are waited for; if one cannot be queued, end all streams."""
        try:
            if self._is_stopped:
                raise self._dead()
            for stream in streams:
                self._open_stream(stream)
            self._wanted.update(streams)
        except BaseException as error:  # a caller waits for the streams, whatever happens
            for stream in streams:
                self.refuse(stream, error)

    def _want(self, stream: Stream) -> None:
        if not stream.has_ended:
            self._wanted.add(stream)

    def _open_stream(self, stream: Stream) -> None:
        """Queue the request of a stream."""
        assert stream.request is not None
        self._engine.enqueue(stream.request)
        self._open[stream.request] = stream
        if self._stats is not None:
            self._stats.resume()

    def _enqueue(self, stream: Stream) -> None:
        """Queue a prepared request; if its deadline has passed or the engine rejects it, end its stream."""
        request, deadline_s = stream.request, stream.deadline_s
        assert request is not None
        self._preparing.discard(stream)
        if stream.has_ended:
            return
        try:
            if self._is_stopped:
                raise self._dead()
            if deadline_s is not None and deadline_s <= time.monotonic():
                raise deadline_error(request)
            self._open_stream(stream)
        except JaxserveError as error:
            self.refuse(stream, error)
            return
        except Exception as error:
            logger.exception("request %s: failed to enqueue it", request.request_id)
            self.refuse(stream, RequestFailedError(unforeseen(error)))
            return
        if stream.is_cancelled:
            self._abort({stream: request})
        elif deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, deadline_s)

    def _abort(self, streams: Mapping[Stream, RequestState]) -> None:
        """Abort the requests of open streams, and hand over their last outputs."""
        for request in streams.values():
            self._engine.abort(request)
        self._offer(streams)

    def _drop(self, stream: Stream, request: RequestState) -> None:
        """Abort the request of a stream without a reader, if it was queued."""
        if request in self._open:
            self._close(stream, request)
            self._engine.abort(request)

    def _expire(self, now: float) -> None:
        """Abort requests whose deadline has passed."""
        failed: list[tuple[Stream, Content]] = []
        for request, stream in [*self._open.items()]:
            if stream.deadline_s is not None and stream.deadline_s <= now:
                self._engine.abort(request)
                self._close(stream, request)
                failed.append((stream, deadline_error(request)))
        self._next_deadline_s = min((one.deadline_s or math.inf for one in self._open.values()), default=math.inf)
        hand_over(failed)

    def _offer(self, streams: Mapping[Stream, RequestState]) -> None:
        """Hand the next output or the error of each stream to its readers."""
        found = ((stream, self._next_content(stream, request)) for stream, request in streams.items())
        hand_over((stream, content) for stream, content in found if content is not None)

    def _next_content(self, stream: Stream, request: RequestState) -> Content | None:
        """Return the next output or the error of a stream, if there is one and room for it."""
        is_last = request.is_finished()
        if stream.has_ended:  # it is being dropped
            if is_last:
                self._close(stream, request)
            return None
        if not is_last and not stream.has_room:
            self._behind[stream] = request
            return None
        content = self._make_content(request, stream.metrics == "all" or (is_last and stream.metrics == "last"))
        if is_last or isinstance(content, BaseException):
            self._close(stream, request)
        elif content is not None:
            self._wanted.discard(stream)
        return content

    def _make_content(self, request: RequestState, with_metrics: bool) -> Content | None:
        """Return the error or the next output of a request, if there is one; abort it if its output cannot be made."""
        if request.error is None:
            try:
                return request.next_output(with_metrics)
            except Exception as error:
                logger.exception("request %s: failed to create its output", request.request_id)
                request.error = RequestFailedError(unforeseen(error))
                self._engine.abort(request)
        if isinstance(request.error, RequestFailedError):
            return RequestFailedError(f"request {request.request_id} failed: {request.error}")
        return request.error

    def _close(self, stream: Stream, request: RequestState) -> None:
        """End an open stream."""
        stream.has_ended = True
        self._wanted.discard(stream)
        self._open.pop(request, None)

    def _end(self) -> None:
        """End all streams, run the remaining commands, and free the devices."""
        with self._lock:
            self._is_stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            if self.failure is None and not self._is_on_demand:
                self._abort({stream: request for request, stream in self._open.items()})
        except Exception as error:
            self.failure = error
        for stream in [*self._open.values(), *tuple(self._preparing)]:
            self.refuse(stream, self._dead())
        self._open.clear()
        self._run_leftovers()
        self._has_ended_streams.set()
        try:
            self._engine.close()
        except Exception:
            logger.exception("failed to close the engine")
        self.is_idle = True
