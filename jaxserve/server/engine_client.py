"""The front end's end of the line to the engine process."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxserve.errors import ConfigError, RequestFailedError
from jaxserve.metric_types import Metric
from jaxserve.outputs import RequestOutput
from jaxserve.server.engine_info import EngineInfo, find_max_output_tokens
from jaxserve.server.engine_link import EngineLink, open_link
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.errors import UnavailableError
from jaxserve.server.metric_codec import metrics_from_json
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2
from jaxserve.server.sampling_codec import given_fields
from jaxserve.server.settings import ServerConfig


@runtime_checkable
class Engine(Protocol):
    """What a front end needs of an engine. ``EngineClient`` has it; tests may bring something smaller."""

    @property
    def info(self) -> EngineInfo:
        """What runs.

        Raises:
            UnavailableError: The engine is not ready.
        """
        ...

    def generate(self, request: EngineRequest, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        """Outputs until the request ends; closing it, or cancelling who reads it, ends the request.

        Deltas that come while nobody reads are joined. The first output has the prompt's token ids, text and logprobs.
        The last has ``metrics``.

        Raises:
            RequestError: The request is wrong.
            RequestFailedError: The engine failed at it.
            OverloadedError: Too much waits.
            DeadlineError: Its time was up.
            EngineDeadError: The engine has ended.
        """
        ...

    async def embed(self, request: EngineRequest, request_id: str) -> tuple[list[float], int]:
        """The pooled vector of a prompt and its number of tokens; errors as ``generate``."""
        ...

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, with_strings: bool = False
    ) -> tuple[list[int], list[str]]:
        """The token ids of a text, and each token's text where asked for."""
        ...

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        ...

    async def render_chat(self, chat: Mapping[str, Any]) -> tuple[str, list[int]]:
        """The prompt that a conversation becomes; ``chat`` as in ``EngineRequest``."""
        ...

    async def tokenizer_info(self) -> dict[str, Any]:
        """What the model's files say of its tokenizer, and the chat template in use."""
        ...

    async def metrics(self) -> list[Metric]:
        """The engine's numbers of this moment."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Ends requests by their full names; returns those that ran or waited."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forgets cached pages."""
        ...

    async def start_profile(self, directory: str) -> None:
        """Begins to record a profile."""
        ...

    async def stop_profile(self) -> None:
        """Ends the recording."""
        ...


class EngineClient:
    """An ``Engine`` in a process of its own. All of it belongs to one event loop.

    Args:
        engine_arguments: Those of ``LLM``, all of them JSON values.
        config: The server's settings.

    Raises:
        ConfigError: They do not go together.
    """

    def __init__(self, engine_arguments: Mapping[str, Any], config: ServerConfig):
        config.check_engine(engine_arguments)
        self._arguments = dict(engine_arguments)
        self._config = config
        self._link: EngineLink | None = None
        self._info: EngineInfo | None = None

    async def start(self) -> None:
        """Starts the process and waits until the engine is ready; again after it has ended.

        Raises:
            ConfigError: A setting, the model or one of its files is wrong.
            EngineDeadError: The process ended by itself.
        """
        assert not self.is_alive, "the engine process runs"
        try:
            arguments_json = json.dumps(self._arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the engine's arguments must be JSON values: {error}") from error
        config = self._config
        self._link = await open_link(
            engine_pb2.Start(
                engine_arguments_json=arguments_json,
                max_num_queued_reqs=config.max_num_queued_reqs or 0,
                max_num_queued_tokens=config.max_num_queued_tokens or 0,
                watchdog_timeout_s=config.watchdog_timeout,
                chat_template_timeout_s=config.chat_template_timeout,
                chat_template_content_format=config.chat_template_content_format,
            )
        )
        ready = self._link.ready
        default_fields = given_fields(ready.default_sampling_params)
        self._info = EngineInfo(
            model=ready.model,
            default_fields=default_fields,
            ledger=ready.ledger,
            extra_arguments=tuple(ready.extra_arguments),
            max_output_tokens=find_max_output_tokens(self._arguments, default_fields),
        )

    def fail_requests(self, reason: str) -> None:
        """Ends the requests that there are, with an ``UnavailableError``. Without effect where none runs."""
        if self._link is not None:
            self._link.fail_all(UnavailableError(reason))

    async def stop(self, drain_s: float) -> None:
        """Ends the process; requests that run may go on for so long. Without effect where none runs."""
        if self._link is not None:
            await self._link.stop(drain_s)

    async def kill(self) -> None:
        """Ends the process at once. Without effect where none runs."""
        if self._link is not None:
            await self._link.kill()

    @property
    def is_alive(self) -> bool:
        """Whether a process runs that is ready."""
        return self._link is not None and self._link.is_alive

    async def wait_ended(self) -> str:
        """Why the process ended, once it has."""
        return await self._ready_link().wait_ended()

    @property
    def info(self) -> EngineInfo:
        """What runs; as ``Engine``."""
        self._ready_link()
        if self._info is None or not self.is_alive:
            raise UnavailableError("the engine process has ended")
        return self._info

    async def generate(self, request: EngineRequest, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        """Outputs until the request ends; as ``Engine``."""
        link = self._ready_link()
        slot = link.submit(request, request_id)
        try:
            while True:
                output = await slot.get()
                yield output
                if output.finished:
                    return
        finally:
            link.release(slot)

    async def embed(self, request: EngineRequest, request_id: str) -> tuple[list[float], int]:
        """The pooled vector of a prompt and its number of tokens; as ``Engine``."""
        link = self._ready_link()
        slot = link.submit(request, request_id)
        try:
            output = await slot.get()
            if output.embedding is None:
                raise RequestFailedError(f"request {request_id} was aborted")
            return output.embedding, len(output.prompt_token_ids)
        finally:
            link.release(slot)

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, with_strings: bool = False
    ) -> tuple[list[int], list[str]]:
        """The token ids of a text, and each token's text where asked for."""
        options = {"add_special_tokens": add_special_tokens, "with_strings": with_strings}
        answer = await self._ready_link().ask("tokenize", text=text, **options)
        return answer["token_ids"], answer["strings"]

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        options = {"skip_special_tokens": skip_special_tokens}
        return await self._ready_link().ask("detokenize", token_ids=list(token_ids), **options)

    async def render_chat(self, chat: Mapping[str, Any]) -> tuple[str, list[int]]:
        """The prompt that a conversation becomes."""
        answer = await self._ready_link().ask("render_chat", chat=dict(chat))
        return answer["text"], answer["token_ids"]

    async def tokenizer_info(self) -> dict[str, Any]:
        """What the model's files say of its tokenizer, and the chat template in use."""
        return await self._ready_link().ask("tokenizer_info")

    async def metrics(self) -> list[Metric]:
        """The engine's numbers of this moment."""
        return metrics_from_json(await self._ready_link().ask("metrics"))

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Ends requests by their full names; returns those that ran or waited."""
        return await self._ready_link().ask("abort", request_ids=list(request_ids))

    async def reset_prefix_cache(self) -> None:
        """Forgets cached pages."""
        await self._ready_link().ask("reset_prefix_cache")

    async def start_profile(self, directory: str) -> None:
        """Begins to record a profile."""
        await self._ready_link().ask("start_profile", directory=directory)

    async def stop_profile(self) -> None:
        """Ends the recording."""
        await self._ready_link().ask("stop_profile")

    def _ready_link(self) -> EngineLink:
        if self._link is None:
            raise UnavailableError("the engine is starting")
        return self._link
