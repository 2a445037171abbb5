"""The asyncio API: ``AsyncLLM``, with vLLM's names."""

import asyncio
import atexit
import contextlib
import functools
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from jaxserve.config import SERVING_DEFAULTS, EngineConfig
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.open_streams import deadline_after
from jaxserve.engine.preparation import Preparation
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.startup import start_engine
from jaxserve.engine.stats_log import StatsLogger
from jaxserve.engine.stream import Stream
from jaxserve.errors import RequestError
from jaxserve.metric_types import Metric
from jaxserve.outputs import PoolingRequestOutput, RequestOutput
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import PromptInput, parse_prompt
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.chat import split_conversations
from jaxserve.text.chat_prompt import chat_prompt, read_template

logger = logging.getLogger(__name__)

_Read = Callable[[], PromptInput]


class AsyncLLM:
    """A model ready to generate text for many requests at a time, each a stream of outputs.

    A thread of its own steps the model; prompts are tokenized on others. Several event loops may use one engine.

    Args:
        model: Directory, hub id, or ``demo`` for the model that comes with the package.
        **arguments: Those of ``LLM``; unless given, ``disable_log_stats`` is False, as in vLLM: outputs carry
            ``metrics``, and a line in the log says every ten seconds how the engine does.

    Raises:
        ConfigError: An unknown or unsupported setting, or a model that cannot run or does not fit.
        CheckpointError: A checkpoint that cannot be read.

    Example:
        >>> async def main():
        ...     async with AsyncLLM("demo") as engine:
        ...         async for output in engine.generate("12+30=", SamplingParams(temperature=0)):
        ...             print(output.outputs[0].text)
        >>> asyncio.run(main())
    """

    def __init__(self, model: str, **arguments: Any):
        self.config = EngineConfig.from_arguments(model, **{**SERVING_DEFAULTS, **arguments})
        self._chat_template = read_template(self.config.chat_template)
        self._started = start_engine(self.config)
        self.ledger = self._started.ledger
        logger.info("%s", self.ledger)
        self._engine = self._started.engine
        stats = None if self.config.disable_log_stats else StatsLogger(self.ledger.device)
        self._thread = EngineThread(self._engine, stats)
        self._preparation = Preparation(self._thread)
        self._preparing: set[tuple[str | None, Stream]] = set()
        # At the interpreter's exit the thread must end before JAX does; a forgotten engine must not keep its memory.
        atexit.register(self._thread.stop)
        weakref.finalize(self, self._thread.stop).atexit = False

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def shutdown(self, timeout: float = 0.0) -> None:
        """End the engine and free the devices' memory; shutting down again is without effect.

        New requests are refused at once. Those that run may go on for ``timeout`` seconds; then they end with what they
        have, finish reason ``abort``. Blocks meanwhile: on an event loop with a timeout, call it by
        ``asyncio.to_thread``.
        """
        self._thread.stop(timeout)
        self._preparation.close(wait=True)
        atexit.unregister(self._thread.stop)

    @property
    def is_running(self) -> bool:
        """Return whether it takes requests."""
        return self._thread.is_running

    @property
    def errored(self) -> bool:
        """Return whether it stopped after a failure."""
        return self._thread.failure is not None

    def get_tokenizer(self) -> Any:
        """Return the tokenizer: transformers' object, or jaxserve's own where transformers would read the files
        wrong."""
        return self._started.public_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters use: the model's generation_config.json."""
        return self._started.default_params

    def get_num_unfinished_requests(self) -> int:
        """Requests that run or wait."""
        return self._engine.num_unfinished

    def get_metrics(self) -> list[Metric]:
        """Numbers about the engine: ``Counter``, ``Gauge`` and ``Histogram`` objects. Waits for nothing."""
        return self._engine.metrics()

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate text for one prompt. The request begins when the first output is asked for.

        Outputs are of the kind that ``sampling_params.output_kind`` names. A reader who falls behind gets fewer and
        longer ones. Closing the generator, or cancelling who reads it, ends the request.

        Args:
            prompt: A string, a list of token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``.
            sampling_params: None takes the model's defaults.
            request_id: Its name, for ``abort``; none that runs may have it. None makes one.
            priority: The lowest run first; needs ``scheduling_policy="priority"``.
            timeout_s: Seconds that it may take, from when it begins; None: any time.

        Raises:
            RequestError: While it is read: a bad prompt or parameter, or a request that failed. Others go on.
            DeadlineError: While it is read: its time was up.
            EngineDeadError: While it is read: the engine failed or was shut down.
        """
        return self._stream(functools.partial(parse_prompt, prompt, sampling_params), request_id, priority, timeout_s)

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
        """Generate the next message of one conversation; else as ``generate``.

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

        def render() -> PromptInput:
            conversations = split_conversations(messages)
            if len(conversations) != 1:
                raise RequestError(f"chat takes one conversation, got {len(conversations)}")
            template = self._chat_template if chat_template is None else read_template(chat_template)
            return chat_prompt(
                self._started.tokenizer, conversations[0], sampling_params, chat_template=template, **options
            )

        return self._stream(render, request_id, priority, timeout_s)

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Make a vector of one prompt, up to the whole context long: one output, ``outputs.data`` is the vector.

        Without ``pooling_params`` it is the last token's hidden state, scaled to length 1. Else as ``generate``.
        """
        read = functools.partial(parse_prompt, prompt, pooling_params or PoolingParams(), PoolingParams)
        async with contextlib.aclosing(self._stream(read, request_id, priority)) as outputs:
            async for output in outputs:
                yield PoolingRequestOutput.of(output)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by name; their streams end with what there is, finish reason ``abort``.

        A name that nothing has is no error. When this returns their pages are free.
        """
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        for name, stream in tuple(self._preparing):
            stream.is_cancelled = stream.is_cancelled or name in names
        if self._thread.is_running:
            await asyncio.wrap_future(self._thread.abort(names))

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached page; texts that run go on. Returns whether it did."""
        return await asyncio.wrap_future(self._thread.call(self._engine.reset_prefix_cache))

    async def _stream(
        self, read: _Read, request_id: str | None, priority: int, timeout_s: float | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Prepares a request, lets it run, and gives its outputs until it ends or nobody reads them."""
        stream = Stream(asyncio.get_running_loop(), not self.config.disable_log_stats)
        try:
            await self._submit(stream, read, request_id, priority, deadline_after(timeout_s))
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._thread.drop(stream)

    async def _submit(
        self, stream: Stream, read: _Read, request_id: str | None, priority: int, deadline_s: float | None
    ) -> None:
        arrival_s = time.monotonic()

        def make() -> RequestState:
            prompt = read()
            params = prompt.params or self._started.default_params
            return self._engine.prepare(prompt, params, request_id=request_id, priority=priority, arrival_s=arrival_s)

        self._thread.check_alive()
        key = (request_id, stream)
        self._preparing.add(key)
        try:
            await asyncio.wrap_future(self._preparation.begin(stream, make, deadline_s))
        finally:
            self._preparing.discard(key)
