"""One request's outputs between the engine process and the coroutine that reads them."""

import asyncio
import dataclasses

from jaxserve.errors import DeadlineError, JaxserveError
from jaxserve.outputs import CompletionOutput, RequestOutput

_GRACE_S = (
    0.5  # the engine process ends requests at their deadline; only if it does not, the collector does, this later
)


class OutputCollector:
    """Collects deltas until they are read, and joins those that a slow reader left unread.

    Args:
        number: The request's number in messages.
        request_id: The request's name.

    Attributes:
        number: The request's number in messages.
        has_ended: Whether the engine process sends nothing more about the request.
    """

    def __init__(self, number: int, request_id: str):
        self.number = number
        self.has_ended = False
        self._request_id = request_id
        self._changed = asyncio.Event()
        self._first: RequestOutput | None = None  # has the prompt
        self._latest: RequestOutput | None = None  # None: everything was read
        self._deltas: dict[int, CompletionOutput] = {}
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, content: RequestOutput | JaxserveError) -> None:
        """Take the next output, or the error that ends the request."""
        if isinstance(content, JaxserveError):
            self.fail(content)
            return
        self._first = self._first or content
        self._latest = content
        for delta in content.outputs:
            if delta.index in self._deltas:
                self._deltas[delta.index].extend(delta)
            else:
                self._deltas[delta.index] = delta
        self.has_ended = content.finished
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End the request, unless it has ended: the reader gets the outputs that have come, then the error."""
        if not self.has_ended:
            self.has_ended = True
            self._error = self._error or error
            self._changed.set()

    def start_deadline(self, timeout_s: float | None) -> None:
        """Let ``get`` fail after the deadline even if the engine process does not notice it."""
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s + _GRACE_S, self._expire, timeout_s)

    def close(self) -> None:
        """Stop the deadline's timer."""
        if self._timer is not None:
            self._timer.cancel()

    async def get(self) -> RequestOutput:
        """Wait for an output; return everything since the last call.

        Raises:
            JaxserveError: The request failed.
        """
        while self._latest is None or self._first is None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        first, latest, deltas = self._first, self._latest, self._deltas
        self._latest, self._deltas = None, {}
        prompt_logprobs, first.prompt_logprobs = first.prompt_logprobs, None  # given once
        return dataclasses.replace(
            latest,
            request_id=self._request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            outputs=[deltas[index] for index in sorted(deltas)],
        )

    def _expire(self, timeout_s: float) -> None:
        if self.has_ended:  # and its last output is still unread
            return
        self._error = self._error or DeadlineError(f"deadline exceeded: not finished within {timeout_s:g} s")
        self._changed.set()
