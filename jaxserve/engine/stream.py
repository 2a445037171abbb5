"""What the loop stands between: an engine, and streams of outputs to readers."""

import abc
import collections
import dataclasses
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from jaxserve.api.errors import DeadlineError, RequestError
from jaxserve.api.metric_types import Metric
from jaxserve.api.outputs import RequestOutput
from jaxserve.engine.request_state import RequestState

Content = RequestOutput | BaseException
"""An output of a stream, or the error that ends it."""


@runtime_checkable
class Readers(Hashable, Protocol):
    """A group of readers that get outputs together, such as those of an event loop."""

    def take(self, contents: Sequence[tuple[Any, Content]]) -> None:
        """Take outputs and errors, each with its stream of this group, and wake their readers. Thread-safe."""
        ...


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Stream(abc.ABC):
    """A request on its way through the loop; subclasses say where its outputs go.

    Attributes:
        request_id: Name of the request, if the caller gives it one; for aborts before it is prepared.
        deadline_s: Time, in seconds of ``time.monotonic()``, at which it fails, waiting or running; None for never.
        metrics: Which outputs have ``metrics``.
        request: The request, once it is prepared.
        is_cancelled: Whether it is to be aborted before it runs.
        has_ended: Whether its reader gets nothing more.
        is_read_whole: Whether only the last output is made.
    """

    request_id: str = ""
    deadline_s: float | None = None
    metrics: Literal["all", "last", "none"] = "none"
    request: RequestState | None = None
    is_cancelled: bool = False
    has_ended: bool = False
    is_read_whole: bool = False

    @property
    @abc.abstractmethod
    def readers(self) -> Readers:
        """The group that its reader belongs to. On any thread."""

    @property
    @abc.abstractmethod
    def has_room(self) -> bool:
        """Whether to make the next output; until then tokens stay in the request. The last output needs no room."""


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


def hand_over(contents: Iterable[tuple[Stream, Content]]) -> None:
    """Hand outputs and errors to the readers of their streams, with one call per group."""
    by_readers: dict[Readers, list[tuple[Stream, Content]]] = collections.defaultdict(list)
    for stream, content in contents:
        by_readers[stream.readers].append((stream, content))
    for readers, taken in by_readers.items():
        readers.take(taken)


def deadline_error(request: RequestState) -> DeadlineError:
    """Return the error of a request whose deadline has passed."""
    elapsed_s = time.monotonic() - request.arrival_s
    num_tokens = sum(sample.sequence.num_output_tokens for sample in request.samples)
    return DeadlineError(f"deadline exceeded {elapsed_s:.3f} s after arrival, with {num_tokens} output tokens")
