"""The streams of running requests: delivers the deltas of each step, and enforces deadlines."""

import heapq
import itertools
import logging
import time
from collections.abc import Iterable
from typing import Any

from jaxserve.engine.request_state import RequestState
from jaxserve.engine.step_engine import StepEngine
from jaxserve.engine.stream import OutputStream, wake_readers
from jaxserve.errors import DeadlineError, EngineDeadError, JaxserveError, RequestError, RequestFailedError, unforeseen

logger = logging.getLogger(__name__)

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
