"""The sandbox in which chat templates run: Jinja with what Hugging Face's templates may use.

Prompts are those of transformers, which is not imported: child processes that render start in a tenth of the time.
"""

import dataclasses
import datetime
import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_RENDERED_CHARACTERS = 2**25
"""Longest rendered prompt, in characters; limits runaway templates."""
_MAX_TEMPLATES = 128
_OPEN_END = "END_OF_OPEN_MESSAGE "
"""Marks where the last message ends; the space shows whether the template trims contents."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def quiet_transformers() -> None:
    """Suppress transformers' notice about missing torch; call before importing transformers."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class _GenerationTag(Extension):
    """Renders the text between ``{% generation %}`` and ``{% endgeneration %}``, which marks the assistant's tokens."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        """Parse the block."""
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, which lead into Python's internals."""

    def __init__(self, /, *arguments: Any, **fields: Any) -> None:
        attributes = dict(*arguments, **fields)
        for name in attributes:
            _check_attribute(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an attribute: ``{% set namespace.name = value %}``."""
        _check_attribute(name)
        super().__setitem__(name, value)


class _Dict:
    """``dict`` in templates: makes dictionaries, and has no other attribute of the class."""

    def __call__(self, *arguments: Any, **fields: Any) -> dict[Any, Any]:
        """Return a dictionary."""
        return dict(*arguments, **fields)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """Return a dictionary with the same value for each key."""
        return dict.fromkeys(*arguments)


@functools.lru_cache(maxsize=_MAX_TEMPLATES)
def compile_template(source: str) -> jinja2.Template:
    """Return a compiled template, in an environment of its own."""
    extensions = [_GenerationTag, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.concat = cast("Any", _join_bounded)
    environment.filters["tojson"] = _to_json
    names = {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    environment.globals.update(names)
    return environment.from_string(source)


def render_template(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
    continue_final_message: bool,
    **variables: Any,
) -> str:
    """Render a conversation of any objects, which the template sees as ``plain`` makes them; see ``render_plain``."""
    messages, variables = [plain(message) for message in messages], plain(variables)
    options = {"tools": plain_tools(tools), "continue_final_message": continue_final_message, **variables}
    return render_plain(source, messages, **options)


def render_plain(
    source: str,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    continue_final_message: bool,
    **variables: Any,
) -> str:
    """Render a conversation of JSON's types, such as a child process has read, or ``plain`` has made.

    Args:
        source: The template.
        messages: The conversation.
        tools: JSON schemas.
        continue_final_message: Whether to end the prompt where the last message's content ends.
        variables: Further variables of the template.

    Raises:
        ValueError: The last message cannot be continued.
        Exception: A template can raise anything.
    """
    shown, last = [_with_reasoning(message) for message in messages], ""
    if continue_final_message:
        shown[-1], last = _marked(shown[-1], source)
    text = compile_template(source).render(messages=shown, tools=tools, **{"documents": None, **variables})
    return _cut_at_mark(text, last) if continue_final_message else text


def _join_bounded(pieces: Iterable[str]) -> str:
    """Join a template's output while it renders, and stop at the limit.

    This bounds output only. The sandbox limits each `range` to 100,000; neither limits time.
    """
    joined: list[str] = []
    length = 0
    for piece in pieces:
        joined.append(piece)
        length += len(piece)
        if length > MAX_RENDERED_CHARACTERS:
            raise ValueError(f"its output exceeds {MAX_RENDERED_CHARACTERS} characters")
    return "".join(joined)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}: names begin with a letter")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; Jinja's own filter would escape what is special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the names that templates read."""
    given = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    return message if given is None else {"thinking": given, **message, "reasoning_content": given}


def _marked(message: dict[str, Any], source: str) -> tuple[dict[str, Any], str]:
    """Return a message with the mark after its text, or after that of its last part with text, and the text alone."""
    content = message.get("content")
    if content is None:
        raise ValueError("continue_final_message=True, but the last message has no content")
    if "content" not in source:
        raise ValueError("continue_final_message=True, but the chat template does not read the content of messages")
    if isinstance(content, str):
        return {**message, "content": content + _OPEN_END}, content
    parts = list(content)
    index = next((index for index in reversed(range(len(parts))) if "text" in parts[index]), None)
    if index is None:
        raise ValueError("continue_final_message=True, but the last message has no text")
    text = parts[index]["text"]
    parts[index] = {**parts[index], "text": text + _OPEN_END}
    return {**message, "content": parts}, text


def _cut_at_mark(text: str, last: str) -> str:
    """Return a prompt up to the mark, if it has the text of the last message.

    Raises:
        ValueError: It has not.
    """
    at = text.rfind(_OPEN_END.strip())
    if at < 0 or last.strip() not in text:
        raise ValueError("continue_final_message=True, but the chat template does not show the last message")
    return text[:at] if text.startswith(_OPEN_END, at) else text[:at].rstrip()


def plain_tools(tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None) -> list[Any] | None:
    """Return the JSON schemas of tools."""
    return None if tools is None else [plain(_schema(tool)) for tool in tools]


def _schema(tool: Mapping[str, Any] | Callable[..., Any]) -> Mapping[str, Any]:
    """Return the JSON schema of a tool."""
    if isinstance(tool, Mapping):
        return tool
    quiet_transformers()
    from transformers.utils.chat_template_utils import (
        get_json_schema,
    )  # reads type hints and docstrings; child processes get schemas

    return get_json_schema(tool)


def plain(value: Any) -> Any:
    """Return a value rebuilt from JSON's types: methods of other objects could leave the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # subclasses may have methods of their own
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return _plain_object(value)


def _plain_object(value: Any) -> Any:
    """Return the fields of a data class or a Pydantic model, the number of a NumPy scalar, and else the type's name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    item: Any = getattr(value, "item", None)
    is_scalar = getattr(value, "shape", None) == ()
    return plain(item()) if is_scalar else f"<{type(value).__name__}>"
