"""Render conversations to prompts in child processes, because a chat template is a program that may never end."""

import asyncio
import concurrent.futures
import json
import logging
from collections.abc import Mapping
from typing import Any

from jaxserve.api.errors import JaxserveError, RequestError, RequestFailedError, unforeseen
from jaxserve.child_process import ProcessPool
from jaxserve.server.wire import EngineInfo

logger = logging.getLogger(__name__)

_MODULE = "jaxserve.text.render_process"
_MEMORY_BYTES = 512 << 20
_MAX_PROCESSES = 4


class Renderers:
    """Renders conversations in child processes, each on a thread that waits for it.

    Args:
        limit_s: Seconds that rendering a conversation may take.
        content_format: The form in which templates see contents, as in ``jaxserve.text.chat.render_chat``.
    """

    def __init__(self, limit_s: float, content_format: str = "auto"):
        self._limit_s = limit_s
        self._content_format = content_format
        self._threads = concurrent.futures.ThreadPoolExecutor(_MAX_PROCESSES, "jaxserve-render")
        setup = {"memory_bytes": _MEMORY_BYTES, "cpu_s": int(limit_s) + 1}
        self._processes = ProcessPool(["-m", _MODULE], setup, starts_ahead=True)
        self._end: JaxserveError | None = None

    def begin(self, chat: Mapping[str, Any], info: EngineInfo) -> "asyncio.Future[str]":
        """Begin to render a conversation; cancelling the future takes it from the queue.

        Args:
            chat: As in ``Request``; the front end has checked it.
            info: Has the model's templates and special tokens.

        Returns:
            The prompt; fails with a ``RequestError`` if there is no template, or the template refuses the conversation,
            is late or takes too much memory.
        """
        return asyncio.get_running_loop().run_in_executor(self._threads, self._render, chat, info)

    def end(self, error: JaxserveError) -> None:
        """Kill all processes; what they render, and all that is still to be rendered, fails with the error."""
        self._end = self._end or error
        self._processes.kill()

    def close(self) -> None:
        """End all processes and threads after ``end``."""
        self._threads.shutdown(cancel_futures=True)
        self._processes.close()

    def _render(self, chat: Mapping[str, Any], info: EngineInfo) -> str:
        job = {
            "chat": chat,
            "templates": info.chat_templates,
            "own_template": info.chat_template,
            "special_tokens": info.special_tokens,
            "content_format": self._content_format,
        }
        try:
            written = json.dumps(job, ensure_ascii=False, allow_nan=False)
            written.encode()
        except (TypeError, ValueError, RecursionError) as error:  # NaN, lone surrogates, too many levels
            raise RequestError(f"the conversation is not JSON: {error}", parameter="messages") from error
        try:
            response = self._processes.run(written, self._limit_s)
        except Exception as error:
            logger.exception("a conversation cannot be rendered")
            raise self._end or RequestFailedError(unforeseen(error)) from None
        if response is None and self._end is not None:
            raise self._end
        if response is None:
            raise RequestError(f"the chat template failed: not done within {self._limit_s:g} s, or out of memory")
        if "error" in response:
            raise RequestError(response["error"])
        return response["text"]
