"""The messages of a conversation, in the form of OpenAI's APIs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from jaxserve.api.errors import RequestError
from jaxserve.api.field_checks import sequence, text

TEXT_PARTS = MappingProxyType(
    {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
)
"""Types of text content parts, and the key of the text."""
OTHER_ROLES = ("user", "human", "system", "developer", "tool", "ipython", "function", "observation", "environment")
"""Roles that are not the assistant's."""


@dataclass(frozen=True)
class LastMessage:
    """The last message of a conversation.

    Attributes:
        text: Its text.
        is_continued: Whether it is the assistant's, and the completion continues it.
    """

    text: str
    is_continued: bool = False


def last_message(conversation: Sequence[Mapping[str, Any]], *, continues: bool) -> LastMessage:
    """Return the last message of a conversation that a template renders.

    Args:
        conversation: The messages, in OpenAI's form.
        continues: Whether the last one is left open (`continue_final_message`).
    """
    message = conversation[-1]
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else content
    lines = [part_text(part) or "" for part in parts]
    return LastMessage("\n".join(lines), is_continued=continues and message.get("role") not in OTHER_ROLES)


def part_text(part: Any) -> str | None:
    """Return the text of a content part, which may be a bare string or have no type; None if it is not text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return None
    given = cast("Mapping[str, Any]", part)
    kind = given.get("type", "text")
    found = given.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    return found if isinstance(found, str) else None


def check_messages(name: str, value: Any) -> list[Mapping[str, Any]]:
    """Check the messages of one conversation.

    Args:
        name: Name of the parameter, such as ``messages``.
        value: The user's value.

    Raises:
        RequestError: A message is invalid; the error names the message and the field.
    """
    messages = list(sequence(name, value))
    if not messages:
        raise RequestError(f"{name} must have at least one message", parameter=name, value=value)
    for index, message in enumerate(messages):
        where = f"{name}[{index}]"
        if not isinstance(message, Mapping):
            raise _wrong(where, "an object with a role", message)
        given = cast("Mapping[str, Any]", message)
        text(f"{where}.role", given.get("role"))
        content = given.get("content")
        if isinstance(content, list):
            for position, part in enumerate(cast("list[Any]", content)):
                _check_part(f"{where}.content[{position}]", part)
        elif content is not None:
            text(f"{where}.content", content)
        if given.get("tool_calls") is not None:
            for position, call in enumerate(sequence(f"{where}.tool_calls", given["tool_calls"])):
                _check_tool_call(f"{where}.tool_calls[{position}]", call)
    return messages


def _check_part(where: str, part: Any) -> None:
    kind: Any = cast("Mapping[str, Any]", part).get("type", "text") if isinstance(part, Mapping) else "text"
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        message = (
            f"{where}: parts of type {str(kind)[:40]!r} are not supported; this server runs the text half of models; "
            f"supported types: {', '.join(TEXT_PARTS)}"
        )
        raise RequestError(message, parameter="messages", value=part)
    if part_text(part) is None:
        raise _wrong(where, f"text, or an object with text as {TEXT_PARTS[kind]!r}", part)


def _check_tool_call(where: str, call: Any) -> None:
    function: Any = cast("Mapping[str, Any]", call).get("function") if isinstance(call, Mapping) else None
    name: Any = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _wrong(where, "{'type': 'function', 'function': {'name': …, 'arguments': …}}", call)
    arguments: Any = function.get("arguments")
    if not isinstance(arguments, Mapping | str | None):
        raise _wrong(f"{where}.function.arguments", "an object or JSON text", arguments)


def _wrong(where: str, expected: str, value: Any) -> RequestError:
    return RequestError(f"{where} must be {expected}, got {value!r:.80}", parameter=where, value=value)
