"""Delivers outputs from the engine's thread to readers, and enforces the deadlines of open streams."""

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
    """Where streams are read; those of one place are woken together."""

    def wake(self, streams: Sequence[Any]) -> None:
        """Lets the readers of these streams, all read here, look again. On any thread."""
        ...


@runtime_checkable
class OutputStream(Protocol):
    """Where the engine's thread puts a request's outputs.

    Attributes:
        request: The request, once it is prepared.
        is_cancelled: Set where the request is aborted before it runs.
    """

    request: RequestState | None
    is_cancelled: bool

    @property
    def readers(self) -> Readers:
        """Who is to be woken."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether the request has a delta that is not in an output yet."""
        ...

    def offer(self) -> bool:
        """Makes the next output if there is room for it; returns whether the reader is to be woken."""
        ...

    def fail(self, error: JaxserveError) -> None:
        """Ends the stream with an error."""
        ...


@dataclasses.dataclass(frozen=True)
class LoopReaders:
    """Coroutines on an event loop, each woken by one call to the loop for all of them."""

    loop: asyncio.AbstractEventLoop

    def wake(self, streams: Sequence[Any]) -> None:
        """Lets the readers of these streams look again. On any thread."""
        try:
            self.loop.call_soon_threadsafe(_wake_all, streams)
        except RuntimeError:
            logger.warning("an event loop was closed with %d requests running", len(streams))


class Stream:
    """A slot with at most one output, which the engine's thread fills and a coroutine empties.

    While the slot is full nothing is made: what comes meanwhile stays in the request, and the next output has all of
    it. So a slow reader costs no more than the text itself, and nothing is lost or comes out of order.

    Args:
        loop: The reader's event loop.
        with_metrics: Whether outputs carry the request's times.

    Attributes:
        request: The request, once it is prepared.
        is_cancelled: Set where the request is aborted before it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, with_metrics: bool):
        self.loop = loop
        self.request: RequestState | None = None
        self.is_cancelled = False
        self._with_metrics = with_metrics
        self._lock = threading.Lock()
        self._news = asyncio.Event()
        self._output: RequestOutput | None = None
        self._is_behind = False
        self._is_over = False
        self._error: JaxserveError | None = None

    @property
    def readers(self) -> LoopReaders:
        """Who is to be woken."""
        return LoopReaders(self.loop)

    def offer(self) -> bool:
        """Makes the next output if the slot is empty. On the engine's thread, between steps.

        Returns:
            Whether the reader is to be woken.
        """
        request = self.request
        assert request is not None
        with self._lock:
            self._is_over = request.is_finished()
            if self._output is not None:
                self._is_behind = True
                return False
            self._output = request.next_output(self._with_metrics)
            self._is_behind = False
            return self._output is not None

    @property
    def is_behind(self) -> bool:
        """Whether the request has a delta that is not in an output yet."""
        return self._is_behind

    def fail(self, error: JaxserveError) -> None:
        """Ends the stream: the reader gets what is in the slot and then the error. On the engine's thread."""
        with self._lock:
            self._is_behind = False
            self._error = error

    def wake(self) -> None:
        """Lets the reader look again. On its event loop."""
        self._news.set()

    async def get(self) -> RequestOutput:
        """The next output, once there is one. On the event loop.

        Raises:
            JaxserveError: The stream failed.
        """
        while True:
            self._news.clear()
            output = self._take()
            if output is not None:
                return output
            await self._news.wait()

    def _take(self) -> RequestOutput | None:
        with self._lock:
            output, self._output = self._output, None
            if output is None and self._error is not None:
                raise self._error
            if self._is_behind and self._is_over:
                # The engine has done with the request, so only the reader accesses it from here on.
                assert self.request is not None
                self._output = self.request.next_output(self._with_metrics)
                self._is_behind = False
            return output


def wake_readers(streams: Iterable[OutputStream]) -> None:
    """Lets the streams' readers look again, with one call to each place where they are. On any thread."""
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
    """The part of ``Engine`` that belongs to one thread."""

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        ...

    def enqueue(self, request: RequestState) -> None:
        """Takes a prepared request."""
        ...

    def step(self) -> list[RequestState]:
        """Runs a step; returns the requests that it changed."""
        ...

    def abort(self, request: RequestState) -> None:
        """Ends a request; without effect on one that has ended."""
        ...

    def metrics(self) -> list[Metric]:
        """The numbers of this moment."""
        ...

    def close(self) -> None:
        """Frees the devices."""
        ...


_MIN_DEADLINES = 64  # below this many, deadlines of finished requests are not removed


class OpenStreams:
    """Streams by the names of their requests. The engine's thread alone uses it.

    Args:
        engine: Runs the requests.
    """

    def __init__(self, engine: StepEngine):
        self._engine = engine
        self._by_name: dict[str, OutputStream] = {}
        self._behind: list[OutputStream] = []
        self._deadlines: list[tuple[float, int, OutputStream]] = []
        self._count = itertools.count()

    def enqueue(self, stream: OutputStream, request: RequestState, deadline_s: float | None) -> None:
        """Lets a request run, unless it is too late for it or the engine refuses it; the stream then says so."""
        try:
            if deadline_s is not None and deadline_s <= time.monotonic():
                raise _late(request)
            self._engine.enqueue(request)
        except JaxserveError as error:
            self.refuse(stream, error)
            return
        self._by_name[request.request_id] = stream
        if stream.is_cancelled:
            self._engine.abort(request)
            self.hand_over([stream])
        elif deadline_s is not None:
            self._note_deadline(stream, deadline_s)

    def refuse(self, stream: OutputStream, error: JaxserveError) -> None:
        """Ends the stream of a request that does not run."""
        stream.fail(error)
        wake_readers([stream])

    def abort(self, request_id: str) -> None:
        """Abort a request; its stream ends with the tokens so far. Does nothing for an unknown name."""
        stream = self._by_name.get(request_id)
        if stream is not None and stream.request is not None:
            self._engine.abort(stream.request)
            self.hand_over([stream])

    def drop(self, stream: OutputStream, request: RequestState) -> None:
        """Abort the request of a stream without a reader."""
        if self._forget(stream, request):
            self._engine.abort(request)

    def end_late(self) -> None:
        """Ends requests whose deadline has passed."""
        now = time.monotonic()
        late: list[OutputStream] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            stream = heapq.heappop(self._deadlines)[2]
            request = stream.request
            if request is not None and self._forget(stream, request):
                self._engine.abort(request)
                stream.fail(_late(request))
                late.append(stream)
        wake_readers(late)

    def deliver(self, changed: Iterable[RequestState]) -> None:
        """Hands over what a step gave, and what streams had no room for before."""
        found = [self._by_name.get(request.request_id) for request in changed]
        behind, self._behind = self._behind, []
        self.hand_over(dict.fromkeys(stream for stream in [*behind, *found] if stream is not None))

    def hand_over(self, streams: Iterable[OutputStream]) -> None:
        """Offer each stream its request's delta, and wake the readers, each event loop once."""
        woken: list[OutputStream] = []
        for stream in streams:
            request = stream.request
            assert request is not None
            try:
                failure = request.error
                has_news = stream.offer() if failure is None else False
            except Exception as error:
                logger.exception("request %s: no output could be made", request.request_id)
                self._engine.abort(request)
                has_news, failure = False, unforeseen(error)
            if failure is not None:
                stream.fail(RequestFailedError(f"request {request.request_id} failed: {failure}"))
            if has_news or failure is not None:
                woken.append(stream)
            if request.is_finished():
                self._forget(stream, request)
            elif stream.is_behind:
                self._behind.append(stream)
        wake_readers(woken)

    def end_all(self) -> None:
        """Abort every request; streams end with the tokens so far."""
        streams = list(self._by_name.values())
        for request in [stream.request for stream in streams if stream.request is not None]:
            self._engine.abort(request)
        self.hand_over(streams)
        self._by_name.clear()

    def fail_all(self, error: EngineDeadError) -> None:
        """Ends every stream with an error."""
        streams = list(self._by_name.values())
        for stream in streams:
            stream.fail(error)
        wake_readers(streams)
        self._by_name.clear()

    def _forget(self, stream: OutputStream, request: RequestState) -> bool:
        """Takes a stream off the list; returns whether it was there, and not another of the same name."""
        is_there = self._by_name.get(request.request_id) is stream
        if is_there:
            del self._by_name[request.request_id]
        return is_there

    def _note_deadline(self, stream: OutputStream, deadline_s: float) -> None:
        if len(self._deadlines) > 2 * len(self._by_name) + _MIN_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if self._is_open(entry[2])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, next(self._count), stream))

    def _is_open(self, stream: OutputStream) -> bool:
        return stream.request is not None and self._by_name.get(stream.request.request_id) is stream


def deadline_after(timeout_s: Any) -> float | None:
    """Return the time of ``time.monotonic()`` at which a limit in seconds ends; None without a limit.

    Raises:
        RequestError: Not a number above 0.
    """
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise RequestError("timeout_s must be None or seconds above 0", parameter="timeout_s", value=timeout_s)
    return time.monotonic() + timeout_s


def _late(request: RequestState) -> DeadlineError:
    passed_s = time.monotonic() - request.arrival_s
    num_tokens = sum(sample.sequence.num_output_tokens for sample in request.samples)
    return DeadlineError(f"the deadline has passed, {passed_s:.3f} s after the request came and {num_tokens} tokens")


logger = logging.getLogger(__name__)
