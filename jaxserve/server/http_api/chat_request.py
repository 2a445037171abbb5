"""Conversations as requests give them: messages, tools, and what the chat template gets."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.content_parts import TEXT_PARTS, part_text
from jaxserve.errors import RequestError
from jaxserve.field_checks import flag, text
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.chat_answer import ToolUse, check_tools
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.errors import NotImplementedRequestError
from jaxserve.server.http_api.endpoint import Call
from jaxserve.server.http_api.fields import Check, Fields, json_object, limited, objects, one_of, refused, whole
from jaxserve.server.http_api.generation_fields import (
    GENERATION_FIELDS,
    AnswerOptions,
    answer_options,
    engine_fields,
    sampling_params,
)
from jaxserve.server.template_variables import check_variables

MAX_LOGPROBS = 2**31
"""The engine has a lower limit of its own."""


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    found = objects(name, value)
    if not found:
        raise RequestError(f"{name} must have at least one message", parameter=name)
    for place, message in enumerate(found):
        where = f"{name}[{place}]"
        text(f"{where}.role", message.get("role"))
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(f"{where}.content", content)
        elif content is not None:
            text(f"{where}.content", content)
    return found


def _check_parts(where: str, parts: list[Any]) -> None:
    for place, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in list(TEXT_PARTS):
            message = f"{where}: parts of type {str(kind)[:40]!r} are not supported, only {', '.join(TEXT_PARTS)}"
            raise RequestError(message, parameter="messages")
        if part_text(part) is None:
            message = f"{where}[{place}] must be text, or an object with text as {TEXT_PARTS[kind]!r}"
            raise RequestError(message, parameter=f"{where}[{place}]", value=part)


def _tool_choice(name: str, value: Any) -> str | dict[str, Any]:
    return value if isinstance(value, str) else json_object(name, value)


def _documents(name: str, value: Any) -> None:
    if value != []:
        raise NotImplementedRequestError(f"{name}: documents for the chat template are not supported", parameter=name)


CONVERSATION_FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        "messages": _messages,
        "tools": objects,
        "add_generation_prompt": flag,
        "continue_final_message": flag,
        "chat_template": text,
        "chat_template_kwargs": check_variables,
        "reasoning_effort": one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "documents": _documents,
        "add_special_tokens": refused("the chat template writes special tokens"),
    }
)
"""Fields that the prompt of a conversation depends on."""

FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        **GENERATION_FIELDS,
        **CONVERSATION_FIELDS,
        "max_completion_tokens": limited,
        "logprobs": flag,
        "top_logprobs": whole(-1, MAX_LOGPROBS),
        "tool_choice": _tool_choice,
        "parallel_tool_calls": flag,
        "include_reasoning": flag,
    }
)


def chat_arguments(call: Call, fields: Fields) -> dict[str, Any]:
    """``EngineRequest.chat`` of a request: also for ``/tokenize``.

    Raises:
        RequestError: A template that the server does not take, or both ways to end the prompt.
    """
    config = call.frontend.config
    template = fields.get("chat_template")
    if template is not None and not config.trust_request_chat_template:
        message = "chat_template is not taken from requests; the server would need --trust-request-chat-template"
        raise RequestError(message, parameter="chat_template")
    if template is not None and "{{" not in template and "{%" not in template:
        # It would be taken for the name of a file.
        raise RequestError("chat_template must be a Jinja template", parameter="chat_template")
    continues = fields.get("continue_final_message", False)
    if continues and fields.get("add_generation_prompt", False):
        message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise RequestError(message, parameter="continue_final_message")
    variables = {**(config.default_chat_template_kwargs or {}), **fields.get("chat_template_kwargs", {})}
    if fields.get("reasoning_effort") is not None:
        variables["reasoning_effort"] = fields.get("reasoning_effort")
    given: dict[str, Any] = {
        "messages": fields.get("messages"),
        "tools": fields.get("tools") or None,
        "chat_template": template,
        "add_generation_prompt": fields.get("add_generation_prompt", not continues),
        "continue_final_message": continues,
        "chat_template_kwargs": variables or None,
    }
    return {name: value for name, value in given.items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatPlan:
    """A request, read.

    Attributes:
        options: How the answer is to be.
        params: How to sample.
        request: For the engine.
        tools: What it says of tools.
        include_reasoning: Whether reasoning is given.
        echo: Text that the answer begins with: the last message's, if that is echoed.
        num_top_logprobs: Of each token; None: no log probabilities are given.
    """

    options: AnswerOptions
    params: SamplingParams
    request: EngineRequest
    tools: ToolUse
    include_reasoning: bool
    echo: str
    num_top_logprobs: int | None


def chat_plan(call: Call, fields: Fields) -> ChatPlan:
    """Reads a request.

    Raises:
        RequestError: A wrong value.
    """
    frontend, options = call.frontend, answer_options(call, fields)
    tools = check_tools(
        frontend.parsers,
        frontend.config.enable_auto_tool_choice,
        fields.get("tools"),
        fields.get("tool_choice"),
        fields.get("parallel_tool_calls"),
    )
    num_top = _num_top_logprobs(fields)
    max_tokens = fields.get("max_completion_tokens", fields.get("max_tokens"))
    given: dict[str, Any] = {"max_tokens": max_tokens}
    if fields.get("logprob_token_ids") is None or num_top:
        given["logprobs"] = num_top
    if tools.needs_special_tokens and fields.get("skip_special_tokens") is None:
        given["skip_special_tokens"] = False
    params = sampling_params(frontend, fields, {**given, **_forced(fields, tools)}, is_chat=True)
    return ChatPlan(
        options=options,
        params=params,
        request=EngineRequest(chat=chat_arguments(call, fields), params=params, **engine_fields(call, fields)),
        tools=tools,
        include_reasoning=fields.get("include_reasoning", True),
        echo=_echo(fields, frontend.config.response_role),
        num_top_logprobs=num_top,
    )


def _forced(fields: Fields, tools: ToolUse) -> dict[str, Any]:
    """The structure that a tool choice forces the answer into.

    Raises:
        RequestError: The request asks for another one.
    """
    if tools.schema is None:
        return {}
    form = fields.get("response_format") or {"type": "text"}
    if fields.get("structured_outputs") is not None or form.get("type") != "text":
        message = "tool_choice that forces a call cannot be given together with a structure of the answer"
        raise RequestError(message, parameter="tool_choice")
    return {"structured_outputs": {"json": dict(tools.schema)}}


def _num_top_logprobs(fields: Fields) -> int | None:
    count, is_wanted = fields.get("top_logprobs"), fields.get("logprobs", False)
    if count and not is_wanted:
        message = "when using `top_logprobs`, `logprobs` must be set to true."
        raise RequestError(message, parameter="top_logprobs", value=count)
    if fields.get("logprob_token_ids") and not is_wanted:
        message = "when using `logprob_token_ids`, `logprobs` must be set to true."
        raise RequestError(message, parameter="logprob_token_ids")
    return (count or 0) if is_wanted else None


def _echo(fields: Fields, role: str) -> str:
    last = fields.get("messages")[-1]
    content = last.get("content")
    if not fields.get("echo", False) or last["role"] != role or content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part_text(part) or "" for part in content)
