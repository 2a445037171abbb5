"""Delivers one request's outputs from the engine's thread to the reader."""

import asyncio
import collections
import dataclasses
import logging
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxserve.engine.request_state import RequestState
from jaxserve.errors import JaxserveError
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
