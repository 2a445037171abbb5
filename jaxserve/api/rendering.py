"""What rendering a conversation in a child process takes and gives, for front ends and for engines."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.api.errors import RequestError
from jaxserve.child_process import ProcessPool

_MODULE = "jaxserve.text.render_process"
MEMORY_BYTES = 512 << 20
"""What a process may take for a conversation."""


class RenderedChat(NamedTuple):
    """A prompt, and the end of it that begins the answer: None if it was not asked for, or is not found."""

    text: str
    generation_prompt: str | None


def render_processes(limit_s: float, *, memory_bytes: int = MEMORY_BYTES, starts_ahead: bool = False) -> ProcessPool:
    """Return processes that render conversations.

    Args:
        limit_s: Seconds that a conversation may take.
        memory_bytes: What a process may take for it.
        starts_ahead: As for ``ProcessPool``.
    """
    setup = {"memory_bytes": memory_bytes, "cpu_s": int(limit_s) + 1}
    return ProcessPool(["-m", _MODULE], setup, starts_ahead=starts_ahead)


def read_response(response: Mapping[str, Any] | None, limit_s: float) -> RenderedChat:
    """Return what a process has rendered.

    Args:
        response: Its response; None if it has ended, or had more than ``limit_s`` seconds.
        limit_s: Seconds that it had.

    Raises:
        RequestError: The template failed, or exceeded a limit.
    """
    if response is None:
        raise RequestError(f"the chat template failed: not done within {limit_s:g} s, or out of memory")
    if "error" in response:
        raise RequestError(response["error"])
    return RenderedChat(response["text"], response["generation_prompt"])
