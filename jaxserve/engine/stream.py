"""What the loop stands between: an engine, and streams of outputs to readers."""

import collections
import dataclasses
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from jaxserve.api.errors import RequestError
from jaxserve.api.metric_types import Metric
from jaxserve.api.outputs import RequestOutput
from jaxserve.engine.request_state import RequestState


@runtime_checkable
class Readers(Hashable, Protocol):
    """A group of readers that can be woken together, such as those of an event loop."""

    def wake(self, sinks: Sequence[Any]) -> None:
        """Wake the readers of these sinks, which all belong to this group. Thread-safe."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Takes the outputs of a stream. Any thread may use it."""

    @property
    def readers(self) -> Readers:
        """The group that the reader belongs to."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether to make the next output; until then tokens stay in the request. The last output needs no room."""
        ...

    def put(self, content: RequestOutput | BaseException) -> None:
        """Take the next output, or the error that ends the stream."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Stream:
    """A request on its way through the loop.

    Attributes:
        sink: Takes its outputs.
        request_id: Name of the request, if the caller gives it one; for aborts before it is prepared.
        deadline_s: Time, in seconds of ``time.monotonic()``, at which it fails, waiting or running; None for never.
        metrics: Which outputs have ``metrics``.
        request: The request, once it is prepared.
        is_cancelled: Whether it is to be aborted before it runs.
        has_ended: Whether the sink gets nothing more.
        is_read_whole: Whether only the last output is made.
    """

    sink: Sink
    request_id: str = ""
    deadline_s: float | None = None
    metrics: Literal["all", "last", "none"] = "none"
    request: RequestState | None = None
    is_cancelled: bool = False
    has_ended: bool = False
    is_read_whole: bool = False


@runtime_checkable
class StepEngine(Protocol):
    """The methods of ``Engine`` that the loop calls on its thread."""

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


def wake_readers(streams: Iterable[Stream]) -> None:
    """Wake the readers of streams, with one call per group."""
    by_readers: dict[Readers, list[Sink]] = collections.defaultdict(list)
    for stream in streams:
        by_readers[stream.sink.readers].append(stream.sink)
    for readers, sinks in by_readers.items():
        readers.wake(sinks)
