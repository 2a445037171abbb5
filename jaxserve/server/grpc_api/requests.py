"""Requests of the protocol as the engine takes them."""

import dataclasses
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.request import MAX_PRIORITY
from jaxserve.sampling_checks import RequestOutputKind
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.chat_answer import ChatAnswer, ToolUse
from jaxserve.server.engine_request import EngineRequest, within_context
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.conversations import chat_arguments, read_tools
from jaxserve.server.proto.jaxserve.v1 import chat_pb2, generation_pb2
from jaxserve.server.sampling_codec import given_fields


@dataclasses.dataclass(frozen=True)
class ReadRequest:
    """A request that was checked as far as a front end can.

    Attributes:
        engine: For the engine.
        answer: Takes the answers of a conversation apart; None for other prompts.
        returns_prompt: Whether the answer has the prompt's token ids and text.
    """

    engine: EngineRequest
    answer: ChatAnswer | None
    returns_prompt: bool


def read_request(
    frontend: Frontend, message: generation_pb2.GenerateRequest, kind: RequestOutputKind, timeout_s: float | None
) -> ReadRequest:
    """Reads a request.

    Args:
        frontend: What runs behind it.
        message: As it came.
        kind: How outputs are to come.
        timeout_s: Seconds until the call's deadline; None for none.

    Raises:
        UnavailableError: Nothing runs behind it.
        UnknownModelError: It names another model.
        RequestError: It is wrong.
    """
    prompt = message.WhichOneof("prompt")
    if prompt is None:
        raise RequestError("expected one of text, token_ids and messages", parameter="prompt")
    frontend.check_model(message.model)
    given = given_fields(message.sampling_params)
    use, found = ToolUse(), dict[str, Any]()
    if prompt == "messages":
        use = read_tools(frontend, message.messages)
        _constrain(use, given)
        found["chat"] = chat_arguments(frontend, message.messages, use)
    elif prompt == "text":
        found["text"] = message.text
    else:
        cut = message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None
        found["token_ids"] = within_context(message.token_ids.ids, cut, frontend.info.max_model_len)
    params = frontend.info.sampling_params({**given, "output_kind": kind}, is_chat=prompt == "messages")
    request = EngineRequest(
        **found,
        params=params,
        **_options(message),
        timeout_s=timeout_s,
        is_strict_length="max_tokens" in given,
    )
    answer = _answer(frontend, message.messages, use, params) if prompt == "messages" else None
    return ReadRequest(request, answer, message.return_prompt)


def _options(message: generation_pb2.GenerateRequest) -> dict[str, Any]:
    """The fields beside the prompt that a request has, as arguments of ``EngineRequest``."""
    names = ("priority", "cache_salt", "truncate_prompt_tokens", "add_special_tokens")
    found = {name: getattr(message, name) for name in names if message.HasField(name)}
    if found.get("priority", 0) < -MAX_PRIORITY:
        raise RequestError(f"priority must be at least {-MAX_PRIORITY}", parameter="priority", value=message.priority)
    length = found.get("truncate_prompt_tokens", -1)
    if length != -1 and length < 1:
        expected = "truncate_prompt_tokens must be at least 1, or -1 for as many as the context holds"
        raise RequestError(expected, parameter="truncate_prompt_tokens", value=length)
    return found


def _constrain(use: ToolUse, given: dict[str, Any]) -> None:
    """Adds what the choice of tools asks for."""
    if use.schema is not None:
        if "structured_outputs" in given:
            message = "structured_outputs and a tool_choice that forces calls cannot both be given"
            raise RequestError(message, parameter="tool_choice", value=use.choice)
        given["structured_outputs"] = {"json": use.schema}
    if use.needs_special_tokens:
        given.setdefault("skip_special_tokens", False)


def _answer(
    frontend: Frontend, conversation: chat_pb2.Conversation, use: ToolUse, params: SamplingParams
) -> ChatAnswer:
    has_choice = conversation.HasField("include_reasoning")
    return ChatAnswer(
        frontend.parsers,
        use,
        include_reasoning=conversation.include_reasoning if has_choice else True,
        is_constrained=params.structured_outputs is not None,
    )
