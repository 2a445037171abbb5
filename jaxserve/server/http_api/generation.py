"""What completions and chat completions share: fields, sampling parameters, outputs of the engine, and usage."""

import abc
import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from jaxserve.errors import RequestError
from jaxserve.field_checks import flag, text
from jaxserve.outputs import RequestOutput
from jaxserve.request import MAX_PRIORITY, Request
from jaxserve.sampling_options import SAMPLING_OPTIONS
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.chat import ToolUse
from jaxserve.server.errors import NotImplementedRequestError
from jaxserve.server.frontend import Frontend, new_request_id
from jaxserve.server.http_api.endpoint import LABEL, HttpCall
from jaxserve.server.http_api.fields import (
    Check,
    Fields,
    check_known,
    json_object,
    limited,
    one_of,
    read_fields,
    whole,
)
from jaxserve.server.http_api.responses import DONE, EventStream, json_response, json_text, unused_fields_header

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
        "cache_salt": text,
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
    return frontend.info.sampling_params(values, is_chat=tools is not None)


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


def engine_requests(
    call: HttpCall, fields: Fields, response_id: str, prompts: Sequence[Mapping[str, Any]], **arguments: Any
) -> list[Request]:
    """Return one request to the engine for each prompt, and note the label of the request for the log.

    Args:
        call: The request.
        fields: Its fields.
        response_id: Id of the response; names the requests.
        prompts: ``text``, ``token_ids`` or ``chat`` of each prompt.
        **arguments: More arguments of ``Request``.

    Raises:
        RequestError: A wrong value, or too many prompts.
    """
    config, headers, scope = call.frontend.config, call.request.headers, call.request.scope
    if len(prompts) > config.max_prompts:
        name = "input" if "input" in fields else "prompt"
        message = f"{name} must have at most {config.max_prompts} prompts, got {len(prompts)}"
        raise RequestError(message, parameter=name)
    label = fields.get("request_id")
    if label is not None and scope.get(LABEL) is None:
        scope[LABEL] = label[:128].encode("unicode_escape").decode("ascii")
    timeout_s, written = None, headers.get("x-request-timeout")
    if written is not None:
        with contextlib.suppress(ValueError):
            timeout_s = float(written)
        if timeout_s is None or not 0 < timeout_s < math.inf:
            message = f"the header X-Request-Timeout must be a number of seconds above 0, got {written[:40]!r}"
            raise RequestError(message, parameter="X-Request-Timeout", value=written)
    for name in ("priority", "cache_salt", "truncate_prompt_tokens", "add_special_tokens"):
        if fields.get(name) is not None:
            arguments[name] = fields[name]
    arguments["timeout_s"] = timeout_s
    arguments["is_strict_length"] = "max_tokens" in fields or "max_completion_tokens" in fields
    names = [response_id] if len(prompts) == 1 else [f"{response_id}-{index}" for index in range(len(prompts))]
    return [Request(request_id=name, **prompt, **arguments) for name, prompt in zip(names, prompts, strict=True)]


# ---------------------------------------------------------------------------------------------------------- responses


async def generate_all(call: HttpCall, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Admit requests together, and yield the outputs of each with the request's index, as they come.

    An error of one request aborts the others.

    Raises:
        JaxserveError: As ``Ledger.admit`` and ``Frontend.generate``.
    """
    frontend = call.frontend
    with frontend.ledger.admit(call.caller, sum(request.params.n for request in requests)):
        if len(requests) == 1:
            async with aclosing(frontend.generate(call.caller, requests[0])) as outputs:
                async for output in outputs:
                    yield 0, output
            return

        # At most one output waits here: while the reader is busy, the engine client merges the deltas of each request.
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(1)

        async def forward(index: int, request: Request) -> None:
            end: Exception | None = None
            try:
                async with aclosing(frontend.generate(call.caller, request)) as outputs:
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


def usage_object(num_prompt: int, num_generated: int) -> dict[str, Any]:
    """Return the object ``usage``."""
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_generated,
        "completion_tokens": num_generated,
    }


class GenerationResponse(abc.ABC):
    """A request for completions or chat completions, and its response, whole or streamed.

    Subclasses set ``params`` and ``requests``, one for each prompt, and write choices.

    Attributes:
        is_echo_only: Whether to leave out what is generated.
        head: The first fields of the response, its id among them.
        has_usage_always: Whether to put the usage into every event, and not only into the last.
        has_tokens_as_ids: Whether to write the tokens of log probabilities as ``token_id:7``.
        more: More fields of a whole response.

    Args:
        call: The request.
        fields: Its fields.
        id_prefix: What the response's id begins with.
        kind: ``object`` of the response.

    Raises:
        RequestError: Stream options or prompt log probabilities where they cannot be, or an unknown option.
    """

    params: SamplingParams
    requests: Sequence[Request]
    is_echo_only = False

    def __init__(self, call: HttpCall, fields: Fields, id_prefix: str, kind: str):
        config, given = call.frontend.config, fields.get("stream_options")
        self.call = call
        self.is_streamed = fields.get("stream", False)
        if given and not self.is_streamed:
            message = "Stream options can only be defined when `stream=True`."
            raise RequestError(message, parameter="stream_options")
        if self.is_streamed and fields.get("prompt_logprobs"):
            message = "`prompt_logprobs` are not available when `stream=True`."
            raise RequestError(message, parameter="prompt_logprobs")
        options = read_fields(given or {}, _STREAM_OPTIONS, needs=None, is_strict=config.strict)
        is_forced = config.enable_force_include_usage
        self.has_usage = is_forced or options.get("include_usage", False)
        self.has_usage_always = is_forced or (self.has_usage and options.get("continuous_usage_stats", False))
        self.has_token_ids = fields.get("return_token_ids", False)
        self.has_tokens_as_ids = fields.get("return_tokens_as_token_ids", config.return_tokens_as_token_ids)
        unused = [f"stream_options.{name}" for name in options.unused]
        form = fields.get("response_format") or {}
        form_type, schema = form.get("type"), form.get("json_schema")
        if isinstance(form_type, str) and form_type in _FORMAT_FIELDS:
            unused += [f"response_format.{name}" for name in form if name not in _FORMAT_FIELDS[form_type]]
            if form_type == "json_schema" and isinstance(schema, dict):
                unused += [f"response_format.json_schema.{name}" for name in schema if name not in _SCHEMA_FIELDS]
        if config.strict:
            check_known(unused, {})
        self._headers = unused_fields_header([*fields.unused, *unused])
        self.head = response_head(call.frontend, id_prefix, kind)
        self.more: dict[str, Any] = {}
        self._num_prompt_tokens: dict[int, int] = {}
        self._num_cached_tokens = 0
        self._num_generated_tokens: Counter[int] = Counter()

    @abc.abstractmethod
    async def choices(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the choices of the prompt with this index."""

    @abc.abstractmethod
    async def deltas(self, prompt: int, output: RequestOutput) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return deltas of choices of the prompt with this index, each with more fields of its chunk."""

    async def respond(self) -> Response:
        """Generate, and return the response."""
        if self.is_streamed:
            return EventStream(self._events(), self._headers)
        choices: list[dict[str, Any]] = []
        async with aclosing(generate_all(self.call, self.requests)) as outputs:
            async for prompt, output in outputs:
                self._count(prompt, output)
                choices += await self.choices(prompt, output)
        choices.sort(key=lambda choice: choice["index"])
        body = {**self.head, "choices": choices, **self.more, "usage": self._usage()}
        return json_response(body, headers=self._headers)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        begin = f"data: {json_text(self.head)[:-1]},"

        def event(**chunk: Any) -> bytes:
            return f"{begin}{json_text(chunk)[1:]}\n\n".encode("utf-8", "replace")

        async with aclosing(generate_all(self.call, self.requests)) as outputs:
            async for prompt, output in outputs:
                self._count(prompt, output)
                events = b""
                for choice, more in await self.deltas(prompt, output):
                    if self.has_usage_always and "usage" not in more:
                        num_generated = self._num_generated_tokens[choice["index"]]
                        more["usage"] = usage_object(self._num_prompt_tokens[prompt], num_generated)
                    events += event(choices=[choice], **more)
                if events:
                    yield events
        yield (event(choices=[], usage=self._usage()) if self.has_usage else b"") + DONE

    def _count(self, prompt: int, output: RequestOutput) -> None:
        """Count the tokens of an output of the prompt with this index."""
        if prompt not in self._num_prompt_tokens:
            self._num_prompt_tokens[prompt] = len(output.prompt_token_ids)
            self._num_cached_tokens += output.num_cached_tokens or 0
        for one in () if self.is_echo_only else output.outputs:
            self._num_generated_tokens[prompt * self.params.n + one.index] += len(one.token_ids)

    def _usage(self) -> dict[str, Any]:
        found = usage_object(sum(self._num_prompt_tokens.values()), self._num_generated_tokens.total())
        if self.call.frontend.config.enable_prompt_tokens_details:
            found["prompt_tokens_details"] = {"cached_tokens": self._num_cached_tokens}
        return found
