"""One request's outputs between the line from the engine process and whoever reads them."""

import asyncio
import time

from jaxserve.errors import DeadlineError
from jaxserve.logprobs import PromptLogprobs
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.server.engine_frames import error_from_proto
from jaxserve.server.output_codec import completion_from_proto, prompt_logprobs_from_proto
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2

_GRACE_S = 0.5  # from a deadline until nobody waits for the engine process any more, which ends requests itself


class EngineSlot:
    """Joins what comes of a request until it is read: a slow reader costs no more than the text itself.

    Args:
        number: The request's on the line.
        request_id: Its name.

    Attributes:
        number: The request's on the line.
        has_ended: Whether the engine process says nothing more of it.
    """

    def __init__(self, number: int, request_id: str):
        self.number = number
        self.has_ended = False
        self._request_id = request_id
        self._arrival_s = time.monotonic()
        self._news = asyncio.Event()
        self._completions: dict[int, CompletionOutput] = {}
        self._has_output = False
        self._prompt: str | None = None
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: PromptLogprobs | None = None
        self._num_cached_tokens: int | None = None
        self._metrics: RequestMetrics | None = None
        self._embedding: list[float] | None = None
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, message: engine_pb2.Output) -> None:
        """Takes what came."""
        if message.HasField("prompt"):
            self._prompt = message.prompt.text if message.prompt.HasField("text") else None
            self._prompt_token_ids = list(message.prompt.token_ids)
            self._prompt_logprobs = prompt_logprobs_from_proto(message.prompt)
            self._num_cached_tokens = message.prompt.num_cached_tokens
        for completion in message.completions:
            delta = completion_from_proto(completion)
            if delta.index in self._completions:
                self._completions[delta.index].extend(delta)
            else:
                self._completions[delta.index] = delta
        if message.embedding:
            self._embedding = list(message.embedding)
        if message.HasField("times"):
            self._metrics = self._read_times(message.times)
        if message.HasField("error"):
            self.fail(error_from_proto(message.error))
        else:
            self._has_output = True
            self.has_ended = message.is_finished
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Ends it, unless it has ended: the reader gets what is there and then the error."""
        if not self.has_ended:
            self.has_ended = True
            self._error = self._error or error
            self._news.set()

    def begin(self, timeout_s: float | None) -> None:
        """From now on the request may take so long, whether or not the engine process notices."""
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s + _GRACE_S, self._expire, timeout_s)

    def close(self) -> None:
        """Nobody reads it any more."""
        if self._timer is not None:
            self._timer.cancel()

    async def get(self) -> RequestOutput:
        """What has come since the last call, once there is something.

        Raises:
            JaxserveError: The request failed.
        """
        while not self._has_output:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._take()

    def _take(self) -> RequestOutput:
        completions, self._completions = self._completions, {}
        logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        self._has_output = False
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completions[index] for index in sorted(completions)],
            finished=self.has_ended and self._error is None,
            prompt_logprobs=logprobs,
            metrics=self._metrics,
            num_cached_tokens=self._num_cached_tokens,
            embedding=self._embedding,
        )

    def _expire(self, timeout_s: float) -> None:
        if self.has_ended:  # and is not read yet
            return
        self._error = self._error or DeadlineError(f"the deadline has passed: not done within {timeout_s:g} s")
        self._news.set()

    def _read_times(self, message: engine_pb2.Times) -> RequestMetrics:
        times = {field.name: self._arrival_s + value for field, value in message.ListFields()}
        return RequestMetrics(arrival_s=self._arrival_s, **times)
