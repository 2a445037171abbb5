"""Conversations to prompt text, by the model's own Jinja template in transformers' sandbox."""

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2

from jaxserve.chat_messages import check_messages
from jaxserve.errors import RequestError
from jaxserve.field_checks import sequence
from jaxserve.text.content_format import Found, check_format, detected_format, in_format

Message = Mapping[str, Any]

MAX_RENDERED_CHARACTERS = 2**25
"""Longest prompt text of a conversation: more is a template gone wrong."""
_MAX_TEMPLATES = 64

logger = logging.getLogger(__name__)


def quiet_transformers() -> None:
    """Call before importing transformers: without torch it prints a notice unless told otherwise in the environment."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def load_chat_template(template: str | Path) -> str:
    """Returns the source of a template given as a file or as itself.

    Raises:
      RequestError: A path (recognised by having no Jinja braces) that cannot be read.
    """
    if isinstance(template, str) and ("{{" in template or "{%" in template):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        message = f"chat_template is neither a Jinja template nor a readable file: {error}"
        raise RequestError(message, parameter="chat_template", value=str(template)) from error


def split_conversations(messages: Any) -> list[list[Message]]:
    """Return a list of conversations from one conversation or a list of them.

    Raises:
      RequestError: Naming the conversation and the message that is wrong.
    """
    listed = sequence("messages", messages)
    if not listed or not isinstance(listed[0], Sequence) or isinstance(listed[0], str):
        return [check_messages("messages", listed)]
    return [check_messages(f"messages[{index}]", conversation) for index, conversation in enumerate(listed)]


def choose_template(templates: Mapping[str, str], chosen: str | None, has_tools: bool) -> str:
    """Returns the Jinja source to use.

    Args:
      templates: The model's templates by name.
      chosen: A name among them, a template's source, or None for the model's usual one.
      has_tools: Whether tools are offered: a model may have a template for that, named "tool_use".

    Raises:
      RequestError: The model has no template and none was given.
    """
    if chosen is not None:
        return templates.get(chosen) or load_chat_template(chosen)
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" not in templates:
        named = f" called 'default', only {sorted(templates)}" if templates else ""
        raise RequestError(
            f"the model has no chat template{named}: pass chat_template, or use generate() with plain text"
        )
    return templates["default"]


def render_chat(
    conversation: Sequence[Message],
    template: str,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    content_format: str = "auto",
    variables: Mapping[str, Any],
) -> str:
    """Returns the prompt text of one conversation, special tokens written out.

    Args:
      conversation: Messages with "role" and "content". An assistant's "tool_calls" are in OpenAI's form, their
        arguments a mapping or its JSON text; templates always see a mapping, as in vLLM.
      template: Jinja source.
      add_generation_prompt: End with what begins the assistant's answer.
      continue_final_message: Leave the last message open, so that the model goes on with it.
      tools: JSON schemas, or typed functions with a docstring, offered to the model.
      content_format: What the template sees of contents: "string" one text (parts joined by newlines), "openai" a list
        of parts; "auto" the list where it loops over contents and does not fail at it, else the text.
      variables: More names that the template sees: the special tokens, and what the user passed.

    Raises:
      RequestError: The template refused the conversation or wrote far too much, or both ways to end it were asked for.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError("continue_final_message=True needs add_generation_prompt=False: the last message stays open")
    check_format(content_format)
    options = {
        "tools": None if tools is None else list(tools),
        "continue_final_message": continue_final_message,
        "add_generation_prompt": add_generation_prompt,
    }
    render = functools.partial(_rendered, conversation, template, options, variables)
    try:
        if content_format != "auto":
            return render(cast("Found", content_format))
        if _format_of(template) == "openai":
            with contextlib.suppress(TypeError, jinja2.UndefinedError):  # some take a system message for text
                return render("openai")
        return render("string")
    except Exception as error:  # a template is a program: it may fail in any way
        raise RequestError(f"the chat template failed: {error}") from error


def _rendered(
    conversation: Sequence[Message],
    template: str,
    options: Mapping[str, Any],
    variables: Mapping[str, Any],
    content_format: Found,
) -> str:
    from transformers.utils import chat_template_utils

    environment = _environment(template)
    environment.concat = _join_bounded
    rendered, _ = chat_template_utils.render_jinja_template(
        conversations=[[_as_templates_expect(message, content_format) for message in conversation]],
        chat_template=template,
        **options,
        **variables,
    )
    return rendered[0]


def _environment(template: str) -> Any:
    """The environment of a template: every one that transformers compiles has one of its own."""
    quiet_transformers()
    from transformers.utils import chat_template_utils

    return chat_template_utils._compile_jinja_template(template).environment


@functools.lru_cache(maxsize=_MAX_TEMPLATES)
def _format_of(template: str) -> Found:
    return detected_format(_environment(template).parse(template))


def _as_templates_expect(message: Message, content_format: Found) -> dict[str, Any]:
    """Content in a format, reasoning under its older name too, calls with mappings; no "tool_calls" where none are."""
    changed = dict(message)
    if message.get("reasoning") is not None:
        changed.setdefault("reasoning_content", message["reasoning"])
    changed["content"] = in_format(message["role"], message.get("content"), content_format)
    calls = cast("list[Mapping[str, Any]]", changed.pop("tool_calls", None) or [])
    if calls:
        changed["tool_calls"] = [_with_mapping_arguments(call) for call in calls]
    return changed


def _with_mapping_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _read_arguments(function["name"], arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _read_arguments(name: str, written: str) -> Mapping[str, Any]:
    """A call that the model wrote badly stays in the conversation; failing would make all its later turns fail."""
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, Mapping):
        return arguments
    logger.warning("the arguments of a call of %r are no JSON object; the chat template gets {} instead", name)
    return {}


def _join_bounded(pieces: Iterable[str]) -> str:
    """Joins what a template writes, while it writes it.

    This bounds loops that write. transformers' sandbox bounds each `range` to 100,000 numbers; neither bounds time.
    """
    joined: list[str] = []
    length = 0
    for piece in pieces:
        joined.append(piece)
        length += len(piece)
        if length > MAX_RENDERED_CHARACTERS:
            raise ValueError(f"it writes more than {MAX_RENDERED_CHARACTERS} characters")
    return "".join(joined)
