"""Render conversations to prompts with Jinja chat templates."""

import contextlib
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2

from jaxserve.api.chat_messages import check_messages
from jaxserve.api.errors import RequestError
from jaxserve.api.field_checks import sequence
from jaxserve.text.chat_templates import compile_template, render_plain
from jaxserve.text.content_format import ContentFormat, asks_for_null, check_format, convert_content, detect_format

Message = Mapping[str, Any]

_MAX_TEMPLATES = 64

logger = logging.getLogger(__name__)


def load_chat_template(template: str | Path) -> str:
    """Return the source of a template given as source or as a path; a string without Jinja braces is a path.

    Raises:
      RequestError: The file cannot be read.
    """
    if isinstance(template, str) and ("{{" in template or "{%" in template):
        return template
    try:
        return Path(template).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        message = f"chat_template is neither a Jinja template nor a readable file: {error}"
        raise RequestError(message, parameter="chat_template", value=str(template)) from error


def split_conversations(messages: Any) -> list[list[Message]]:
    """Validate one conversation or a list of them; return a list of conversations.

    Raises:
      RequestError: A message is invalid; the error names it.
    """
    listed = sequence("messages", messages)
    if not listed or not isinstance(listed[0], Sequence) or isinstance(listed[0], str):
        return [check_messages("messages", listed)]
    return [check_messages(f"messages[{index}]", conversation) for index, conversation in enumerate(listed)]


def choose_template(templates: Mapping[str, str], chosen: str | None, has_tools: bool) -> str:
    """Return the source of the template to use.

    Args:
      templates: The model's templates by name.
      chosen: A name in ``templates``, a template's source or path, or None for the model's default.
      has_tools: Whether tools are offered; then "tool_use" is the default if the model has it.

    Raises:
      RequestError: The model has no default template and none is chosen.
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
    tools: Sequence[Mapping[str, Any]] | None = None,
    content_format: str = "auto",
    variables: Mapping[str, Any],
) -> str:
    """Render one conversation to a prompt that includes special tokens.

    All values are of JSON's types: methods of other objects could leave the sandbox (``chat_templates.plain``).

    Args:
      conversation: Messages with "role" and "content". An assistant's "tool_calls" are in OpenAI's form, with
        arguments as a mapping or as JSON. As in vLLM, templates get a mapping; those that fail on it, because they
        append the arguments to a string (DeepSeek R1 and V3), get JSON.
      template: Jinja source.
      add_generation_prompt: Whether to end with the start of an assistant message.
      continue_final_message: Whether to leave the last message open, for the model to continue.
      tools: JSON schemas of tools offered to the model.
      content_format: Form of contents in the template: "string" joins parts with newlines, "openai" is a list of parts,
        "auto" is "openai" if the template loops over contents and renders with it, else "string".
      variables: Further template variables: special tokens, and those of the user.

    Raises:
      RequestError: The template failed or wrote too much, or the options contradict each other.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError("continue_final_message=True requires add_generation_prompt=False")
    if content_format != "auto":
        check_format(content_format)
    options = {
        "tools": tools,
        "continue_final_message": continue_final_message,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        render = functools.partial(_render_contents, conversation, template, dict(**options, **variables))
        if content_format != "auto":
            return render(cast("ContentFormat", content_format))
        if _detect_format(template) == "openai":
            with contextlib.suppress(TypeError, jinja2.UndefinedError):  # some expect text in system messages
                return render("openai")
        return render("string")
    except Exception as error:  # a template can raise anything
        raise RequestError(f"the chat template failed: {error}") from error


def _render_contents(
    conversation: Sequence[Message], template: str, variables: Mapping[str, Any], content_format: ContentFormat
) -> str:
    """Render with the contents that were sent, or with "" for missing ones if the template cannot do without."""
    try:
        return _render_calls(conversation, template, variables, content_format)
    except Exception:  # a template can raise anything
        if all(message.get("content") is not None for message in conversation):
            raise
    filled = [{**message, "content": message.get("content") or ""} for message in conversation]
    return _render_calls(filled, template, variables, content_format)


def _render_calls(
    conversation: Sequence[Message], template: str, variables: Mapping[str, Any], content_format: ContentFormat
) -> str:
    """Render with mappings as arguments of tool calls, or with JSON if the template cannot use mappings."""
    may_be_null = _asks_for_null(template)
    messages = [_template_message(message, content_format, may_be_null) for message in conversation]
    try:
        return render_plain(template, messages, **variables)
    except TypeError:
        if not any("tool_calls" in message for message in messages):
            raise
    return render_plain(template, [_with_json_arguments(message) for message in messages], **variables)


@functools.lru_cache(maxsize=_MAX_TEMPLATES)
def _detect_format(template: str) -> ContentFormat:
    return detect_format(compile_template(template).environment.parse(template))


@functools.lru_cache(maxsize=_MAX_TEMPLATES)
def _asks_for_null(template: str) -> bool:
    return asks_for_null(compile_template(template).environment.parse(template))


def _template_message(message: Message, content_format: ContentFormat, may_be_null: bool) -> dict[str, Any]:
    """Return a message for templates: content converted, reasoning under all its names, arguments as mappings.

    GPT-OSS reads reasoning as "thinking", and rejects it in a message with content and tool calls. An assistant's
    content may be null, and missing in a message with calls, which is the same: DeepSeek R1 shows the calls only then.
    """
    changed = dict(message)
    if message.get("reasoning") is not None:
        changed.setdefault("reasoning_content", message["reasoning"])
    calls = cast("list[Mapping[str, Any]]", changed.pop("tool_calls", None) or [])
    is_null = may_be_null and message["role"] == "assistant" and message.get("content") is None
    if is_null and (calls or "content" in message):
        changed["content"] = None
    elif "content" in message:
        changed["content"] = convert_content(message["role"], message["content"], content_format)
    if calls:
        changed["tool_calls"] = [_with_mapping_arguments(call) for call in calls]
    if changed.get("reasoning_content") is not None:
        changed.setdefault("thinking", "" if calls and changed.get("content") else changed["reasoning_content"])
    return changed


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if "tool_calls" in changed:
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
            for call in changed["tool_calls"]
            for arguments in [call["function"]["arguments"]]
        ]
    return changed


def _with_mapping_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _read_arguments(function["name"], arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _read_arguments(name: str, written: str) -> Mapping[str, Any]:
    """Parse arguments of a call; malformed ones become {}, because raising would break all later turns too."""
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, Mapping):
        return arguments
    logger.warning("the arguments of a call to %r are not a JSON object; the chat template gets {} instead", name)
    return {}
