"""The engine as the front end sees it: a process that generates, embeds, tokenizes and reports."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.metric_types import Metric
from jaxserve.outputs import RequestOutput
from jaxserve.request import Request
from jaxserve.server.engine_link import EngineLink, open_link
from jaxserve.server.engine_messages import EngineInfo, Start
from jaxserve.server.errors import UnavailableError
from jaxserve.server.settings import ServerConfig


class EngineClient:
    """The client of an engine in a process of its own. All of it belongs to one event loop.

    Args:
        engine_arguments: Arguments of ``LLM``, all of them JSON values.
        config: The server's settings.

    Raises:
        ConfigError: They do not go together.
    """

    def __init__(self, engine_arguments: Mapping[str, Any], config: ServerConfig):
        config.check_engine(engine_arguments)
        self._arguments = dict(engine_arguments)
        self._config = config
        self._link: EngineLink | None = None

    async def start(self) -> None:
        """Start the process, or start it again after it has ended; wait until the engine is ready.

        Raises:
            ConfigError: A setting, the model or one of its files is wrong.
            EngineDeadError: The process ended by itself.
        """
        assert not self.is_alive, "the engine process runs"
        try:
            json.dumps(self._arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the engine's arguments must be JSON values: {error}") from error
        config = self._config
        self._link = await open_link(
            Start(
                engine_arguments=self._arguments,
                max_num_queued_tokens=config.max_num_queued_tokens,
                watchdog_timeout=config.watchdog_timeout,
                chat_template_timeout=config.chat_template_timeout,
                chat_template_content_format=config.chat_template_content_format,
            )
        )

    def fail_requests(self, reason: str) -> None:
        """End the requests in flight with an ``UnavailableError``."""
        if self._link is not None:
            self._link.fail_all(UnavailableError(reason))

    async def stop(self, drain_s: float) -> None:
        """End the process, if it runs; running requests may take ``drain_s`` more seconds."""
        if self._link is not None:
            await self._link.stop(drain_s)

    async def kill(self) -> None:
        """End the process at once, if it runs."""
        if self._link is not None:
            await self._link.kill()

    @property
    def is_alive(self) -> bool:
        """Whether a process runs that is ready."""
        return self._link is not None and self._link.is_alive

    async def wait_ended(self) -> str:
        """Wait until the process has ended; return why."""
        return await self._ready_link().wait_ended()

    @property
    def info(self) -> EngineInfo:
        """What runs.

        Raises:
            UnavailableError: The engine is not ready.
        """
        link = self._ready_link()
        if not link.is_alive:
            raise UnavailableError("the engine process has ended")
        return link.info

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs until the request finishes. Closing the generator, or cancelling its reader, ends the request.

        Deltas that arrive while the reader is busy are merged. The first output has the prompt's token ids, text and
        logprobs, the last has ``metrics``.

        Raises:
            RequestError: The request is wrong.
            RequestFailedError: The engine failed at it.
            OverloadedError: Too many prompt tokens wait.
            DeadlineError: The deadline has passed.
            EngineDeadError: The engine has ended.
        """
        return self._ready_link().generate(request)

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, with_strings: bool = False
    ) -> tuple[list[int], list[str]]:
        """Return the token ids of a text and, if ``with_strings``, the text of each token."""
        options = {"add_special_tokens": add_special_tokens, "with_strings": with_strings}
        return await self._ready_link().query("tokenize", text=text, **options)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        options = {"skip_special_tokens": skip_special_tokens}
        return await self._ready_link().query("detokenize", token_ids=list(token_ids), **options)

    async def render_chat(self, chat: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Return the prompt of a conversation, as text and token ids; ``chat`` as in ``Request``."""
        return await self._ready_link().query("render_chat", chat=dict(chat))

    async def tokenizer_info(self) -> dict[str, Any]:
        """Return what the model's files say about its tokenizer, and the chat template in use."""
        return await self._ready_link().query("tokenizer_info")

    async def metrics(self) -> list[Metric]:
        """Return the engine's current metrics."""
        return await self._ready_link().query("metrics")

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """Abort requests by their full names; return those that were running or waiting."""
        return await self._ready_link().query("abort", request_ids=list(request_ids))

    async def reset_prefix_cache(self) -> None:
        """Drop all cached pages."""
        await self._ready_link().query("reset_prefix_cache")

    async def reshard(self, mesh: str | None, layout: str | None) -> dict[str, Any]:
        """Move the engine to another mesh or layout; return the fields of a ``ReshardReport``. Updates ``info``.

        Raises:
            RequestError: The mesh or layout is invalid, or another reshard is running.
            EngineDeadError: The move failed, and the engine has ended.
        """
        link = self._ready_link()
        report, link.info = await link.query("reshard", mesh=mesh, layout=layout)
        return report

    async def start_profile(self, directory: str) -> None:
        """Start to record a profile."""
        await self._ready_link().query("start_profile", directory=directory)

    async def stop_profile(self) -> None:
        """Stop the recording and write the profile."""
        await self._ready_link().query("stop_profile")

    def _ready_link(self) -> EngineLink:
        if self._link is None:
            raise UnavailableError("the engine is starting")
        return self._link
