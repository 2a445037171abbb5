"""``/v1/completions``: texts that go on from prompts."""

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from jaxserve.errors import RequestError
from jaxserve.field_checks import flag
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.http_api.answer_parts import Chunks, Usage, answer_head
from jaxserve.server.http_api.endpoint import Call
from jaxserve.server.http_api.engine_streams import generate_all
from jaxserve.server.http_api.fields import Check, Fields, limited, refused
from jaxserve.server.http_api.generation_fields import (
    GENERATION_FIELDS,
    AnswerOptions,
    answer_options,
    engine_fields,
    sampling_params,
)
from jaxserve.server.http_api.logprob_objects import completion_logprobs, end_offset, joined, prompt_logprobs
from jaxserve.server.http_api.prompts import checked_prompts, prompt_arguments
from jaxserve.server.http_api.replies import DONE, EventStream, json_reply, unused_header

FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        **GENERATION_FIELDS,
        "prompt": prompt_arguments,
        "logprobs": limited,
        "best_of": limited,
        "suffix": refused("text is only written behind a prompt"),
        "add_special_tokens": flag,
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """A request, read.

    Attributes:
        options: How the answer is to be.
        params: How to sample.
        requests: One a prompt.
        has_echo: Begin with the prompt.
        is_echo_only: Leave out what is generated: ``max_tokens`` is 0.
        has_prompt_logprobs: Give them in a field of their own.
    """

    options: AnswerOptions
    params: SamplingParams
    requests: list[EngineRequest]
    has_echo: bool
    is_echo_only: bool
    has_prompt_logprobs: bool


async def completions(call: Call) -> Response | EventStream:
    """Answers a request."""
    fields = call.fields(FIELDS, "prompt")
    head = answer_head(call.frontend, "cmpl", "text_completion", fields.get("model"))
    plan = _plan(call, fields)
    headers = unused_header(plan.options.unused)
    if plan.options.is_streamed:
        return EventStream(_events(call, plan, head), headers)
    answer, choices = _Answer(call, plan), list[dict[str, Any]]()
    async with aclosing(generate_all(call, plan.requests, head["id"])) as outputs:
        async for place, output in outputs:
            choices += await answer.choices(place, output)
    choices.sort(key=lambda choice: choice["index"])
    return json_reply({**head, "choices": choices, "usage": answer.usage.as_object()}, headers=headers)


def _plan(call: Call, fields: Fields) -> _Plan:
    options = answer_options(call, fields)
    has_echo, max_tokens = fields.get("echo", False), fields.get("max_tokens")
    is_echo_only = has_echo and max_tokens == 0 and max_tokens is not False
    if fields.get("best_of") is not None and fields.get("best_of") != fields.get("n", 1):
        message = "best_of must be n: the best of more texts is not looked for"
        raise RequestError(message, parameter="best_of", value=fields.get("best_of"))
    given: dict[str, Any] = {"max_tokens": 1 if is_echo_only else max_tokens, "logprobs": fields.get("logprobs")}
    if has_echo and given["logprobs"] is not None and (options.is_streamed or fields.get("prompt_logprobs") is None):
        given["prompt_logprobs"] = given["logprobs"]
    params = sampling_params(call.frontend, fields, given)
    common = {**engine_fields(call, fields), "add_special_tokens": fields.get("add_special_tokens", True)}
    return _Plan(
        options=options,
        params=params,
        requests=[
            EngineRequest(**prompt, **common, params=params) for prompt in checked_prompts(call, "prompt", fields)
        ],
        has_echo=has_echo,
        is_echo_only=is_echo_only,
        has_prompt_logprobs=fields.get("prompt_logprobs") is not None,
    )


async def _events(call: Call, plan: _Plan, head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    chunks, answer, options = Chunks(head), _Answer(call, plan), plan.options
    async with aclosing(generate_all(call, plan.requests, head["id"])) as outputs:
        async for place, output in outputs:
            found = b""
            for choice in await answer.choices(place, output):
                if options.has_token_ids or _has_news(choice):
                    index = choice["index"] - place * plan.params.n
                    used = answer.usage.of_text(place, index) if options.has_usage_always else None
                    found += chunks.event([choice], used)
            if found:
                yield found
    last = chunks.event([], answer.usage.as_object()) if options.has_usage else b""
    yield last + DONE


def _has_news(choice: dict[str, Any]) -> bool:
    return bool(choice["text"] or choice["finish_reason"] or choice["logprobs"])


class _Answer:
    """Makes choices of outputs, or of what is new of them."""

    def __init__(self, call: Call, plan: _Plan):
        self.usage = Usage(call.frontend.config.enable_prompt_tokens_details)
        self._engine = call.frontend.engine
        self._plan = plan
        self._prompts: dict[int, dict[str, Any]] = {}
        self._offsets: dict[int, int] = {}

    async def choices(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices, or parts of them, that an output of the prompt at ``place`` gives."""
        self.usage.note(place, output, counts_texts=not self._plan.is_echo_only)
        if place not in self._prompts:
            self._prompts[place] = await self._prompt_parts(output)
        return [self._choice(place, one) for one in output.outputs]

    async def _prompt_parts(self, output: RequestOutput) -> dict[str, Any]:
        """What a prompt adds to its choices: text and logprobs of an echo, ids and logprobs in fields of their own."""
        plan, ids = self._plan, output.prompt_token_ids
        parts: dict[str, Any] = {"text": "", "logprobs": None, "own": {}}
        positions = output.prompt_logprobs
        if plan.has_echo:
            is_cut = plan.requests[0].truncate_prompt_tokens is not None
            text = None if is_cut else output.prompt
            parts["text"] = await self._engine.detokenize(ids) if text is None else text
            if plan.params.logprobs is not None and positions is not None:
                parts["logprobs"] = completion_logprobs(
                    ids,
                    positions,
                    as_ids=plan.options.has_tokens_as_ids,
                    first_token=await self._engine.detokenize(ids[:1]),
                )
        if plan.has_prompt_logprobs:
            parts["own"]["prompt_logprobs"] = None if positions is None else prompt_logprobs(positions)
        if plan.options.has_token_ids:
            parts["own"]["prompt_token_ids"] = list(ids)
        return parts

    def _choice(self, place: int, one: CompletionOutput) -> dict[str, Any]:
        plan = self._plan
        index = place * plan.params.n + one.index
        is_first = index not in self._offsets
        prompt = self._prompts[place] if is_first else {"text": "", "logprobs": None, "own": {}}
        text, ids, reason = one.text, one.token_ids, one.finish_reason
        if plan.is_echo_only:
            text, ids, reason = "", [], reason and "length"
        logprobs = self._logprobs(index, prompt["logprobs"], one)
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt["text"] + text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": None if plan.is_echo_only else one.stop_reason,
        }
        if plan.options.has_token_ids:
            choice["token_ids"] = list(ids)
        return {**choice, **prompt["own"]}

    def _logprobs(self, index: int, logprobs: dict[str, Any] | None, one: CompletionOutput) -> dict[str, Any] | None:
        """Those of a choice's new tokens, behind those of the prompt where it is echoed."""
        offset = self._offsets.get(index, 0) if logprobs is None else end_offset(logprobs)
        if one.logprobs is not None and one.token_ids and not self._plan.is_echo_only:
            as_ids = self._plan.options.has_tokens_as_ids
            own = completion_logprobs(one.token_ids, one.logprobs, offset=offset, as_ids=as_ids)
            logprobs = own if logprobs is None else joined(logprobs, own)
        self._offsets[index] = offset if logprobs is None else end_offset(logprobs)
        return logprobs
