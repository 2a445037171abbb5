"""What completions and chat completions share: fields, sampling parameters, outputs of the engine, and usage."""

import abc
import importlib.metadata
import json
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.api.draft_metrics import RequestSpecDecodeMetrics
from jaxserve.api.errors import RequestError
from jaxserve.api.field_checks import flag, text
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.request import MAX_PRIORITY, Request
from jaxserve.api.sampling_checks import RequestOutputKind
from jaxserve.api.sampling_options import SAMPLING_OPTIONS
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.server.byte_budget import output_bytes
from jaxserve.server.errors import NotImplementedRequestError
from jaxserve.server.frontend import Frontend, new_request_id
from jaxserve.server.http_api.endpoint import LABEL, HttpCall
from jaxserve.server.http_api.fields import (
    Check,
    check_known,
    json_object,
    limited,
    one_of,
    read_fields,
    whole,
)
from jaxserve.server.http_api.long_lists import json_pieces, long_response
from jaxserve.server.http_api.merged_outputs import generate_all, make_entries
from jaxserve.server.http_api.responses import DONE, json_response, json_text, send_events, unused_fields_header
from jaxserve.server.long_work import MAX_ENTRIES_ON_LOOP, is_long, num_entries
from jaxserve.server.settings import ServerConfig

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
_REQUEST_FIELDS = ("priority", "cache_salt", "truncate_prompt_tokens", "add_special_tokens")

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


def sampling_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that a request gives.

    Raises:
        RequestError: A wrong response format.
    """
    values = {name: value for name, value in fields.items() if name in SAMPLING_FIELDS}
    if "structured_outputs" in fields or "response_format" in fields:
        values["structured_outputs"] = _structured_outputs(fields)
    values["extra_args"] = fields.get("vllm_xargs")
    if fields.get("stream", False):
        values.pop("prompt_logprobs", None)  # it is 0, and streams do not show them
        values["output_kind"] = RequestOutputKind.DELTA
    else:
        values["output_kind"] = RequestOutputKind.FINAL_ONLY
    return values


def _structured_outputs(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``SamplingParams.structured_outputs`` from the field of that name or from ``response_format``.

    Raises:
        RequestError: Both are given, or an unknown format.
    """
    given, form = fields.get("structured_outputs"), fields.get("response_format")
    if given is None and not form:
        return None
    form = form or {"type": "text"}
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


def request_fields(call: HttpCall, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``Request`` for each prompt of a request, and note its label for the log.

    Raises:
        RequestError: A wrong time limit.
    """
    scope = call.request.scope
    if "request_id" in fields and scope.get(LABEL) is None:
        scope[LABEL] = fields["request_id"][:128].encode("unicode_escape").decode("ascii")
    return {
        **{name: fields[name] for name in _REQUEST_FIELDS if name in fields},
        "timeout_s": _timeout_s(call.request.headers.get("x-request-timeout")),
        "is_strict_length": "max_tokens" in fields or "max_completion_tokens" in fields,
    }


def _timeout_s(written: str | None) -> float | None:
    if written is None:
        return None
    try:
        timeout_s = float(written)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        message = f"the header X-Request-Timeout must be a number of seconds above 0, got {written[:40]!r}"
        raise RequestError(message, parameter="X-Request-Timeout", value=written)
    return timeout_s


def prompt_requests(
    call: HttpCall, fields: Mapping[str, Any], response_id: str, prompts: Sequence[Mapping[str, Any]], **arguments: Any
) -> list[Request]:
    """Return one request to the engine for each prompt.

    Args:
        call: The request.
        fields: Its fields.
        response_id: Id of the response; names the requests.
        prompts: ``text`` or ``token_ids`` of each prompt.
        **arguments: More arguments of ``Request``.

    Raises:
        RequestError: A wrong value, or too many prompts.
    """
    limit = call.frontend.config.max_prompts
    if len(prompts) > limit:
        name = "input" if "input" in fields else "prompt"
        raise RequestError(f"{name} must have at most {limit} prompts, got {len(prompts)}", parameter=name)
    names = [response_id] if len(prompts) == 1 else [f"{response_id}-{index}" for index in range(len(prompts))]
    arguments |= request_fields(call, fields)
    return [Request(request_id=name, **prompt, **arguments) for name, prompt in zip(names, prompts, strict=True)]


# ---------------------------------------------------------------------------------------------------------- responses


def response_head(frontend: Frontend, prefix: str, kind: str) -> dict[str, Any]:
    """Return the first fields of a response: a new id with this prefix, its kind, time, model and version."""
    return {
        "id": new_request_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": frontend.model_names[0],
        "system_fingerprint": f"jaxserve-{VERSION}-{frontend.info.fingerprint}",
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

    def __init__(self, call: HttpCall, fields: Mapping[str, Any], id_prefix: str, kind: str):
        config, options = call.frontend.config, fields.get("stream_options")
        self.call = call
        self.is_streamed = fields.get("stream", False)
        if options or fields.get("response_format"):
            call.unused += _unused_parts(fields, config)
        if options and not self.is_streamed:
            message = "Stream options can only be defined when `stream=True`."
            raise RequestError(message, parameter="stream_options")
        if self.is_streamed and fields.get("prompt_logprobs"):
            message = "`prompt_logprobs` are not available when `stream=True`."
            raise RequestError(message, parameter="prompt_logprobs")
        wanted = options or dict[str, bool]()
        self.has_usage = config.enable_force_include_usage or bool(wanted.get("include_usage"))
        self.has_usage_always = config.enable_force_include_usage or (
            self.has_usage and bool(wanted.get("continuous_usage_stats"))
        )
        self.has_token_ids = fields.get("return_token_ids", False)
        self.has_tokens_as_ids = fields.get("return_tokens_as_token_ids", config.return_tokens_as_token_ids)
        self._headers = unused_fields_header(call.unused) if call.unused else {}
        self.head = response_head(call.frontend, id_prefix, kind)
        self.more: dict[str, Any] = {}
        self._drafts: list[RequestSpecDecodeMetrics] = []

    @abc.abstractmethod
    def choices(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the choices of the prompt with this index."""

    @abc.abstractmethod
    def chunks(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return chunks with deltas of the choices of the prompt with this index."""

    async def prepare(self, prompt: int, output: RequestOutput) -> None:
        """Ask the engine for what the choices of an output need besides it."""
        del prompt, output

    async def respond(self) -> ASGIApp:
        """Return the response: a stream that generates, or all that was generated."""
        self._entries = await make_entries(self.call, self.requests)
        if self.is_streamed:
            return self._stream
        threads, turn = self.call.frontend.long_work, self.call.caller.turn
        choices: list[dict[str, Any]] = []
        num_found = 0
        async with aclosing(generate_all(self.call, self._entries)) as outputs:
            async for prompt, output in outputs:
                await self.prepare(prompt, output)
                self._note_drafts(output)
                self.call.hold(output_bytes(output))
                num_found += num_entries(output)
                choices += await threads.write_output(turn, output, self.choices, prompt)
        choices.sort(key=lambda choice: choice["index"])
        body = {**self.head, "choices": choices, **self.more, "usage": self._usage(), **self._metrics()}
        has_logprobs = self.params.num_logprobs is not None or self.params.prompt_logprobs is not None
        if has_logprobs or num_found > MAX_ENTRIES_ON_LOOP:
            return await long_response(body, self._headers, threads, turn)
        return json_response(body, headers=self._headers)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive  # ``Endpoint`` watches for a client that disconnects
        await send_events(self._events(), self._headers, send)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        threads, turn = self.call.frontend.long_work, self.call.caller.turn
        begin = f"data: {json_text(self.head)[:-1]},"
        async with aclosing(generate_all(self.call, self._entries)) as outputs:
            async for prompt, output in outputs:
                await self.prepare(prompt, output)
                self._note_drafts(output)
                events = await threads.write_output(turn, output, self._chunk_events, begin, prompt)
                if events:
                    yield events
        end = b""
        if self.has_usage:
            end = _event(begin, {"choices": [], "usage": self._usage(), **self._metrics()})
        yield end + DONE

    def _chunk_events(self, begin: str, prompt: int, output: RequestOutput) -> bytes:
        chunks = self.chunks(prompt, output)
        if self.has_usage_always:
            entry = self._entries[prompt]
            for chunk in chunks:
                index = chunk["choices"][0]["index"] % self.params.n
                num_generated = 0 if self.is_echo_only else entry.num_generated[index]
                chunk.setdefault("usage", usage_object(entry.num_prompt_tokens or 0, num_generated))
        write = _long_event if is_long(output) else _event
        return b"".join(write(begin, chunk) for chunk in chunks)

    def _note_drafts(self, output: RequestOutput) -> None:
        self._drafts += [one.spec_decode_metrics for one in output.outputs if one.spec_decode_metrics is not None]

    def _metrics(self) -> dict[str, Any]:
        """Return the field ``metrics`` if drafts are reported: null unless there is a single choice."""
        if not self._drafts:
            return {}
        first, *others = self._drafts
        return {"metrics": None if others else {"speculative_decoding": first.to_dict()}}

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(entry.num_prompt_tokens or 0 for entry in self._entries)
        num_generated = 0 if self.is_echo_only else sum(entry.num_generated.total() for entry in self._entries)
        found = usage_object(num_prompt, num_generated)
        if self.call.frontend.config.enable_prompt_tokens_details:
            found["prompt_tokens_details"] = {"cached_tokens": sum(entry.num_cached_tokens for entry in self._entries)}
        return found


def _event(begin: str, chunk: dict[str, Any]) -> bytes:
    return f"{begin}{json_text(chunk)[1:]}\n\n".encode("utf-8", "replace")


def _long_event(begin: str, chunk: dict[str, Any]) -> bytes:
    return begin.encode() + b"".join(json_pieces(chunk))[1:] + b"\n\n"


def _unused_parts(fields: Mapping[str, Any], config: ServerConfig) -> list[str]:
    """Check the stream options; return the names in them and in the response format that have no effect.

    Raises:
        RequestError: A wrong value or, if the server is strict, such a name.
    """
    given, form, unused = fields.get("stream_options"), fields.get("response_format"), list[str]()
    if given:
        _, unknown = read_fields(given, _STREAM_OPTIONS, needs=None, is_strict=config.strict)
        unused += [f"stream_options.{name}" for name in unknown]
    if form and isinstance(form.get("type"), str) and form["type"] in _FORMAT_FIELDS:
        unused += [f"response_format.{name}" for name in form if name not in _FORMAT_FIELDS[form["type"]]]
        schema = form.get("json_schema")
        if form["type"] == "json_schema" and isinstance(schema, dict):
            unused += [f"response_format.json_schema.{name}" for name in schema if name not in _SCHEMA_FIELDS]
    if unused and config.strict:
        check_known(unused, {})
    return unused
