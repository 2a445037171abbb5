"""``EngineRequest`` as a message and back."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.pooling_params import Pooling, PoolingParams
from jaxserve.request import PromptFit
from jaxserve.sampling_checks import RequestOutputKind
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.engine_request import EngineRequest
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2
from jaxserve.server.sampling_codec import params_from_proto, params_to_proto, read_json

_INT64_LIMIT = 2**63
_POOLINGS: MappingProxyType[Pooling, engine_pb2.Pooling] = MappingProxyType(
    {"mean": engine_pb2.POOLING_MEAN, "last": engine_pb2.POOLING_LAST}
)
_POOLING_NAMES: MappingProxyType[int, Pooling] = MappingProxyType({value: name for name, value in _POOLINGS.items()})


def submit_to_proto(request: EngineRequest, number: int, request_id: str) -> engine_pb2.Submit:
    """The message that asks for a request.

    Raises:
        RequestError: A value that no message can hold.
    """
    message = engine_pb2.Submit(
        id=number,
        request_id=request_id,
        is_final_only=request.params.output_kind is RequestOutputKind.FINAL_ONLY,
        is_strict_length=request.is_strict_length,
        add_special_tokens=request.add_special_tokens,
    )
    try:
        _write_prompt(request, message)
        message.sampling_params.CopyFrom(params_to_proto(request.params))
        message.priority = request.priority
        if request.cache_salt is not None:
            message.cache_salt = request.cache_salt
        if request.timeout_s is not None:
            message.timeout_s = request.timeout_s
        if request.truncate_prompt_tokens is not None:
            message.truncate_prompt_tokens = request.truncate_prompt_tokens
        if request.pooling is not None:
            message.pooling = _POOLINGS[request.pooling.pooling]
            message.is_normalized = request.pooling.normalize
    except RequestError:
        raise
    except (TypeError, ValueError) as error:
        raise RequestError(f"the request has a wrong value: {error}") from error
    return message


def _write_prompt(request: EngineRequest, message: engine_pb2.Submit) -> None:
    given = [prompt for prompt in (request.text, request.token_ids, request.chat) if prompt is not None]
    if len(given) != 1:
        raise RequestError(f"a request has exactly one of text, token_ids and chat; got {len(given)}")
    if request.text is not None:
        message.text = request.text
    elif request.token_ids is not None:
        outside = next((token for token in request.token_ids if not 0 <= token < _INT64_LIMIT), None)
        if outside is not None:
            raise RequestError(f"token id {outside} is out of vocabulary", parameter="prompt", value=outside)
        message.token_ids.ids.extend(request.token_ids)
        message.token_ids.SetInParent()
    else:
        message.chat.arguments_json = chat_json(request.chat or {})


def chat_json(chat: Mapping[str, Any]) -> str:
    """The arguments of a conversation as JSON.

    Raises:
        RequestError: They hold something else than JSON values, or text that is not Unicode.
    """
    try:
        text = json.dumps(dict(chat), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the conversation is not JSON: {error}", parameter="messages") from error
    return text


def params_of(message: engine_pb2.Submit) -> SamplingParams | PoolingParams:
    """How a request is sampled, or pooled.

    Raises:
        RequestError: A value that is wrong.
    """
    if message.pooling:
        return PoolingParams(pooling=_POOLING_NAMES[message.pooling], normalize=message.is_normalized)
    kind = RequestOutputKind.FINAL_ONLY if message.is_final_only else RequestOutputKind.DELTA
    return params_from_proto(message.sampling_params, output_kind=kind)


def fit_of(message: engine_pb2.Submit) -> PromptFit:
    """How the prompt is to fit the context."""
    return PromptFit(
        is_strict=message.is_strict_length,
        truncate_prompt_tokens=message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None,
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
    )


def chat_of(arguments_json: str) -> dict[str, Any]:
    """The arguments of a conversation.

    Raises:
        RequestError: They are no JSON object.
    """
    chat = read_json("messages", arguments_json)
    if not isinstance(chat, dict):
        raise RequestError(f"a conversation's arguments must be an object, got {type(chat).__name__}")
    return chat
