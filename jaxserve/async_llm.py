"""The asyncio API: ``AsyncLLM``, with vLLM's names."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

from jaxserve.api.config import SERVING_DEFAULTS, EngineConfig
from jaxserve.api.errors import RequestError
from jaxserve.api.outputs import PoolingRequestOutput, RequestOutput
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.request import Request, parse_prompt
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.resharding import ReshardReport
from jaxserve.engine.stream import Content, Stream, deadline_after
from jaxserve.running_model import RunningModel
from jaxserve.text.chat import split_conversations
from jaxserve.text.chat_prompt import chat_prompt, read_template
from sharding import ShardingLayout

logger = logging.getLogger(__name__)

_Read = Callable[[], Request]


class AsyncLLM(RunningModel):
    """A model that generates text for many concurrent requests, each a stream of outputs.

    A separate thread steps the model; prompts are tokenized on other threads. Several event loops may share one engine.

    Args:
        model: Directory, ``.gguf`` file, hub id, or ``demo`` for the model included in the package.
        **arguments: Arguments of ``LLM``; ``disable_log_stats`` defaults to False, as in vLLM: outputs have
            ``metrics``, and statistics are logged every ten seconds.

    Raises:
        ConfigError: A setting is unknown or unsupported, or the model is not supported or does not fit into memory.
        CheckpointError: The checkpoint cannot be read.

    Example:
        >>> async def main():
        ...     async with AsyncLLM("demo") as engine:
        ...         async for output in engine.generate("12+30=", SamplingParams(temperature=0)):
        ...             print(output.outputs[0].text)
        >>> asyncio.run(main())
    """

    def __init__(self, model: str, **arguments: Any):
        super().__init__(EngineConfig.from_arguments(model, **{**SERVING_DEFAULTS, **arguments}))

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def shutdown(self, timeout: float = 0.0) -> None:
        """Shut down the engine and free the devices' memory; later calls do nothing.

        New requests are rejected immediately. Running ones may continue for ``timeout`` seconds; then they finish with
        the tokens so far and the finish reason ``abort``. This call blocks: on an event loop, use
        ``asyncio.to_thread``.
        """
        self._stop(timeout)

    @property
    def _is_on_demand(self) -> bool:
        return False

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return self._loop.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine stopped after a failure."""
        return self._loop.failure is not None

    def get_num_unfinished_requests(self) -> int:
        """Return the number of running and waiting requests."""
        return self.engine.num_unfinished

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate a completion of one prompt. The request starts when the first output is awaited.

        ``sampling_params.output_kind`` selects the kind of outputs. A slow reader gets fewer and longer outputs.
        Closing the generator, or cancelling its task, aborts the request.

        Args:
            prompt: A string, a list of token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``.
            sampling_params: None uses the model's defaults.
            request_id: A unique id, for ``abort``. None generates one.
            priority: The lowest run first; needs ``scheduling_policy="priority"``.
            timeout_s: Seconds from the start until the request times out; None: no limit.

        Raises:
            RequestError: While iterating: an invalid prompt or parameter, or a failed request. Others continue.
            DeadlineError: While iterating: the request timed out.
            EngineDeadError: While iterating: the engine failed or was shut down.
        """
        read = functools.partial(parse_prompt, prompt, sampling_params, self._started.default_params)
        return self._stream(read, request_id, priority, timeout_s)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the next message of one conversation; otherwise as ``generate``.

        Args:
            messages: A list of ``{"role": …, "content": …}``.
            sampling_params: As in ``generate``.
            request_id: As in ``generate``.
            priority: As in ``generate``.
            timeout_s: As in ``generate``.
            chat_template: A Jinja template in place of the model's.
            **options: ``chat_template_content_format``, ``add_generation_prompt``, ``continue_final_message``,
                ``tools`` and ``chat_template_kwargs``, as in ``LLM.chat``.
        """

        def render() -> Request:
            conversations = split_conversations(messages)
            if len(conversations) != 1:
                raise RequestError(
                    f"AsyncLLM.chat takes one conversation, got {len(conversations)}; call it once for each"
                )
            template = self._chat_template if chat_template is None else read_template(chat_template)
            params = sampling_params or self._started.default_params
            own = {"chat_template": template, "finds_generation_prompt": self._started.has_states}
            tokenizer, renderer = self._started.tokenizer, self._renderer
            return chat_prompt(tokenizer, renderer, conversations[0], params, **own, **options)

        return self._stream(render, request_id, priority, timeout_s)

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Embed one prompt, up to the whole context long: yields one output, whose ``outputs.data`` is the vector.

        By default it is the last token's hidden state, scaled to length 1. Otherwise as ``generate``.
        """
        read = functools.partial(parse_prompt, prompt, pooling_params, PoolingParams())
        async with contextlib.aclosing(self._stream(read, request_id, priority)) as outputs:
            async for output in outputs:
                yield PoolingRequestOutput.of(output)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests by id; their streams end with the tokens so far and the finish reason ``abort``.

        Unknown ids are ignored. When this returns the pages of the requests are free.
        """
        if self._loop.is_running:
            names = {request_id} if isinstance(request_id, str) else set(request_id)
            await asyncio.wrap_future(self._loop.abort(names))

    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; running requests continue. Returns whether it was cleared."""
        return await asyncio.wrap_future(self._loop.call(self.engine.reset_prefix_cache))

    async def reshard(self, mesh: str | None = None, layout: str | ShardingLayout | None = None) -> ReshardReport:
        """Move the running engine to other devices or another layout, as ``LLM.reshard``; streams stay open.

        New programs are compiled on another thread while requests run; then the engine pauses for ``pause_s`` of the
        report.
        """
        return await asyncio.to_thread(
            self._resharder.reshard,
            mesh,
            layout,
            self._loop.run,
            self._loop.deliver,
        )

    async def _stream(
        self, read: _Read, request_id: str | None, priority: int, timeout_s: float | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Prepare and submit a request, and yield its outputs until it finishes or the reader closes the stream."""
        stream = EventLoopStream(
            event_loop=EventLoopReaders(asyncio.get_running_loop()),
            request_id=request_id or "",
            deadline_s=deadline_after(timeout_s),
            metrics="none" if self.config.disable_log_stats else "all",
        )
        arrival_s = time.monotonic()

        def prepare() -> RequestState:
            request = dataclasses.replace(read(), request_id=stream.request_id, priority=priority)
            return self.engine.prepare(request, arrival_s)

        self._loop.submit(stream, prepare)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._loop.drop(stream)


@dataclasses.dataclass(frozen=True)
class EventLoopReaders:
    """Coroutines on an event loop, which get outputs with one call to the loop."""

    loop: asyncio.AbstractEventLoop

    def take(self, contents: Sequence[tuple["EventLoopStream", Content]]) -> None:
        """See ``Readers``."""
        for stream, content in contents:
            stream.contents.append(content)
        try:
            self.loop.call_soon_threadsafe(_wake_all, [stream for stream, _ in contents])
        except RuntimeError:
            logger.warning("an event loop was closed while %d requests were running", len(contents))


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class EventLoopStream(Stream):
    """A stream with room for one output, which a coroutine gets.

    So a slow reader does not build up a queue: its next output has all tokens since.

    Attributes:
        event_loop: The readers on the event loop of the coroutine.
        contents: The output, and the error that ends the stream, until the reader takes them.
    """

    event_loop: EventLoopReaders
    contents: collections.deque[Content] = dataclasses.field(default_factory=collections.deque[Content])
    _has_content: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def readers(self) -> EventLoopReaders:
        """See ``Stream``."""
        return self.event_loop

    @property
    def has_room(self) -> bool:
        """Whether the previous output has been taken."""
        return not self.contents

    def wake(self) -> None:
        """Wake the reader. Call on its event loop."""
        self._has_content.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output. Call on the event loop.

        Raises:
            BaseException: The error that ends the stream.
        """
        while not self.contents:
            self._has_content.clear()
            await self._has_content.wait()
        content = self.contents.popleft()
        if isinstance(content, BaseException):
            raise content
        return content


def _wake_all(streams: Sequence[EventLoopStream]) -> None:
    for stream in streams:
        stream.wake()
