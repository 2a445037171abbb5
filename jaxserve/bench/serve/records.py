"""The requests of a load test, and the records of their responses."""

import dataclasses
import itertools
from typing import Protocol

from jaxserve.api.errors import JaxserveError


class BenchServeError(JaxserveError, ValueError):
    """A setting of the load test, its data, or the server under test is invalid."""


@dataclasses.dataclass(frozen=True)
class BenchRequest:
    """A request to send.

    Attributes:
        prompt: Text, or token ids.
        max_tokens: Number of output tokens to request.
        num_prompt_tokens: Intended number of prompt tokens; 0 if unknown.
        arrival_s: Arrival time in the trace, in seconds after its first request; None without a trace.
    """

    prompt: str | list[int]
    max_tokens: int
    num_prompt_tokens: int = 0
    arrival_s: float | None = None


@dataclasses.dataclass
class BenchResponse:
    """The record of a response; all times are seconds of one monotonic clock.

    Attributes:
        start_s: When the request was sent.
        num_prompt_tokens: The server's count, or the intended number if it sent none.
        queue_s: Seconds that the request was queued in the client, if concurrency was limited.
        chunk_s: Arrival time of each chunk of text. A chunk may have no token, one, or several.
        texts: The text of each chunk.
        num_output_tokens: The server's count; None if it sent none.
        error: Why the request failed; empty if it succeeded.
    """

    start_s: float
    num_prompt_tokens: int = 0
    queue_s: float = 0.0
    chunk_s: list[float] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    num_output_tokens: int | None = None
    error: str = ""

    @property
    def is_success(self) -> bool:
        """Whether the request succeeded."""
        return not self.error

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first chunk; 0 without one."""
        return self.chunk_s[0] - self.start_s if self.chunk_s else 0.0

    @property
    def latency_s(self) -> float:
        """Seconds to the last chunk; 0 without one."""
        return self.chunk_s[-1] - self.start_s if self.chunk_s else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [after - before for before, after in itertools.pairwise(self.chunk_s)]


class Backend(Protocol):
    """A way to send requests to a server."""

    async def send(self, request: BenchRequest) -> BenchResponse:
        """Send a request and wait for the whole response. A failure is recorded in it, never raised."""
        ...
