"""``SamplingParams`` as a message and back. Each field is plain or in one of the tables below: a test compares them."""

import dataclasses
import json
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.proto.jaxserve.v1 import sampling_pb2
from jaxserve.structured_params import RepetitionDetectionParams, StructuredOutputsParams

LIST_FIELDS = ("stop", "stop_token_ids", "logprob_token_ids", "bad_words")
"""Repeated fields: empty is the same as not given."""
OWN_FIELDS = ("logit_bias", "allowed_token_ids", "structured_outputs", "repetition_detection", "extra_args")
"""Fields with a form of their own."""
PYTHON_FIELDS = ("flat_logprobs", "output_kind")
"""How Python's outputs look; no part of the protocol."""

ALL_TOKENS = -1
"""Stands for ``max_tokens=None`` in messages: as many as the context holds."""

_DEFAULTS = SamplingParams()
_PLAIN_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in (*LIST_FIELDS, *OWN_FIELDS, *PYTHON_FIELDS)
)


def given_fields(message: sampling_pb2.SamplingParams) -> dict[str, Any]:
    """The fields that a message has, as arguments of ``SamplingParams``, which checks them.

    Raises:
        RequestError: ``extra_args_json`` is not JSON.
    """
    given: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN_FIELDS if message.HasField(name)}
    given |= {name: list(getattr(message, name)) for name in LIST_FIELDS if getattr(message, name)}
    if message.logit_bias:
        given["logit_bias"] = dict(message.logit_bias)
    if message.HasField("allowed_token_ids"):
        given["allowed_token_ids"] = list(message.allowed_token_ids.ids)
    if message.HasField("structured_outputs"):
        given["structured_outputs"] = _structure(message.structured_outputs)
    if message.HasField("repetition_detection"):
        given["repetition_detection"] = _set_fields(message.repetition_detection)
    if message.HasField("extra_args_json"):
        given["extra_args"] = read_json("extra_args", message.extra_args_json)
    return given


def params_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """The message that holds what differs from ``SamplingParams()``."""
    message = sampling_pb2.SamplingParams()
    for name in _PLAIN_FIELDS:
        value = getattr(params, name)
        if value is not None and value != getattr(_DEFAULTS, name):
            setattr(message, name, value)
    for name in LIST_FIELDS:
        getattr(message, name).extend(getattr(params, name) or ())
    if params.max_tokens is None:
        message.max_tokens = ALL_TOKENS
    _write_own_fields(params, message)
    return message


def _write_own_fields(params: SamplingParams, message: sampling_pb2.SamplingParams) -> None:
    if params.logit_bias is not None:
        message.logit_bias.update(params.logit_bias)
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.ids.extend(params.allowed_token_ids)
    if params.structured_outputs is not None:
        _write_structure(params.structured_outputs, message.structured_outputs)
    if params.repetition_detection is not None:
        for field in dataclasses.fields(RepetitionDetectionParams):
            setattr(message.repetition_detection, field.name, getattr(params.repetition_detection, field.name))
    if params.extra_args is not None:
        message.extra_args_json = json.dumps(dict(params.extra_args))


def read_json(name: str, text: str) -> Any:
    """What a JSON text in a field holds.

    Raises:
        RequestError: It is none, or nested too deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not valid JSON: {error}", parameter=name, value=text) from error


def _set_fields(message: Any) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}


def _structure(message: sampling_pb2.StructuredOutputs) -> dict[str, Any]:
    given = _set_fields(message)
    kind = message.WhichOneof("kind")
    if kind is not None:
        given[kind] = list(message.choice.texts) if kind == "choice" else getattr(message, kind)
    return given


def _write_structure(params: StructuredOutputsParams, message: sampling_pb2.StructuredOutputs) -> None:
    kind = params.kind
    value = getattr(params, kind)
    if kind == "choice":
        message.choice.texts.extend(value)
    else:
        setattr(message, kind, json.dumps(value) if isinstance(value, dict) else value)
    if params.whitespace_pattern is not None:
        message.whitespace_pattern = params.whitespace_pattern
    message.disable_any_whitespace = params.disable_any_whitespace
    message.disable_additional_properties = params.disable_additional_properties
