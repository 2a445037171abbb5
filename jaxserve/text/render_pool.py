"""Renders conversations of ``LLM.chat`` and ``AsyncLLM.chat`` in child processes, under a server's limits."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.rendering import RenderedChat, read_response, render_processes
from jaxserve.child_process import ProcessPool
from jaxserve.text.chat_templates import plain, plain_tools

LIMIT_S = 5.0


class RenderPool:
    """Renders conversations in child processes, which are started for the first one.

    Args:
        limit_s: Seconds that rendering a conversation may take.
    """

    def __init__(self, limit_s: float = LIMIT_S):
        self._limit_s = limit_s
        self._pool: ProcessPool | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # of the two above

    def render(
        self,
        conversation: Sequence[Mapping[str, Any]],
        template: str,
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        content_format: str = "auto",
        variables: Mapping[str, Any],
        finds_generation_prompt: bool = False,
        **options: bool,
    ) -> RenderedChat:
        """Render one conversation; see ``jaxserve.text.chat.render_chat`` for the arguments.

        Values of other types than JSON's are shown to the template as those of JSON. With ``finds_generation_prompt``,
        the end that begins the next message is found too.

        Raises:
            RequestError: The template failed, or exceeds a limit.
        """
        try:
            chat = {
                "messages": plain(conversation),
                "tools": plain_tools(tools),
                "chat_template_kwargs": plain(variables),
                **options,
            }
            job = {"chat": chat, "templates": {"default": template}, "own_template": None, "special_tokens": {}}
            more = {"content_format": content_format, "finds_generation_prompt": finds_generation_prompt}
            written = json.dumps({**job, **more}).encode()
        except Exception as error:  # objects and functions of the caller can raise anything
            raise RequestError(f"the chat template failed: {error}") from error
        return read_response(self._started().run(written, self._limit_s), self._limit_s)

    def close(self) -> None:
        """End all child processes; conversations that they render fail."""
        with self._lock:
            self._is_closed, pool = True, self._pool
        if pool is not None:
            pool.close()

    def _started(self) -> ProcessPool:
        with self._lock:
            if self._is_closed:
                raise RequestError("the chat template cannot be rendered: the engine was shut down")
            if self._pool is None:
                self._pool = render_processes(self._limit_s)
            return self._pool
