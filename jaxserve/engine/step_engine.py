"""What the thread that steps an engine needs of it."""

from typing import Protocol, runtime_checkable

from jaxserve.engine.request_state import RequestState
from jaxserve.metric_types import Metric


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
