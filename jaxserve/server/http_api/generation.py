"""What completions and chat completions share: fields, sampling parameters, outputs of the engine, and usage."""

import asyncio
import dataclasses
import hashlib
import importlib.metadata
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.field_checks import flag, integer, text
from jaxserve.outputs import RequestOutput
from jaxserve.request import MAX_PRIORITY
from jaxserve.sampling_options import SAMPLING_OPTIONS
from jaxserve.sampling_params import SamplingParams, check_against
from jaxserve.server.chat import ToolUse
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.errors import NotImplementedRequestError
from jaxserve.server.frontend import Frontend, new_request_id
from jaxserve.server.http_api.endpoint import LABEL, Call
from jaxserve.server.http_api.fields import (
    Check,
    Fields,
    check_known,
    filled_text,
    json_object,
    limited,
    one_of,
    read_fields,
    whole,
)
from jaxserve.server.http_api.responses import json_text

VERSION = importlib.metadata.version("jaxserve")

# ------------------------------------------------------------------------------------------------------------- fields

SAMPLING_FIELDS = frozenset(SAMPLING_OPTIONS) | frozenset(
    "n seed stop stop_token_ids ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens"
    " include_stop_str_in_output allowed_token_ids bad_words logit_bias prompt_logprobs logprob_token_ids"
    " thinking_token_budget repetition_detection skip_reading_prefix_cache detokenize".split()
)
"""Fields of ``SamplingParams``, which checks them."""

_FORMAT_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"text": ("type",), "json_object": ("type",), "json_schema": ("type", "json_schema")}
)
_SCHEMA_FIELDS = ("name", "description", "schema", "json_schema", "strict")
_STREAM_OPTIONS: Mapping[str, Check] = MappingProxyType({"include_usage": flag, "continuous_usage_stats": flag})
_FORMAT_TYPES = one_of("text", "json_object", "json_schema", "structural_tag")


def _truncation_side(name: str, value: Any) -> str:
    if one_of("left", "right")(name, value) == "right":
        raise NotImplementedRequestError("truncation_side='right' is not supported: the last tokens are kept")
    return value


PROMPT_FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        "model": text,
        "request_id": text,
        "priority": whole(-MAX_PRIORITY, MAX_PRIORITY),
        "cache_salt": filled_text,
        "truncate_prompt_tokens": whole(-1, MAX_PRIORITY),
        "truncation_side": _truncation_side,
    }
)
"""Fields of every request to the engine."""

GENERATION_FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        **dict.fromkeys(SAMPLING_FIELDS, limited),
        **PROMPT_FIELDS,
        "max_tokens": limited,
        "structured_outputs": json_object,
        "response_format": json_object,
        "vllm_xargs": json_object,
        "stream": flag,
        "stream_options": json_object,
        "return_token_ids": flag,
        "return_tokens_as_token_ids": flag,
        "echo": flag,
    }
)
"""Fields of completions and chat completions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """What a request asks of the form of its response.

    Attributes:
        is_streamed: Send events.
        has_usage: End the stream with an event that has the usage.
        has_usage_always: Put the usage into every event.
        has_token_ids: Include token ids.
        has_tokens_as_ids: Write the tokens of log probabilities as ``token_id:7``.
        unused: Fields that had no effect.
    """

    is_streamed: bool
    has_usage: bool
    has_usage_always: bool
    has_token_ids: bool
    has_tokens_as_ids: bool
    unused: tuple[str, ...]


def response_options(call: Call, fields: Fields) -> ResponseOptions:
    """Read the form of the response.

    Raises:
        RequestError: Stream options or prompt log probabilities where they cannot be, or an unknown option.
    """
    config, is_streamed, given = call.frontend.config, fields.get("stream", False), fields.get("stream_options")
    if given and not is_streamed:
        message = "Stream options can only be defined when `stream=True`."
        raise RequestError(message, parameter="stream_options")
    if is_streamed and fields.get("prompt_logprobs"):
        message = "`prompt_logprobs` are not available when `stream=True`."
        raise RequestError(message, parameter="prompt_logprobs")
    options = read_fields(given or {}, _STREAM_OPTIONS, needs=None, is_strict=config.strict)
    has_usage = options.get("include_usage", False) or config.enable_force_include_usage

    form = fields.get("response_format") or {}
    kind, unused = form.get("type"), list[str]()
    if isinstance(kind, str) and kind in _FORMAT_FIELDS:
        unused += [f"response_format.{name}" for name in form if name not in _FORMAT_FIELDS[kind]]
        if kind == "json_schema" and isinstance(form.get("json_schema"), dict):
            schema_fields = [name for name in form["json_schema"] if name not in _SCHEMA_FIELDS]
            unused += [f"response_format.json_schema.{name}" for name in schema_fields]
    if config.strict:
        check_known(unused, {})
    return ResponseOptions(
        is_streamed=is_streamed,
        has_usage=has_usage,
        has_usage_always=has_usage
        and (options.get("continuous_usage_stats", False) or config.enable_force_include_usage),
        has_token_ids=fields.get("return_token_ids", False),
        has_tokens_as_ids=fields.get("return_tokens_as_token_ids", config.return_tokens_as_token_ids),
        unused=(*fields.unused, *(f"stream_options.{name}" for name in options.unused), *unused),
    )


def sampling_params(
    frontend: Frontend, fields: Fields, given: Mapping[str, Any], tools: ToolUse | None = None
) -> SamplingParams:
    """Make the sampling parameters of a request.

    Args:
        frontend: Knows the model's defaults.
        fields: Of the request.
        given: Parameters that the endpoint derives from fields of other names or forms; they win.
        tools: Of a conversation; None for other prompts.

    Raises:
        RequestError: A wrong value.
    """
    is_streamed = fields.get("stream", False)
    values: dict[str, Any] = {
        **{name: value for name, value in fields.items() if name in SAMPLING_FIELDS},
        "structured_outputs": _structured_outputs(fields),
        "extra_args": fields.get("vllm_xargs"),
        "output_kind": "DELTA" if is_streamed else "FINAL_ONLY",
    }
    if is_streamed:
        values.pop("prompt_logprobs", None)  # it is 0, and streams do not show them
    values |= given
    if tools is not None:
        values |= tools.sampling_fields(values)
    params = frontend.info.sampling_params(values, is_chat=tools is not None)
    check_against(params, vocab_size=frontend.info.model.vocab_size, max_logprobs=-1)
    return params


def _structured_outputs(fields: Fields) -> dict[str, Any] | None:
    """Return ``SamplingParams.structured_outputs`` from the field of that name or from ``response_format``.

    Raises:
        RequestError: Both are given, or an unknown format.
    """
    given, form = fields.get("structured_outputs"), fields.get("response_format") or {"type": "text"}
    kind = _FORMAT_TYPES("response_format.type", form.get("type"))
    if given is not None:
        if kind != "text":
            message = "response_format and structured_outputs cannot be given together"
            raise RequestError(message, parameter="response_format")
        if isinstance(given.get("structural_tag"), dict):
            given = {**given, "structural_tag": json.dumps(given["structural_tag"])}
        return {name: value for name, value in given.items() if value is not None}
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(form)}
    described = json_object("response_format.json_schema", form.get("json_schema"))
    schema = described.get("schema", described.get("json_schema"))
    if schema is None:
        name = "response_format.json_schema.schema"
        raise RequestError(f"{name} is missing", parameter=name)
    return {"json": schema}


def engine_fields(call: Call, fields: Fields) -> dict[str, Any]:
    """Return the arguments of ``EngineRequest`` that all endpoints share, and note the request's label for the log.

    Raises:
        RequestError: A wrong value.
    """
    label = fields.get("request_id")
    if label is not None and call.request.scope.get(LABEL) is None:
        call.request.scope[LABEL] = label[:128].encode("unicode_escape").decode("ascii")
    length = fields.get("truncate_prompt_tokens")
    if length is not None:
        integer("truncate_prompt_tokens", length, 1 if length != -1 else -1)
    return {
        "priority": fields.get("priority", 0),
        "cache_salt": fields.get("cache_salt"),
        "truncate_prompt_tokens": length,
        "timeout_s": call.timeout_s,
        "is_strict_length": "max_tokens" in fields or "max_completion_tokens" in fields,
    }


# ------------------------------------------------------------------------------------------------------------ outputs


async def generate_all(
    call: Call, requests: Sequence[EngineRequest], response_id: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Admit requests together, and yield the outputs of each with the request's index, as they come.

    An error of one request aborts the others.

    Raises:
        JaxserveError: As ``Frontend.admit`` and ``Frontend.generate``.
    """
    frontend = call.frontend
    with frontend.admit(call.caller, sum(request.params.n for request in requests)):
        if len(requests) == 1:
            async with aclosing(frontend.generate(call.caller, requests[0], response_id)) as outputs:
                async for output in outputs:
                    yield 0, output
            return

        # At most one output waits here: while nobody reads, the engine client merges the deltas of each request.
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(1)

        async def forward(index: int, request: EngineRequest) -> None:
            end: Exception | None = None
            try:
                async with aclosing(frontend.generate(call.caller, request, f"{response_id}-{index}")) as outputs:
                    async for output in outputs:
                        await queue.put((index, output))
            except Exception as error:
                end = error
            await queue.put((index, end))

        tasks = [asyncio.create_task(forward(index, request)) for index, request in enumerate(requests)]
        try:
            num_left = len(tasks)
            while num_left:
                index, output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                if output is None:
                    num_left -= 1
                else:
                    yield index, output
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


# ---------------------------------------------------------------------------------------------------------- responses


def response_head(frontend: Frontend, prefix: str, kind: str) -> dict[str, Any]:
    """Return the first fields of a response: a new id with this prefix, its kind, time, model and version."""
    digest = hashlib.sha256(frontend.info.model.SerializeToString(deterministic=True)).hexdigest()
    return {
        "id": new_request_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": frontend.model_names[0],
        "system_fingerprint": f"jaxserve-{VERSION}-{digest[:8]}",
    }


class Chunks:
    """Writes the chunks of a stream as events.

    Args:
        head: The fields that each chunk begins with.
    """

    def __init__(self, head: dict[str, Any]):
        self._begin = f"data: {json_text(head)[:-1]}"

    def event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, **more: Any) -> bytes:
        """Return a chunk with its choices, the usage if given, and more fields."""
        if usage is not None:
            more = {"usage": usage, **more}
        return f"{self._begin},{json_text({'choices': choices, **more})[1:]}\n\n".encode("utf-8", "replace")


class Usage:
    """Counts the tokens of a request's prompts and completions.

    Args:
        has_details: Whether to show how many prompt tokens the prefix cache had.
    """

    def __init__(self, has_details: bool = False):
        self._has_details = has_details
        self._num_prompt: dict[int, int] = {}
        self._num_generated: Counter[tuple[int, int]] = Counter()
        self._num_cached = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Count an output, whole or a delta, of the prompt with this index."""
        if prompt not in self._num_prompt:
            self._num_prompt[prompt] = len(output.prompt_token_ids)
            self._num_cached += output.num_cached_tokens or 0
        for one in output.outputs:
            self._num_generated[prompt, one.index] += len(one.token_ids)

    def total(self) -> dict[str, Any]:
        """Return the usage of all prompts and completions so far."""
        found = usage_object(sum(self._num_prompt.values()), self._num_generated.total())
        if self._has_details:
            found["prompt_tokens_details"] = {"cached_tokens": self._num_cached}
        return found

    def of_choice(self, prompt: int, index: int) -> dict[str, Any]:
        """Return the usage so far of one completion and its prompt."""
        return usage_object(self._num_prompt[prompt], self._num_generated[prompt, index])


def usage_object(num_prompt: int, num_generated: int) -> dict[str, Any]:
    """Return the object ``usage``."""
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_generated,
        "completion_tokens": num_generated,
    }
