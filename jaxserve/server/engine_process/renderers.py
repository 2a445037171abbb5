"""Conversations become prompts in child processes, because a chat template is a program that may never end."""

import concurrent.futures
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.child_process import ProcessPool
from jaxserve.errors import RequestError
from jaxserve.server.engine_process import renderer
from jaxserve.text.chat import choose_template

_MEMORY_BYTES = 512 << 20
_MAX_PROCESSES = 4
_ARGUMENTS = ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")


class Renderers:
    """Renders conversations in child processes, each on a thread that waits for it.

    Args:
        limit_s: Seconds that rendering a conversation may take.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._threads = concurrent.futures.ThreadPoolExecutor(_MAX_PROCESSES, "jaxserve-render")
        setup = {"memory_bytes": _MEMORY_BYTES, "cpu_s": int(limit_s) + 1}
        self._processes = ProcessPool(["-m", renderer.__name__], setup, starts_ahead=True)

    def submit(
        self, make_job: Callable[[], Mapping[str, Any]], is_wanted: Callable[[], bool] = lambda: True
    ) -> "concurrent.futures.Future[str]":
        """Render a conversation.

        Args:
            make_job: Calls ``render_job``; called on another thread.
            is_wanted: Asked when it is this conversation's turn; if not, the future fails with a ``CancelledError``.

        Returns:
            The prompt; fails with a ``RequestError`` if the conversation is wrong, or the template refuses it, is late
            or takes too much memory.
        """
        return self._threads.submit(self._render, make_job, is_wanted)

    def kill(self) -> None:
        """Kill all processes; what they render fails. Does not wait."""
        self._processes.kill()

    def close(self) -> None:
        """End all processes and threads."""
        self._processes.kill()
        self._threads.shutdown(cancel_futures=True)
        self._processes.close()

    def _render(self, make_job: Callable[[], Mapping[str, Any]], is_wanted: Callable[[], bool]) -> str:
        if not is_wanted():
            raise concurrent.futures.CancelledError
        try:
            job = json.dumps(make_job(), ensure_ascii=False, allow_nan=False)
            job.encode()
        except RequestError:
            raise
        except (TypeError, ValueError, RecursionError) as error:  # NaN, lone surrogates, too many levels
            raise RequestError(f"the conversation is not JSON: {error}", parameter="messages") from error
        answer = self._processes.run(job, self._limit_s)
        if answer is None:
            raise RequestError(f"the chat template failed: not done within {self._limit_s:g} s, or out of memory")
        if "error" in answer:
            raise RequestError(answer["error"])
        return answer["text"]


def render_job(
    chat: Mapping[str, Any],
    templates: Mapping[str, str],
    own_template: str | None,
    special_tokens: Mapping[str, str],
    content_format: str = "auto",
) -> dict[str, Any]:
    """Return the job of rendering a conversation, for ``renderer.py``.

    Args:
        chat: As in ``EngineRequest``; the front end has checked its messages and variables.
        templates: The model's chat templates, by name.
        own_template: The server's own template, used in place of the model's.
        special_tokens: The model's special tokens, by name; the template sees them.
        content_format: The form in which the template sees contents, as in ``jaxserve.text.chat.render_chat``.

    Raises:
        RequestError: The conversation has an unknown option, or there is no template.
    """
    values = {name: value for name, value in chat.items() if value is not None}
    variables = values.pop("chat_template_kwargs", {})
    unknown = sorted(set(values) - set(_ARGUMENTS))
    if unknown:
        raise RequestError(f"a conversation has no option {unknown[0]!r}; options: {', '.join(_ARGUMENTS)}")
    tools = values.get("tools")
    given = values.get("chat_template")
    is_template = isinstance(given, str) and (given in templates or "{{" in given or "{%" in given)
    if given is not None and not is_template:  # never a file's name
        raise RequestError("chat_template is no Jinja template", parameter="chat_template", value=given)
    return {
        "conversation": values.get("messages"),
        "template": choose_template(templates, given or own_template, tools is not None),
        "tools": tools,
        "add_generation_prompt": values.get("add_generation_prompt", True),
        "continue_final_message": values.get("continue_final_message", False),
        "content_format": content_format,
        "variables": {**special_tokens, **variables},
    }
