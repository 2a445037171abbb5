"""``/v1/chat/completions``: replies in conversations."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp

from jaxserve.api.chat_messages import check_messages, part_text
from jaxserve.api.errors import RequestError
from jaxserve.api.field_checks import flag, text
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.parsers import MessageDelta, ParsedMessage, ToolCallDelta
from jaxserve.server.chat import chat_request, check_variables
from jaxserve.server.errors import NotImplementedRequestError
from jaxserve.server.http_api.endpoint import HttpCall
from jaxserve.server.http_api.fields import Check, json_object, limited, objects, one_of, refused, whole
from jaxserve.server.http_api.generation import (
    GENERATION_FIELDS,
    GenerationResponse,
    request_fields,
    sampling_fields,
    usage_object,
)
from jaxserve.server.http_api.logprobs import chat_logprobs, prompt_logprobs

MAX_LOGPROBS = 2**31
"""The engine has a lower limit of its own."""


def _tool_choice(name: str, value: Any) -> str | dict[str, Any]:
    return value if isinstance(value, str) else json_object(name, value)


def _documents(name: str, value: Any) -> None:
    if value != []:
        raise NotImplementedRequestError(f"{name}: documents for the chat template are not supported", parameter=name)


CONVERSATION_FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        "messages": check_messages,
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


async def chat_completions(call: HttpCall) -> ASGIApp:
    """Respond to a request."""
    made = await call.read(lambda: _ChatCompletions(call, call.fields(FIELDS, "messages")))
    return await made.respond()


class _ChatCompletions(GenerationResponse):
    def __init__(self, call: HttpCall, fields: Mapping[str, Any]):
        kind = "chat.completion.chunk" if fields.get("stream", False) else "chat.completion"
        super().__init__(call, fields, "chatcmpl", kind)
        has_logprobs, num_top = fields.get("logprobs", False), fields.get("top_logprobs")
        if not has_logprobs and (num_top or fields.get("logprob_token_ids")):
            name = "top_logprobs" if num_top else "logprob_token_ids"
            raise RequestError(f"when using `{name}`, `logprobs` must be set to true.", parameter=name)
        self._num_top_logprobs = (num_top or 0) if has_logprobs else None
        given = sampling_fields(fields)
        given["max_tokens"] = fields.get("max_completion_tokens", fields.get("max_tokens"))
        if self._num_top_logprobs or "logprob_token_ids" not in fields:
            given["logprobs"] = self._num_top_logprobs
        more = request_fields(call, fields)
        request, self._parser = chat_request(call.frontend, fields, given, request_id=self.head["id"], **more)
        self.params, self.requests = request.params, (request,)
        self._role = call.frontend.config.response_role
        self._has_begun = False
        self._echo = self._last_content(fields["messages"][-1]) if fields.get("echo", False) else ""

    def _last_content(self, message: Mapping[str, Any]) -> str:
        """Return the content of a message of the response's role, which the completion may continue; "" of another."""
        content = message.get("content") if message["role"] == self._role else None
        if isinstance(content, str | None):
            return content or ""
        return "\n".join(part_text(part) or "" for part in content)

    def choices(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        self._begin(output)
        if self.has_token_ids:
            self.more["prompt_token_ids"] = list(output.prompt_token_ids)
        if self.params.prompt_logprobs is not None:
            found = output.prompt_logprobs
            self.more["prompt_logprobs"] = None if found is None else prompt_logprobs(found)
        return [self._choice(one) for one in output.outputs]

    def _begin(self, output: RequestOutput) -> None:
        if self._parser is not None:
            self._parser.begin(self.requests[0], output.prompt)

    def _choice(self, one: CompletionOutput) -> dict[str, Any]:
        parsed = ParsedMessage(one.text or None) if self._parser is None else self._parser.whole(one.index, one.text)
        choice: dict[str, Any] = {
            "index": one.index,
            "message": self._message(parsed),
            "logprobs": self._logprobs(one),
            "finish_reason": self._finish_reason(one.index, one.finish_reason or "stop"),
            "stop_reason": one.stop_reason,
        }
        if self.has_token_ids:
            choice["token_ids"] = list(one.token_ids)
        return choice

    def _finish_reason(self, index: int, reason: str) -> str:
        return reason if self._parser is None else self._parser.finish_reason(index, reason)

    def _message(self, parsed: ParsedMessage) -> dict[str, Any]:
        content = parsed.content
        if self._echo or (content is None and not parsed.tool_calls and parsed.reasoning is None):
            content = self._echo + (content or "")
        message: dict[str, Any] = {"role": self._role, "content": content, "refusal": None}
        if parsed.reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in parsed.tool_calls
            ]
        return message

    def _logprobs(self, one: CompletionOutput) -> dict[str, Any] | None:
        if self._num_top_logprobs is None or one.logprobs is None:
            return None
        return chat_logprobs(
            one.token_ids,
            one.logprobs,
            num_top=self._num_top_logprobs,
            named=self.params.logprob_token_ids,
            as_ids=self.has_tokens_as_ids,
        )

    def chunks(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        first = [] if self._has_begun else self._first_chunks(output)
        self._has_begun = True
        choices = map(self._delta_choice, output.outputs)
        return [*first, *({"choices": [choice]} for choice in choices if choice is not None)]

    def _first_chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the chunks before any text: the role of each choice, and its echo."""
        self._begin(output)
        used = {"usage": usage_object(len(output.prompt_token_ids), 0)} if self.has_usage_always else {}
        ids = {"prompt_token_ids": list(output.prompt_token_ids)} if self.has_token_ids else {}
        found: list[dict[str, Any]] = []
        for index in range(self.params.n):
            found.append({"choices": [_chunk_choice(index, {"role": self._role, "content": ""})], **used, **ids})
            if self._echo:
                found.append({"choices": [_chunk_choice(index, {"content": self._echo})], **used})
        return found

    def _delta_choice(self, one: CompletionOutput) -> dict[str, Any] | None:
        """Return the delta of a choice; None if there is nothing to send."""
        reason = one.finish_reason
        delta: dict[str, Any] = {"content": one.text} if one.text else {}
        if self._parser is not None:
            delta = _delta_object(self._parser.feed(one.index, one.text, is_end=reason is not None))
        logprobs = self._logprobs(one) if self._num_top_logprobs is not None and one.token_ids else None
        has_ids = self.has_token_ids and bool(one.token_ids)
        if not (delta or reason or has_ids or logprobs):
            return None
        choice = {**_chunk_choice(one.index, delta), "logprobs": logprobs}
        if has_ids:
            choice["token_ids"] = list(one.token_ids)
        if reason is not None:
            choice["finish_reason"] = self._finish_reason(one.index, reason)
            choice["stop_reason"] = one.stop_reason
        return choice


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta_object(delta: MessageDelta) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if delta.reasoning:
        found["reasoning"] = found["reasoning_content"] = delta.reasoning
    if delta.content:
        found["content"] = delta.content
    if delta.tool_calls:
        found["tool_calls"] = [_call_delta(one) for one in delta.tool_calls]
    return found


def _call_delta(one: ToolCallDelta) -> dict[str, Any]:
    if one.id is None:
        return {"index": one.index, "function": {"arguments": one.arguments}}
    function = {"name": one.name, "arguments": one.arguments}
    return {"index": one.index, "id": one.id, "type": "function", "function": function}
