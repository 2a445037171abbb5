"""``/v1/completions``: text that continues prompts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp

from jaxserve.api.errors import RequestError
from jaxserve.api.field_checks import flag
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.server.frontend import sampling_params
from jaxserve.server.http_api.endpoint import HttpCall
from jaxserve.server.http_api.fields import Check, limited, prompts, refused
from jaxserve.server.http_api.generation import (
    GENERATION_FIELDS,
    GenerationResponse,
    prompt_requests,
    sampling_fields,
)
from jaxserve.server.http_api.logprobs import completion_logprobs, joined_logprobs, prompt_logprobs

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


async def completions(call: HttpCall) -> ASGIApp:
    """Respond to a request."""
    made = await call.read(lambda: _Completions(call, call.fields(FIELDS, "prompt")))
    return await made.respond()


class _Completions(GenerationResponse):
    def __init__(self, call: HttpCall, fields: Mapping[str, Any]):
        super().__init__(call, fields, "cmpl", "text_completion")
        self._has_echo, max_tokens = fields.get("echo", False), fields.get("max_tokens")
        # With max_tokens=0 a token is generated, since the engine generates at least one, and left out.
        self.is_echo_only = self._has_echo and max_tokens == 0 and max_tokens is not False
        if "best_of" in fields and fields["best_of"] != fields.get("n", 1):
            message = f"best_of is not supported unless it equals n={fields.get('n', 1)}"
            raise RequestError(message, parameter="best_of", value=fields["best_of"])
        logprobs = fields.get("logprobs")
        given: dict[str, Any] = {"max_tokens": 1 if self.is_echo_only else max_tokens, "logprobs": logprobs}
        if self._has_echo and logprobs is not None and (self.is_streamed or "prompt_logprobs" not in fields):
            given["prompt_logprobs"] = logprobs
        self.params = sampling_params(call.frontend.info, {**sampling_fields(fields), **given})
        self.requests = prompt_requests(call, fields, self.head["id"], fields["prompt"], params=self.params)
        self._has_prompt_logprobs = "prompt_logprobs" in fields
        self._echoes: dict[int, tuple[str, str]] = {}  # the text of a prompt, and of its first token
        self._first_fields: dict[int, dict[str, Any]] = {}
        self._num_characters: dict[int, int] = {}

    async def prepare(self, prompt: int, output: RequestOutput) -> None:
        if self._has_echo and prompt not in self._echoes:
            ids, engine = output.prompt_token_ids, self.call.frontend.engine
            is_cut = self.requests[0].truncate_prompt_tokens is not None
            text = None if is_cut else output.prompt
            has_logprobs = self.params.logprobs is not None and output.prompt_logprobs is not None
            turn = self.call.caller.turn
            first = await engine.detokenize(ids[:1], turn=turn) if has_logprobs else ""
            self._echoes[prompt] = await engine.detokenize(ids, turn=turn) if text is None else text, first

    def choices(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        if prompt not in self._first_fields:
            self._first_fields[prompt] = self._prompt_fields(prompt, output)
        return [self._choice(prompt, one) for one in output.outputs]

    def chunks(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        return [
            {"choices": [choice]}
            for choice in self.choices(prompt, output)
            if self.has_token_ids or choice["text"] or choice["finish_reason"] or choice["logprobs"]
        ]

    def _prompt_fields(self, prompt: int, output: RequestOutput) -> dict[str, Any]:
        """Return what the prompt adds to its choices: text and log probabilities of an echo, and fields of its own."""
        ids, positions = output.prompt_token_ids, output.prompt_logprobs
        text, first = self._echoes.get(prompt, ("", ""))
        found: dict[str, Any] = {"text": text, "logprobs": None}
        if self._has_echo and self.params.logprobs is not None and positions is not None:
            as_ids = self.has_tokens_as_ids
            found["logprobs"] = completion_logprobs(ids, positions, as_ids=as_ids, first_token=first)
        if self._has_prompt_logprobs:
            found["prompt_logprobs"] = None if positions is None else prompt_logprobs(positions)
        if self.has_token_ids:
            found["prompt_token_ids"] = list(ids)
        return found

    def _choice(self, prompt: int, one: CompletionOutput) -> dict[str, Any]:
        if self.is_echo_only:
            reason = None if one.finish_reason is None else "length"
            one = CompletionOutput(one.index, "", [], finish_reason=reason)
        index = prompt * self.params.n + one.index
        first = {} if index in self._num_characters else self._first_fields[prompt]
        logprobs, begin = first.get("logprobs"), len(self._first_fields[prompt]["text"])
        offset = self._num_characters.setdefault(index, begin)
        if one.logprobs is not None and one.token_ids:
            as_ids = self.has_tokens_as_ids
            own = completion_logprobs(one.token_ids, one.logprobs, begin=begin, offset=offset, as_ids=as_ids)
            logprobs = own if logprobs is None else joined_logprobs(logprobs, own)
        self._num_characters[index] += len(one.text)
        choice: dict[str, Any] = {
            "index": index,
            **first,
            "text": first.get("text", "") + one.text,
            "logprobs": logprobs,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self.has_token_ids:
            choice["token_ids"] = list(one.token_ids)
        return choice
