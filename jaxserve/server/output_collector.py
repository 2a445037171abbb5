"""The output of a request that its coroutine has not read yet."""

import asyncio
import dataclasses

from jaxserve.api.errors import DeadlineError, JaxserveError
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.request import Request

_GRACE_S = 0.5  # after a request's deadline, which the engine process should notice first


@dataclasses.dataclass(eq=False)
class OutputCollector:
    """Holds the output of one request until it is read; later ones are added to it.

    Attributes:
        timeout_s: Seconds until the request's deadline; None for none.
        request_id: The request's name.
        has_ended: Whether the engine process sends nothing more about the request.
    """

    timeout_s: float | None = None
    request_id: str = ""
    has_ended: bool = False
    _changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _unread: RequestOutput | None = None
    _error: Exception | None = None

    def __post_init__(self):
        now_s, timeout_s = asyncio.get_running_loop().time(), self.timeout_s
        self._limit_s = None if timeout_s is None else now_s + timeout_s + _GRACE_S

    def put(self, content: RequestOutput | JaxserveError) -> None:
        """Take the next output, or the error that ends the request."""
        if isinstance(content, JaxserveError):
            self.fail(content)
            return
        self._unread = content if self._unread is None else _joined(self._unread, content)
        self.has_ended = content.finished
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End the request, unless it has ended: the reader gets the outputs that have come, then the error."""
        if not self.has_ended:
            self.has_ended = True
            self._error = error
            self._changed.set()

    async def get(self) -> RequestOutput:
        """Wait for an output; return everything since the last call. Call it no more once it has raised an error.

        Raises:
            JaxserveError: The request failed, or its deadline has passed and the engine process did not notice.
        """
        while self._unread is None:
            if self._error is not None:
                raise self._take_error()
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self._limit_s):
                    await self._changed.wait()
            except TimeoutError:
                raise late(self.timeout_s) from None
        output, self._unread = self._unread, None
        return output

    def _take_error(self) -> Exception:
        """Return the error, and forget it: its traceback will have the frame of the reader, which has this object."""
        assert self._error is not None
        error, self._error = self._error, None
        return error


def _joined(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Return an output of a request with the next one added; only the first of all has the prompt."""
    deltas = {delta.index: delta for delta in first.outputs}
    for delta in then.outputs:
        if delta.index in deltas:
            deltas[delta.index].extend(delta)
        else:
            deltas[delta.index] = delta
    return dataclasses.replace(
        then,
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=then.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        outputs=[deltas[index] for index in sorted(deltas)],
    )


def late(timeout_s: float | None) -> DeadlineError:
    """Return the error of a request that has not finished in time."""
    return DeadlineError(f"deadline exceeded: not finished within {timeout_s:g} s")


def aborted(request: Request) -> RequestOutput:
    """Return the output of a request that was aborted before it was sent."""
    outputs = [CompletionOutput(index, "", [], finish_reason="abort") for index in range(request.params.n)]
    return RequestOutput(
        request_id=request.request_id, prompt=None, prompt_token_ids=[], outputs=outputs, finished=True
    )
