"""The program that renders conversations in a child process, because a chat template is a program that may never end.

``jaxserve.server.renderers`` starts it: a line of JSON with limits, then one line per conversation.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.child_process import READY
from jaxserve.text.chat import choose_template, render_chat
from jaxserve.text.generation_prompt import find_generation_prompt

_TOO_MUCH_MEMORY = {"error": "the chat template failed: it takes more memory than allowed"}


def _limit_memory(extra_bytes: int) -> None:
    """Limit the growth of this process's memory in bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_cpu(seconds: int, hard: int) -> None:
    """Let the kernel kill this process after some more seconds of work, in case its parent has died.

    Args:
        seconds: How many.
        hard: The hard limit, which stays.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + seconds + 1, hard))


def _response(
    chat: dict[str, Any],
    templates: dict[str, str],
    own_template: str | None,
    special_tokens: dict[str, str],
    content_format: str,
    finds_generation_prompt: bool,
) -> dict[str, Any]:
    variables = {**special_tokens, **chat.pop("chat_template_kwargs", {})}
    try:
        chosen = chat.pop("chat_template", None) or own_template
        template = choose_template(templates, chosen, chat.get("tools") is not None)
        messages, options = chat.pop("messages"), {"content_format": content_format, "variables": variables, **chat}
        text = render_chat(messages, template, **options)
        end = find_generation_prompt(text, messages, template, **options) if finds_generation_prompt else None
        return {"text": text, "generation_prompt": end}
    except RequestError as error:
        return _TOO_MUCH_MEMORY if isinstance(error.__cause__, MemoryError) else {"error": str(error)}
    except MemoryError:
        return _TOO_MUCH_MEMORY


def _serve() -> None:
    """Render until standard input ends."""
    first = sys.stdin.readline()
    if not first:  # the parent has ended
        return
    setup = json.loads(first)
    if sys.platform == "linux":
        _limit_memory(setup["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard_cpu_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    print(READY, flush=True)
    for line in sys.stdin:
        _limit_cpu(setup["cpu_s"], hard_cpu_limit)
        print(json.dumps(_response(**json.loads(line))), flush=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the front end, which says when to end
        signal.signal(number, signal.SIG_IGN)
    try:
        _serve()
    except BrokenPipeError:  # the parent has ended: exit without flushing
        os._exit(0)
