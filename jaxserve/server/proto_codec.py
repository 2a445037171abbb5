"""``SamplingParams`` and ``RequestOutput`` as protobuf messages and back."""

import dataclasses
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.logprobs import Logprob, PromptLogprobs, SampleLogprobs
from jaxserve.api.outputs import CompletionOutput, FinishReason, RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, sampling_pb2

# --------------------------------------------------------------------------------------------------------- parameters

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
    """Return the fields that a message has, as arguments of ``SamplingParams``, which checks them.

    Raises:
        RequestError: ``extra_args_json`` is not JSON.
    """
    given = _set_fields(message)
    if "extra_args_json" in given:
        given["extra_args"] = read_json("extra_args", given.pop("extra_args_json"))
    return given


def params_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return the message that holds what differs from ``SamplingParams()``."""
    fields: dict[str, Any] = {name: getattr(params, name) for name in (*_PLAIN_FIELDS, *LIST_FIELDS)}
    fields = {name: value for name, value in fields.items() if value != getattr(_DEFAULTS, name)}
    if params.max_tokens is None:
        fields["max_tokens"] = ALL_TOKENS
    if params.allowed_token_ids is not None:
        fields["allowed_token_ids"] = {"ids": params.allowed_token_ids}
    if params.repetition_detection is not None:
        fields["repetition_detection"] = dataclasses.asdict(params.repetition_detection)
    if params.extra_args is not None:
        fields["extra_args_json"] = json.dumps(dict(params.extra_args))
    structure = params.structured_outputs
    if structure is not None:
        value = getattr(structure, structure.kind)
        if structure.kind == "choice":
            value = {"texts": value}
        elif isinstance(value, dict):
            value = json.dumps(value)
        names = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
        fields["structured_outputs"] = {structure.kind: value, **{name: getattr(structure, name) for name in names}}
    return sampling_pb2.SamplingParams(**fields, logit_bias=params.logit_bias)


def read_json(name: str, text: str) -> Any:
    """Parse the JSON text of a field.

    Raises:
        RequestError: It is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not valid JSON: {error}", parameter=name, value=text) from error


def _set_fields(message: Any) -> dict[str, Any]:
    """Return the fields that a message has, those of ``_READERS`` in Python's form."""
    return {field.name: _READERS.get(field.name, _unchanged)(value) for field, value in message.ListFields()}


def _unchanged(value: Any) -> Any:
    return value


_READERS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        **dict.fromkeys(LIST_FIELDS, list),
        "logit_bias": dict,
        "allowed_token_ids": lambda message: list(message.ids),
        "choice": lambda message: list(message.texts),
        "structured_outputs": _set_fields,
        "repetition_detection": _set_fields,
    }
)

# ------------------------------------------------------------------------------------------------------------ outputs

_REASONS: Mapping[str, Any] = MappingProxyType(
    {name: generation_pb2.FinishReason.Value(f"FINISH_REASON_{name.upper()}") for name in typing.get_args(FinishReason)}
)
_NAMES: Mapping[int, Any] = MappingProxyType({value: name for name, value in _REASONS.items()})


def completion_to_proto(output: CompletionOutput) -> generation_pb2.Completion:
    """Convert a completion or its delta."""
    stop, reason, logprobs = output.stop_reason, output.finish_reason, output.logprobs
    return generation_pb2.Completion(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=None if logprobs is None else _positions(logprobs, output.token_ids),
        cumulative_logprob=output.cumulative_logprob,
        finish_reason=None if reason is None else _REASONS[reason],
        stop_string=stop if isinstance(stop, str) else None,
        stop_token_id=stop if isinstance(stop, int) else None,
    )


def completion_from_proto(message: generation_pb2.Completion) -> CompletionOutput:
    """Return what ``completion_to_proto`` was given."""
    stop = message.WhichOneof("stop_reason")
    has_logprobs = message.HasField("cumulative_logprob")
    return CompletionOutput(
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        cumulative_logprob=message.cumulative_logprob if has_logprobs else None,
        logprobs=[_entries(position) for position in message.logprobs] if has_logprobs else None,
        finish_reason=_NAMES.get(message.finish_reason),
        stop_reason=None if stop is None else getattr(message, stop),
    )


def prompt_to_proto(output: RequestOutput, *, with_tokens: bool) -> generation_pb2.PromptInfo:
    """Return what an output says of its prompt; token ids and text only if ``with_tokens``."""
    logprobs = output.prompt_logprobs
    return generation_pb2.PromptInfo(
        num_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens or 0,
        token_ids=output.prompt_token_ids if with_tokens else None,
        text=output.prompt if with_tokens else None,
        logprobs=None if logprobs is None else _positions(logprobs, output.prompt_token_ids),
    )


def prompt_logprobs_from_proto(message: generation_pb2.PromptInfo) -> PromptLogprobs | None:
    """Return one entry per prompt token, None for the first; None without logprobs."""
    if not message.logprobs:
        return None
    return [_entries(position) if position.entries else None for position in message.logprobs]


def _positions(
    logprobs: SampleLogprobs | PromptLogprobs, token_ids: Sequence[int]
) -> Iterable[generation_pb2.TokenLogprobs]:
    """Yield a message per position, whose first entry is the token at that position."""
    for position, token_id in zip(logprobs, token_ids, strict=True):
        message = generation_pb2.TokenLogprobs()
        others = {} if position is None else position
        for other in sorted(others, key=lambda other: other != token_id):
            entry = others[other]
            message.entries.add(
                token_id=other,
                logprob=entry.logprob,
                rank=entry.rank,
                decoded_token=entry.decoded_token,
                token_bytes=entry.token_bytes,
            )
            if entry.text_offset is not None:
                message.text_offset = entry.text_offset
        yield message


def _entries(message: generation_pb2.TokenLogprobs) -> dict[int, Logprob]:
    offset = message.text_offset if message.HasField("text_offset") else None
    return {
        entry.token_id: Logprob(
            logprob=entry.logprob,
            rank=entry.rank if entry.HasField("rank") else None,
            decoded_token=entry.decoded_token if entry.HasField("decoded_token") else None,
            token_bytes=entry.token_bytes if entry.HasField("token_bytes") else None,
            text_offset=None if index else offset,
        )
        for index, entry in enumerate(message.entries)
    }
