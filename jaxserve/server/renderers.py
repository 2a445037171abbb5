"""Render conversations to prompts in child processes, because a chat template is a program that may never end."""

import asyncio
import json
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.api.errors import RequestError, RequestFailedError, unforeseen
from jaxserve.api.rendering import MEMORY_BYTES, RenderedChat, read_response, render_processes
from jaxserve.api.turns import SHARED_TURN, FairThreads, Turn
from jaxserve.server.byte_budget import rendering_bytes
from jaxserve.server.output_collector import late
from jaxserve.server.settings import ServerConfig
from jaxserve.server.wire import EngineInfo

logger = logging.getLogger(__name__)

_NUM_PROCESSES = max(2, min(4, os.cpu_count() or 1))
"""More than there are processors would only take time from the engine; of one alone each key would wait for others."""


class Renderers:
    """Renders conversations in child processes, each on a thread that waits for it. Belongs to one event loop.

    API keys take turns, and one has at most all processes but one.

    Args:
        limit_s: Seconds that rendering a conversation may take.
        content_format: The form in which templates see contents, as in ``jaxserve.text.chat.render_chat``.
        memory_bytes: What a process may take for a conversation.
    """

    def __init__(self, limit_s: float, content_format: str = "auto", memory_bytes: int = MEMORY_BYTES):
        self._limit_s = limit_s
        self._content_format = content_format
        self._threads = FairThreads(_NUM_PROCESSES, "jaxserve-render")
        self._processes = render_processes(limit_s, memory_bytes=memory_bytes, starts_ahead=True)
        self._names: dict[asyncio.Future[RenderedChat], str] = {}
        self._end: Exception | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> "Renderers":
        """Return what a server's settings ask for."""
        return cls(config.chat_template_timeout, config.chat_template_content_format, rendering_bytes(config))

    async def render(
        self,
        chat: Mapping[str, Any],
        info: EngineInfo,
        name: str = "",
        timeout_s: float | None = None,
        turn: Turn = SHARED_TURN,
    ) -> RenderedChat | None:
        """Return the prompt of a conversation; None if ``abort`` names it meanwhile.

        Args:
            chat: As in ``Request``; the front end has checked it.
            info: Has the model's templates and special tokens.
            name: The request's name.
            timeout_s: Seconds until the request's deadline; None for none.
            turn: Whose turn it takes.

        Raises:
            RequestError: There is no template, or it refuses the conversation, is late or takes too much memory.
            DeadlineError: The deadline has passed.
        """
        rendering = asyncio.wrap_future(self._threads.submit(self._render, chat, info, turn=turn))
        self._names[rendering] = name
        try:
            await asyncio.wait([rendering], timeout=timeout_s)
            if not rendering.done():
                raise late(timeout_s)
            return None if rendering.cancelled() else rendering.result()
        finally:
            del self._names[rendering]
            rendering.cancel()
            del rendering  # else its error, whose traceback has this frame, would be garbage with the conversation

    def abort(self, names: Collection[str]) -> list[str]:
        """Stop rendering the conversations of these names; return those that were rendered."""
        found = {rendering: name for rendering, name in self._names.items() if name and name in names}
        for rendering in found:
            rendering.cancel()
        return list(found.values())

    def end(self, error: Exception) -> None:
        """Kill all processes; what they render, and all that is still to be rendered, fails with the error."""
        self._end = self._end or error
        self._processes.kill()

    def close(self) -> None:
        """End all processes and threads after ``end``."""
        self._threads.shutdown(cancel_futures=True)
        self._processes.close()

    def _render(self, chat: Mapping[str, Any], info: EngineInfo) -> RenderedChat:
        job = {
            "chat": chat,
            "templates": info.chat_templates,
            "own_template": info.chat_template,
            "special_tokens": info.special_tokens,
            "content_format": self._content_format,
            "finds_generation_prompt": info.has_states,
        }
        try:
            written = json.dumps(job, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:  # NaN, lone surrogates, too many levels
            raise RequestError(f"the conversation is not JSON: {error}", parameter="messages") from error
        try:
            response = self._processes.run(written, self._limit_s)
        except Exception as error:
            if self._end is not None:
                raise self._end from None
            logger.exception("a conversation cannot be rendered")
            raise RequestFailedError(unforeseen(error)) from None
        if response is None and self._end is not None:
            raise self._end
        return read_response(response, self._limit_s)
