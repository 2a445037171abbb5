"""``/v1/completions``: text that continues prompts."""

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from jaxserve.errors import RequestError
from jaxserve.field_checks import flag
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.http_api.endpoint import Call
from jaxserve.server.http_api.fields import Check, Fields, limited, prompts, refused
from jaxserve.server.http_api.generation import (
    GENERATION_FIELDS,
    Chunks,
    ResponseOptions,
    Usage,
    engine_fields,
    generate_all,
    response_head,
    response_options,
    sampling_params,
)
from jaxserve.server.http_api.logprobs import completion_logprobs, end_offset, prompt_logprobs
from jaxserve.server.http_api.responses import DONE, EventStream, json_response, unused_fields_header

FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        **GENERATION_FIELDS,
        "prompt": prompts,
        "logprobs": limited,
        "best_of": limited,
        "suffix": refused("text is only generated after a prompt"),
        "add_special_tokens": flag,
    }
)


async def completions(call: Call) -> Response:
    """Respond to a request."""
    fields = call.fields(FIELDS, "prompt")
    options = response_options(call, fields)
    response = _CompletionsResponse(call, fields, options)
    headers = unused_fields_header(options.unused)
    if options.is_streamed:
        return EventStream(response.events(), headers)
    return json_response(await response.whole(), headers=headers)


class _CompletionsResponse:
    """A request and its response, whole or streamed.

    Raises:
        RequestError: A field that is wrong.
    """

    def __init__(self, call: Call, fields: Fields, options: ResponseOptions):
        self._has_echo, max_tokens = fields.get("echo", False), fields.get("max_tokens")
        # With max_tokens=0 a token is generated, since the engine generates at least one, and left out.
        self._is_echo_only = self._has_echo and max_tokens == 0 and max_tokens is not False
        if "best_of" in fields and fields["best_of"] != fields.get("n", 1):
            message = f"best_of is not supported unless it equals n={fields.get('n', 1)}"
            raise RequestError(message, parameter="best_of", value=fields["best_of"])
        logprobs = fields.get("logprobs")
        given: dict[str, Any] = {"max_tokens": 1 if self._is_echo_only else max_tokens, "logprobs": logprobs}
        if self._has_echo and logprobs is not None and (options.is_streamed or "prompt_logprobs" not in fields):
            given["prompt_logprobs"] = logprobs
        self._params = sampling_params(call.frontend, fields, given)
        more = {**engine_fields(call, fields), "add_special_tokens": fields.get("add_special_tokens", True)}
        self._requests = [
            EngineRequest(**prompt, **more, params=self._params) for prompt in call.checked_prompts("prompt", fields)
        ]
        self._call = call
        self._options = options
        self._has_prompt_logprobs = "prompt_logprobs" in fields
        self._usage = Usage(call.frontend.config.enable_prompt_tokens_details)
        self._head = response_head(call.frontend, "cmpl", "text_completion")
        self._first_fields: dict[int, dict[str, Any]] = {}
        self._offsets: dict[int, int] = {}

    async def whole(self) -> dict[str, Any]:
        """Return the response as one object."""
        choices: list[dict[str, Any]] = []
        async with aclosing(generate_all(self._call, self._requests, self._head["id"])) as outputs:
            async for prompt, output in outputs:
                choices += await self._choices(prompt, output)
        choices.sort(key=lambda choice: choice["index"])
        return {**self._head, "choices": choices, "usage": self._usage.total()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as events."""
        chunks, options = Chunks(self._head), self._options
        async with aclosing(generate_all(self._call, self._requests, self._head["id"])) as outputs:
            async for prompt, output in outputs:
                events = b""
                for choice in await self._choices(prompt, output):
                    if options.has_token_ids or choice["text"] or choice["finish_reason"] or choice["logprobs"]:
                        index = choice["index"] - prompt * self._params.n
                        used = self._usage.of_choice(prompt, index) if options.has_usage_always else None
                        events += chunks.event([choice], used)
                if events:
                    yield events
        yield (chunks.event([], self._usage.total()) if options.has_usage else b"") + DONE

    async def _choices(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the choices, or the deltas of choices, that an output of the prompt with this index gives."""
        if self._is_echo_only:
            output = dataclasses.replace(output, outputs=[_without_text(one) for one in output.outputs])
        self._usage.add(prompt, output)
        if prompt not in self._first_fields:
            self._first_fields[prompt] = await self._read_prompt(output)
        return [self._choice(prompt, one) for one in output.outputs]

    async def _read_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Return what the prompt adds to its choices: text and log probabilities of an echo, and fields of its own."""
        ids, positions, engine = output.prompt_token_ids, output.prompt_logprobs, self._call.frontend.engine
        found: dict[str, Any] = {"text": "", "logprobs": None}
        if self._has_echo:
            is_cut = self._requests[0].truncate_prompt_tokens is not None
            has_text = output.prompt is not None and not is_cut
            found["text"] = output.prompt if has_text else await engine.detokenize(ids)
            if self._params.logprobs is not None and positions is not None:
                as_ids, first = self._options.has_tokens_as_ids, await engine.detokenize(ids[:1])
                found["logprobs"] = completion_logprobs(ids, positions, as_ids=as_ids, first_token=first)
        if self._has_prompt_logprobs:
            found["prompt_logprobs"] = None if positions is None else prompt_logprobs(positions)
        if self._options.has_token_ids:
            found["prompt_token_ids"] = list(ids)
        return found

    def _choice(self, prompt: int, one: CompletionOutput) -> dict[str, Any]:
        index = prompt * self._params.n + one.index
        first = {} if index in self._offsets else self._first_fields[prompt]
        logprobs = first.get("logprobs")
        offset = self._offsets.get(index, 0) if logprobs is None else end_offset(logprobs)
        if one.logprobs is not None and one.token_ids:
            as_ids = self._options.has_tokens_as_ids
            own = completion_logprobs(one.token_ids, one.logprobs, offset=offset, as_ids=as_ids)
            offset = end_offset(own)
            logprobs = own if logprobs is None else {name: [*logprobs[name], *own[name]] for name in own}
        self._offsets[index] = offset
        choice: dict[str, Any] = {
            "index": index,
            **first,
            "text": first.get("text", "") + one.text,
            "logprobs": logprobs,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._options.has_token_ids:
            choice["token_ids"] = list(one.token_ids)
        return choice


def _without_text(one: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(one.index, "", [], finish_reason=None if one.finish_reason is None else "length")
