"""Deliver outputs from the engine's thread to readers, and enforce the deadlines of requests."""

import asyncio
import collections
import dataclasses
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxserve.engine.request_state import RequestState
from jaxserve.errors import DeadlineError, EngineDeadError, JaxserveError, RequestError, RequestFailedError, unforeseen
from jaxserve.metric_types import Metric
from jaxserve.outputs import RequestOutput

logger = logging.getLogger(__name__)


@runtime_checkable
class Readers(Hashable, Protocol):
    """A group of stream readers that can be woken together, such as those of an event loop."""

    def wake(self, streams: Sequence[Any]) -> None:
        """Wake the readers of these streams, which all belong to this group. Thread-safe."""
        ...


@runtime_checkable
class OutputStream(Protocol):
    """Receives a request's outputs from the engine's thread.

    Attributes:
        request: The request, once it is prepared.
        is_cancelled: Set to abort the request before it runs.
    """

    request: RequestState | None
    is_cancelled: bool

    @property
    def readers(self) -> Readers:
        """The group that the stream's reader belongs to."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether the request has new tokens that are not in an output yet."""
        ...

    def offer(self) -> bool:
        """Create the next output if there is room for it; return whether to wake the reader."""
        ...

    def fail(self, error: JaxserveError) -> None:
        """End the stream with an error."""
        ...


@dataclasses.dataclass(frozen=True)
class LoopReaders:
    """Coroutines on an event loop, woken with one call to the loop."""

    loop: asyncio.AbstractEventLoop

    def wake(self, streams: Sequence[Any]) -> None:
        """Wake the readers of these streams. Thread-safe."""
        try:
            self.loop.call_soon_threadsafe(_wake_all, streams)
        except RuntimeError:
            logger.warning("an event loop was closed while %d requests were running", len(streams))


class Stream:
    """Holds at most one output, which the engine's thread puts and a coroutine gets.

    New tokens accumulate in the request until the output is taken, and the next output has all of them. So a slow
    reader does not build up a queue of outputs.

    Args:
        loop: Event loop of the reader.
        with_metrics: Whether outputs have ``metrics``.

    Attributes:
        request: The request, once it is prepared.
        is_cancelled: Set to abort the request before it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, with_metrics: bool):
        self.loop = loop
        self.request: RequestState | None = None
        self.is_cancelled = False
        self._with_metrics = with_metrics
        self._lock = threading.Lock()
        self._is_ready = asyncio.Event()
        self._output: RequestOutput | None = None
        self._is_behind = False
        self._is_finished = False
        self._error: JaxserveError | None = None

    @property
    def readers(self) -> LoopReaders:
        """The readers on the same event loop."""
        return LoopReaders(self.loop)

    def offer(self) -> bool:
        """Create the next output if the previous one has been taken. Call on the engine's thread, between steps.

        Returns:
            Whether to wake the reader.
        """
        request = self.request
        assert request is not None
        with self._lock:
            self._is_finished = request.is_finished()
            if self._output is not None:
                self._is_behind = True
                return False
            self._output = request.next_output(self._with_metrics)
            self._is_behind = False
            return self._output is not None

    @property
    def is_behind(self) -> bool:
        """Whether the request has new tokens that are not in an output yet."""
        return self._is_behind

    def fail(self, error: JaxserveError) -> None:
        """End the stream with an error, after any pending output. Call on the engine's thread."""
        with self._lock:
            self._is_behind = False
            self._error = error

    def wake(self) -> None:
        """Wake the reader. Call on its event loop."""
        self._is_ready.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output. Call on the event loop.

        Raises:
            JaxserveError: The stream failed.
        """
        while True:
            self._is_ready.clear()
            output = self._take()
            if output is not None:
                return output
            await self._is_ready.wait()

    def _take(self) -> RequestOutput | None:
        with self._lock:
            output, self._output = self._output, None
            if output is None and self._error is not None:
                raise self._error
            if self._is_behind and self._is_finished:
                # The engine no longer uses a finished request, so reading it here is safe.
                assert self.request is not None
                self._output = self.request.next_output(self._with_metrics)
                self._is_behind = False
            return output


def wake_readers(streams: Iterable[OutputStream]) -> None:
    """Wake the streams' readers, with one call per group. Thread-safe."""
    by_readers: dict[Readers, list[OutputStream]] = collections.defaultdict(list)
    for stream in streams:
        by_readers[stream.readers].append(stream)
    for readers, woken in by_readers.items():
        readers.wake(woken)


def _wake_all(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.wake()


@runtime_checkable
class StepEngine(Protocol):
    """The methods of ``Engine`` that are not thread-safe."""

    @property
    def num_unfinished(self) -> int:
        """Number of running and waiting requests."""
        ...

    def enqueue(self, request: RequestState) -> None:
        """Add a prepared request."""
        ...

    def step(self) -> list[RequestState]:
        """Run a step; return the requests that it changed."""
        ...

    def abort(self, request: RequestState, /) -> None:
        """Abort a request. Does nothing if it has finished."""
        ...

    def metrics(self) -> list[Metric]:
        """Return the current metrics."""
        ...

    def close(self) -> None:
        """Free the devices' memory."""
        ...


_MIN_DEADLINES = 64  # below this many, deadlines of finished requests are not removed


class OpenStreams:
    """The open streams by request id. Only the engine's thread may use it.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: StepEngine):
        self._engine = engine
        self._by_name: dict[str, OutputStream] = {}
        self._behind: list[OutputStream] = []
        self._deadlines: list[tuple[float, int, OutputStream]] = []
        self._count = itertools.count()

    def enqueue(self, stream: OutputStream, request: RequestState, deadline_s: float | None) -> None:
        """Enqueue a request; if its deadline has passed or the engine rejects it, end its stream with the error."""
        try:
            if deadline_s is not None and deadline_s <= time.monotonic():
                raise _deadline_error(request)
            self._engine.enqueue(request)
        except JaxserveError as error:
            self.refuse(stream, error)
            return
        except Exception as error:
            logger.exception("request %s: failed to enqueue it", request.request_id)
            self.refuse(stream, RequestFailedError(unforeseen(error)))
            return
        self._by_name[request.request_id] = stream
        if stream.is_cancelled:
            self._engine.abort(request)
            self.hand_over([stream])
        elif deadline_s is not None:
            self._add_deadline(stream, deadline_s)

    def refuse(self, stream: OutputStream, error: JaxserveError) -> None:
        """End the stream of a rejected request."""
        stream.fail(error)
        wake_readers([stream])

    def abort(self, request_id: str) -> None:
        """Abort a request; its stream ends with the tokens so far. Unknown ids are ignored."""
        stream = self._by_name.get(request_id)
        if stream is not None and stream.request is not None:
            self._engine.abort(stream.request)
            self.hand_over([stream])

    def drop(self, stream: OutputStream, request: RequestState) -> None:
        """Abort the request of a stream without a reader."""
        if self._remove(stream, request):
            self._engine.abort(request)

    def expire(self) -> None:
        """Abort requests whose deadline has passed."""
        now = time.monotonic()
        expired: list[OutputStream] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            stream = heapq.heappop(self._deadlines)[2]
            request = stream.request
            if request is not None and self._remove(stream, request):
                self._engine.abort(request)
                stream.fail(_deadline_error(request))
                expired.append(stream)
        wake_readers(expired)

    def deliver(self, changed: Iterable[RequestState]) -> None:
        """Deliver a step's outputs, and those that streams had no room for before."""
        found = [self._by_name.get(request.request_id) for request in changed]
        behind, self._behind = self._behind, []
        self.hand_over(dict.fromkeys(stream for stream in [*behind, *found] if stream is not None))

    def hand_over(self, streams: Iterable[OutputStream]) -> None:
        """Offer each stream its next output or its error, and wake the readers."""
        woken: list[OutputStream] = []
        for stream in streams:
            request = stream.request
            assert request is not None
            try:
                failure = request.error
                has_output = stream.offer() if failure is None else False
            except Exception as error:
                logger.exception("request %s: failed to create its output", request.request_id)
                self._engine.abort(request)
                has_output, failure = False, RequestFailedError(unforeseen(error))
            if isinstance(failure, RequestFailedError):
                failure = RequestFailedError(f"request {request.request_id} failed: {failure}")
            if failure is not None:
                stream.fail(failure)
            if has_output or failure is not None:
                woken.append(stream)
            if request.is_finished():
                self._remove(stream, request)
            elif stream.is_behind:
                self._behind.append(stream)
        wake_readers(woken)

    def abort_all(self) -> None:
        """Abort every request; streams end with the tokens so far."""
        streams = list(self._by_name.values())
        for request in [stream.request for stream in streams if stream.request is not None]:
            self._engine.abort(request)
        self.hand_over(streams)
        self._by_name.clear()

    def fail_all(self, error: EngineDeadError) -> None:
        """End every stream with an error."""
        streams = list(self._by_name.values())
        for stream in streams:
            stream.fail(error)
        wake_readers(streams)
        self._by_name.clear()

    def _remove(self, stream: OutputStream, request: RequestState) -> bool:
        """Remove an open stream; return False if it is not open, even if another one has its request id."""
        is_open = self._by_name.get(request.request_id) is stream
        if is_open:
            del self._by_name[request.request_id]
        return is_open

    def _add_deadline(self, stream: OutputStream, deadline_s: float) -> None:
        if len(self._deadlines) > 2 * len(self._by_name) + _MIN_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if self._is_open(entry[2])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, next(self._count), stream))

    def _is_open(self, stream: OutputStream) -> bool:
        return stream.request is not None and self._by_name.get(stream.request.request_id) is stream


def deadline_after(timeout_s: Any) -> float | None:
    """Return the deadline, in seconds of ``time.monotonic()``, for a timeout that starts now; None for no timeout.

    Raises:
        RequestError: The timeout is not a number above 0.
    """
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise RequestError("timeout_s must be None or a number above 0", parameter="timeout_s", value=timeout_s)
    return time.monotonic() + timeout_s


def _deadline_error(request: RequestState) -> DeadlineError:
    elapsed_s = time.monotonic() - request.arrival_s
    num_tokens = sum(sample.sequence.num_output_tokens for sample in request.samples)
    return DeadlineError(f"deadline exceeded {elapsed_s:.3f} s after arrival, with {num_tokens} output tokens")
