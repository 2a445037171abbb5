"""Fields that completions and chat have in common, and what becomes of them."""

import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.field_checks import flag, integer, text
from jaxserve.request import MAX_PRIORITY
from jaxserve.sampling_options import SAMPLING_OPTIONS
from jaxserve.sampling_params import SamplingParams, check_against
from jaxserve.server.errors import NotImplementedRequestError
from jaxserve.server.frontend import Frontend
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

SAMPLING_FIELDS = frozenset(SAMPLING_OPTIONS) | frozenset(
    "n seed stop stop_token_ids ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens"
    " include_stop_str_in_output allowed_token_ids bad_words logit_bias prompt_logprobs logprob_token_ids"
    " thinking_token_budget repetition_detection skip_reading_prefix_cache detokenize".split()
)
"""Passed on as they are, to be checked by the one validator of all surfaces."""

_FORMAT_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"text": ("type",), "json_object": ("type",), "json_schema": ("type", "json_schema")}
)
_SCHEMA_FIELDS = ("name", "description", "schema", "json_schema", "strict")

STREAM_OPTIONS: Mapping[str, Check] = MappingProxyType({"include_usage": flag, "continuous_usage_stats": flag})


def _left(name: str, value: Any) -> str:
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
        "truncation_side": _left,
    }
)
"""Fields of every request that the engine answers."""

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
"""Fields of completions and chat."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How a request wants its answer.

    Attributes:
        is_streamed: As events.
        has_usage: With a last event that gives usage.
        has_usage_always: With usage in each event.
        has_token_ids: With token ids.
        has_tokens_as_ids: Tokens of logprobs as ``token_id:7``.
        unused: Fields that change nothing.
    """

    is_streamed: bool = False
    has_usage: bool = False
    has_usage_always: bool = False
    has_token_ids: bool = False
    has_tokens_as_ids: bool = False
    unused: tuple[str, ...] = ()


def answer_options(call: Call, fields: Fields) -> AnswerOptions:
    """Reads how the answer is to be.

    Raises:
        RequestError: Options of a stream without one, or prompt logprobs in a stream.
    """
    config, is_streamed = call.frontend.config, fields.get("stream", False)
    given = fields.get("stream_options")
    if given and not is_streamed:
        message = "Stream options can only be defined when `stream=True`."
        raise RequestError(message, parameter="stream_options")
    if is_streamed and fields.get("prompt_logprobs"):
        message = "`prompt_logprobs` are not available when `stream=True`."
        raise RequestError(message, parameter="prompt_logprobs")
    options = read_fields(given or {}, STREAM_OPTIONS, needs=None, is_strict=config.strict)
    has_usage = options.get("include_usage", False) or config.enable_force_include_usage
    return AnswerOptions(
        is_streamed=is_streamed,
        has_usage=has_usage,
        has_usage_always=has_usage
        and (options.get("continuous_usage_stats", False) or config.enable_force_include_usage),
        has_token_ids=fields.get("return_token_ids", False),
        has_tokens_as_ids=fields.get("return_tokens_as_token_ids", config.return_tokens_as_token_ids),
        unused=(
            *fields.unused,
            *(f"stream_options.{name}" for name in options.unused),
            *_unused_of_format(fields.get("response_format") or {}, is_strict=config.strict),
        ),
    )


def _unused_of_format(form: Mapping[str, Any], *, is_strict: bool) -> list[str]:
    """Fields of a ``response_format`` that change nothing.

    Raises:
        RequestError: There is one, and unknown fields are errors.
    """
    kind = form.get("type")
    if kind is None or kind not in _FORMAT_FIELDS:
        return []
    tables = [("response_format", form, _FORMAT_FIELDS[kind])]
    if kind == "json_schema" and isinstance(form.get("json_schema"), dict):
        tables.append(("response_format.json_schema", form["json_schema"], _SCHEMA_FIELDS))
    unused = [f"{place}.{name}" for place, given, known in tables for name in given if name not in known]
    if is_strict:
        check_known(unused, {})
    return unused


def sampling_params(
    frontend: Frontend, fields: Fields, given: Mapping[str, Any], *, is_chat: bool = False
) -> SamplingParams:
    """The parameters of a request.

    Args:
        frontend: Knows the model's defaults.
        fields: Of the request.
        given: What the surface makes of fields that have other forms in ``SamplingParams``; it wins.
        is_chat: Whether it is a conversation.

    Raises:
        RequestError: A wrong value.
    """
    is_streamed = fields.get("stream", False)
    chosen = fields.chosen(SAMPLING_FIELDS)
    if is_streamed:
        chosen.pop("prompt_logprobs", None)  # it is 0, and streams show them nowhere
    values: dict[str, Any] = {
        **chosen,
        "structured_outputs": structure(fields),
        "extra_args": fields.get("vllm_xargs"),
        **given,
        "output_kind": "DELTA" if is_streamed else "FINAL_ONLY",
    }
    params = frontend.info.sampling_params(values, is_chat=is_chat)
    check_against(params, vocab_size=frontend.info.model.vocab_size, max_logprobs=-1)
    return params


def structure(fields: Fields) -> dict[str, Any] | None:
    """What the text must keep to, from ``structured_outputs`` and ``response_format``.

    Raises:
        RequestError: Both are given, or a format that there is not.
    """
    given, form = fields.get("structured_outputs"), fields.get("response_format")
    wanted = None if form is None else _response_format(form)
    if given is not None and wanted is not None:
        message = "response_format and structured_outputs cannot be given together"
        raise RequestError(message, parameter="response_format")
    if given is not None and isinstance(given.get("structural_tag"), dict):
        given = {**given, "structural_tag": json.dumps(given["structural_tag"])}
    return wanted if given is None else {name: value for name, value in given.items() if value is not None}


_KINDS = one_of("text", "json_object", "json_schema", "structural_tag")


def _response_format(form: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = _KINDS("response_format.type", form.get("type"))
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
    """The arguments of an ``EngineRequest`` that do not depend on its kind; notes the request's label.

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
        "is_strict_length": any(fields.get(name) is not None for name in ("max_tokens", "max_completion_tokens")),
    }
