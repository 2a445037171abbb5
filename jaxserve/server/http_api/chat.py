"""``/v1/chat/completions``: answers in conversations."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.parsers import MessageDelta, ParsedMessage, ToolCallDelta
from jaxserve.server.chat_answer import ChatAnswer
from jaxserve.server.http_api.answer_parts import Chunks, Usage, answer_head
from jaxserve.server.http_api.chat_request import FIELDS, ChatPlan, chat_plan
from jaxserve.server.http_api.endpoint import Call
from jaxserve.server.http_api.engine_streams import generate_all
from jaxserve.server.http_api.logprob_objects import chat_logprobs, prompt_logprobs
from jaxserve.server.http_api.replies import DONE, EventStream, json_reply, unused_header


async def chat_completions(call: Call) -> Response | EventStream:
    """Answers a request."""
    fields = call.fields(FIELDS, "messages")
    kind = "chat.completion.chunk" if fields.get("stream", False) else "chat.completion"
    head = answer_head(call.frontend, "chatcmpl", kind, fields.get("model"))
    plan = chat_plan(call, fields)
    headers = unused_header(plan.options.unused)
    if plan.options.is_streamed:
        return EventStream(_Stream(call, plan, head).events(), headers)
    usage, body = Usage(call.frontend.config.enable_prompt_tokens_details), dict[str, Any]()
    async with aclosing(generate_all(call, [plan.request], head["id"])) as outputs:
        async for _, output in outputs:
            usage.note(0, output)
            body = _whole(call, plan, output)
    return json_reply({**head, **body, "usage": usage.as_object()}, headers=headers)


def _answer(call: Call, plan: ChatPlan, prompt: str | None) -> ChatAnswer:
    answer = ChatAnswer(
        call.frontend.parsers,
        plan.tools,
        include_reasoning=plan.include_reasoning,
        is_constrained=plan.params.structured_outputs is not None,
    )
    answer.begin(prompt)
    return answer


def _whole(call: Call, plan: ChatPlan, output: RequestOutput) -> dict[str, Any]:
    answer, choices = _answer(call, plan, output.prompt), list[dict[str, Any]]()
    for one in output.outputs:
        answer.feed(one.index, one.text, is_end=True)
        choice: dict[str, Any] = {
            "index": one.index,
            "message": _message(call, plan, answer.message(one.index)),
            "logprobs": _logprobs(plan, one),
            "finish_reason": answer.finish_reason(one.index, one.finish_reason or "stop"),
            "stop_reason": one.stop_reason,
        }
        if plan.options.has_token_ids:
            choice["token_ids"] = list(one.token_ids)
        choices.append(choice)
    body: dict[str, Any] = {"choices": choices}
    if plan.options.has_token_ids:
        body["prompt_token_ids"] = list(output.prompt_token_ids)
    if plan.params.prompt_logprobs is not None:
        found = output.prompt_logprobs
        body["prompt_logprobs"] = None if found is None else prompt_logprobs(found)
    return body


def _message(call: Call, plan: ChatPlan, parsed: ParsedMessage) -> dict[str, Any]:
    content = parsed.content
    if plan.echo or (content is None and not parsed.tool_calls and parsed.reasoning is None):
        content = plan.echo + (content or "")
    message: dict[str, Any] = {"role": call.frontend.config.response_role, "content": content, "refusal": None}
    if parsed.reasoning is not None:
        message["reasoning"] = message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in parsed.tool_calls
        ]
    return message


def _logprobs(plan: ChatPlan, one: CompletionOutput) -> dict[str, Any] | None:
    if plan.num_top_logprobs is None or one.logprobs is None:
        return None
    return chat_logprobs(
        one.token_ids,
        one.logprobs,
        num_top=plan.num_top_logprobs,
        named=plan.params.logprob_token_ids,
        as_ids=plan.options.has_tokens_as_ids,
    )


class _Stream:
    """One streamed answer."""

    def __init__(self, call: Call, plan: ChatPlan, head: dict[str, Any]):
        self._call = call
        self._plan = plan
        self._id = head["id"]
        self._chunks = Chunks(head)
        self._usage = Usage(call.frontend.config.enable_prompt_tokens_details)
        self._answer: ChatAnswer | None = None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """All of its events."""
        async with aclosing(generate_all(self._call, [self._plan.request], self._id)) as outputs:
            async for _, output in outputs:
                found = b"".join(self._news(output))
                if found:
                    yield found
        has_usage = self._plan.options.has_usage
        yield (self._chunks.event([], self._usage.as_object()) if has_usage else b"") + DONE

    def _news(self, output: RequestOutput) -> Iterator[bytes]:
        self._usage.note(0, output)
        if self._answer is None:
            self._answer = _answer(self._call, self._plan, output.prompt)
            yield from self._first(output)
        for one in output.outputs:
            choice = self._choice(self._answer, one)
            if choice is not None:
                yield self._chunk(choice)

    def _first(self, output: RequestOutput) -> Iterator[bytes]:
        """A chunk a choice that says who speaks, and what of the last message is echoed."""
        role = self._call.frontend.config.response_role
        for index in range(self._plan.params.n):
            ids = output.prompt_token_ids if self._plan.options.has_token_ids else None
            yield self._chunk(_chunk_choice(index, {"role": role, "content": ""}), ids, is_first=True)
            if self._plan.echo:
                yield self._chunk(_chunk_choice(index, {"content": self._plan.echo}), is_first=True)

    def _choice(self, answer: ChatAnswer, one: CompletionOutput) -> dict[str, Any] | None:
        """What is new of an answer; None where nothing is to be told."""
        reason = one.finish_reason
        delta = answer.feed(one.index, one.text, is_end=reason is not None)
        logprobs = _logprobs(self._plan, one) if one.token_ids else None
        has_ids = self._plan.options.has_token_ids and bool(one.token_ids)
        if not (delta or reason or has_ids or logprobs):
            return None
        choice = _chunk_choice(one.index, _delta(delta))
        choice["logprobs"] = logprobs
        if has_ids:
            choice["token_ids"] = list(one.token_ids)
        if reason is not None:
            choice["finish_reason"] = answer.finish_reason(one.index, reason)
            choice["stop_reason"] = one.stop_reason
        return choice

    def _chunk(
        self, choice: dict[str, Any], prompt_token_ids: Sequence[int] | None = None, *, is_first: bool = False
    ) -> bytes:
        used = None
        if self._plan.options.has_usage_always:
            used = self._usage.of_text(0, choice["index"], is_empty=is_first)
        return self._chunks.event([choice], used, prompt_token_ids)


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(delta: MessageDelta) -> dict[str, Any]:
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
