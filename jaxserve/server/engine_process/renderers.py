"""Conversations become prompts in child processes, because a chat template is a program that may never end."""

import concurrent.futures
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxserve.child_process import READY, ProcessPool
from jaxserve.errors import RequestError
from jaxserve.text.chat import choose_template, quiet_transformers, render_chat

_MODULE = "jaxserve.server.engine_process.renderers"  # run as a program it is the child process
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
        self._processes = ProcessPool(["-m", _MODULE], setup, starts_ahead=True)

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
        response = self._processes.run(job, self._limit_s)
        if response is None:
            raise RequestError(f"the chat template failed: not done within {self._limit_s:g} s, or out of memory")
        if "error" in response:
            raise RequestError(response["error"])
        return response["text"]


def render_job(
    chat: Mapping[str, Any],
    templates: Mapping[str, str],
    own_template: str | None,
    special_tokens: Mapping[str, str],
    content_format: str = "auto",
) -> dict[str, Any]:
    """Return the job of rendering a conversation, for the child process.

    Args:
        chat: As in ``Request``; the front end has checked its messages and variables.
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
        raise RequestError(f"unknown chat option {unknown[0]!r}; valid: {', '.join(_ARGUMENTS)}")
    tools = values.get("tools")
    given = values.get("chat_template")
    is_template = isinstance(given, str) and (given in templates or "{{" in given or "{%" in given)
    if given is not None and not is_template:  # never a file's name
        raise RequestError("chat_template is not a Jinja template", parameter="chat_template", value=given)
    return {
        "conversation": values.get("messages"),
        "template": choose_template(templates, given or own_template, tools is not None),
        "tools": tools,
        "add_generation_prompt": values.get("add_generation_prompt", True),
        "continue_final_message": values.get("continue_final_message", False),
        "content_format": content_format,
        "variables": {**special_tokens, **variables},
    }


def _limit_memory(extra_bytes: int) -> None:
    """Limit the growth of this process's memory in bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_cpu(seconds: int) -> None:
    """Let the kernel kill this process after some more seconds of work, in case its parent has died."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + seconds + 1, hard))


def _response(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": render_chat(job.pop("conversation"), job.pop("template"), **job)}
    except RequestError as error:
        is_memory = isinstance(error.__cause__, MemoryError)
        return {"error": "the chat template failed: it takes more memory than allowed" if is_memory else str(error)}
    except MemoryError:
        return {"error": "the chat template failed: it takes more memory than allowed"}


def _serve() -> None:
    """Render until standard input ends. In the child process."""
    quiet_transformers()
    from transformers.utils import chat_template_utils

    del chat_template_utils  # loaded before the limits count
    first = sys.stdin.readline()
    if not first:  # the parent has ended
        return
    setup = json.loads(first)
    if sys.platform == "linux":
        _limit_memory(setup["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(READY, flush=True)
    for line in sys.stdin:
        _limit_cpu(setup["cpu_s"])
        print(json.dumps(_response(json.loads(line))), flush=True)


if __name__ == "__main__":
    try:
        _serve()
    except BrokenPipeError:  # the parent has ended: exit without flushing
        os._exit(0)
