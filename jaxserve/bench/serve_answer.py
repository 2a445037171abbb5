"""What a load test asks, and what it notes of an answer."""

import dataclasses
import itertools
from typing import Protocol

from jaxserve.errors import JaxserveError


class BenchServeError(JaxserveError, ValueError):
    """A setting of the load test, its data, or the server that it is to measure is wrong."""


@dataclasses.dataclass(frozen=True)
class BenchRequest:
    """A request to send.

    Attributes:
        prompt: Text, or token ids.
        max_tokens: New tokens to ask for.
        num_prompt_tokens: What the prompt was made to have; 0 where nobody has counted.
        arrival_s: When a trace says that it came, in seconds after its first request; None without a trace.
    """

    prompt: str | list[int]
    max_tokens: int
    num_prompt_tokens: int = 0
    arrival_s: float | None = None


@dataclasses.dataclass
class BenchAnswer:
    """What came back, and when: all times in seconds of one monotonic clock.

    Attributes:
        start_s: When the request was sent.
        num_prompt_tokens: What the server counted, else what the request was made to have.
        queue_s: How long the request waited in the client for others, where their number was limited.
        chunk_s: When each chunk of text came. A chunk may hold no token, one, or several.
        texts: The text of each.
        num_output_tokens: What the server counted; None where it did not say.
        error: Why the request failed; empty where it did not.
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
        """Return whether there is an answer."""
        return not self.error

    @property
    def text(self) -> str:
        """Return all of the text."""
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float:
        """Time to the first chunk; 0 without one."""
        return self.chunk_s[0] - self.start_s if self.chunk_s else 0.0

    @property
    def latency_s(self) -> float:
        """Time to the last chunk; 0 without one."""
        return self.chunk_s[-1] - self.start_s if self.chunk_s else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Times between chunks."""
        return [after - before for before, after in itertools.pairwise(self.chunk_s)]


class Backend(Protocol):
    """A way to ask a server."""

    async def send(self, request: BenchRequest) -> BenchAnswer:
        """Asks, and waits for the whole answer. A failure is noted in the answer, never raised."""
        ...
