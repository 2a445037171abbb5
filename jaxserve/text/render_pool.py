"""Renders conversations of ``LLM.chat`` and ``AsyncLLM.chat`` in child processes, under a server's limits."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.api.errors import RequestError
from jaxserve.child_process import ProcessPool
from jaxserve.text.chat_templates import plain, plain_tools

MODULE = "jaxserve.text.render_process"
MEMORY_BYTES = 512 << 20
LIMIT_S = 5.0


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str
    generation_prompt: str | None
    """The end of the text that begins the next message; None if it was not looked for, or cannot be found."""


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
    ) -> Rendered:
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
        response = self._started().run(written, self._limit_s)
        if response is None:
            raise RequestError(f"the chat template failed: not done within {self._limit_s:g} s, or out of memory")
        if "error" in response:
            raise RequestError(response["error"])
        return Rendered(response["text"], response["generation_prompt"])

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
                setup = {"memory_bytes": MEMORY_BYTES, "cpu_s": int(self._limit_s) + 1}
                self._pool = ProcessPool(["-m", MODULE], setup)
            return self._pool
