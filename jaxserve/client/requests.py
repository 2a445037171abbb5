"""Builds protocol messages from the arguments of the client's methods."""

import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, cast

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.server.proto.jaxserve.v1 import chat_pb2, generation_pb2, sampling_pb2
from jaxserve.server.proto_codec import LIST_FIELDS, OWN_FIELDS, PYTHON_FIELDS, params_to_proto

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""A string, token ids, or a conversation in OpenAI's form."""
Sampling = SamplingParams | Mapping[str, Any] | None
"""Complete sampling parameters, or a dict of some fields; the model's defaults apply to the others."""

_MESSAGE_TEXTS = ("content", "name", "tool_call_id", "reasoning")
_EXPECTED_MESSAGES = "expected a list of messages, such as [{'role': 'user', 'content': 'Hi'}]"


class ConversationOptions(TypedDict, total=False):
    """Options of a conversation; the server's defaults apply to missing ones.

    Attributes:
        tools: Functions that the model may call, in OpenAI's form.
        tool_choice: ``auto``, ``none``, ``required``, the name of a function, or OpenAI's object with it.
        parallel_tool_calls: Whether the model may call several functions at once.
        add_generation_prompt: End the prompt with the start of the assistant's message.
        continue_final_message: Continue the last message instead of starting a new one.
        chat_template_kwargs: Further variables of the template.
        include_reasoning: Whether to return the model's reasoning.
    """

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
    include_reasoning: bool


class RequestOptions(TypedDict, total=False):
    """Options of a request; the server's defaults apply to missing ones.

    All fields after the first six are those of ``ConversationOptions`` and apply only to conversations.

    Attributes:
        model: Name of the model.
        priority: Lower values run first if the server schedules by priority.
        cache_salt: Only requests with the same salt share cached pages.
        return_prompt: Whether outputs have the prompt's token ids and text; by default True.
        add_special_tokens: Whether the tokenizer adds the model's special tokens to text.
        truncate_prompt_tokens: Keep only the last tokens of the prompt, this many; -1: as many as fit the context.
    """

    model: str
    priority: int
    cache_salt: str
    return_prompt: bool
    add_special_tokens: bool
    truncate_prompt_tokens: int
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
    include_reasoning: bool


_PLAIN_CHAT_OPTIONS = ("parallel_tool_calls", "add_generation_prompt", "continue_final_message", "include_reasoning")
_CHAT_OPTIONS = tuple(ConversationOptions.__annotations__)

Argument = ParamSpec("Argument")
Made = TypeVar("Made")


def _as_request_errors(make: Callable[Argument, Made]) -> Callable[Argument, Made]:
    """Decorate a function that builds messages to raise ``RequestError`` when protobuf rejects a value."""

    @functools.wraps(make)
    def checked(*arguments: Argument.args, **options: Argument.kwargs) -> Made:
        try:
            return make(*arguments, **options)
        except RequestError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"the request cannot be encoded as a protobuf message: {error!r}") from error

    return checked


@_as_request_errors
def generate_request(prompt: Prompt, sampling: Sampling, options: Mapping[str, Any]) -> generation_pb2.GenerateRequest:
    """Build the message of a request.

    Raises:
        RequestError: A prompt or a parameter is invalid.
    """
    if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
        return chat_request(cast("Sequence[Message]", prompt), sampling, options)
    chat = {name: value for name, value in options.items() if name in _CHAT_OPTIONS}
    if chat:
        raise RequestError(
            f"{', '.join(chat)} applies only to conversations (a list of messages as the prompt)",
            parameter=next(iter(chat)),
            value=chat,
        )
    made = _without_prompt(sampling, options)
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.CopyFrom(token_id_list("prompt", cast("Sequence[int]", prompt)))
    return made


@_as_request_errors
def chat_request(
    messages: Sequence[Message], sampling: Sampling, options: Mapping[str, Any]
) -> generation_pb2.GenerateRequest:
    """Build the message of a request whose prompt is a conversation.

    Raises:
        RequestError: The conversation or a parameter is invalid.
    """
    made = _without_prompt(sampling, {name: value for name, value in options.items() if name not in _CHAT_OPTIONS})
    made.messages.CopyFrom(conversation(messages, options))
    return made


@_as_request_errors
def token_id_list(name: str, token_ids: Iterable[int]) -> sampling_pb2.TokenIds:
    """Build the message of token ids, which may be integers of any library.

    Raises:
        RequestError: An id is not an integer; floats and booleans are rejected too.
    """
    found: list[int] = []
    for token_id in token_ids:
        try:
            if isinstance(token_id, bool):
                raise TypeError
            found.append(operator.index(token_id))
        except TypeError:
            message = f"{name} must have integers as token ids, got {type(token_id).__name__}"
            raise RequestError(message, parameter=name, value=token_id) from None
    return sampling_pb2.TokenIds(ids=found)


@_as_request_errors
def conversation(messages: Sequence[Message], options: Mapping[str, Any]) -> chat_pb2.Conversation:
    """Build the message of a conversation.

    Args:
        messages: In OpenAI's form.
        options: See ``ConversationOptions``.

    Raises:
        RequestError: No messages, or a message or a tool has a field that the protocol lacks.
    """
    made = chat_pb2.Conversation(
        messages=[_chat_message(message) for message in _checked_messages(messages)],
        tools=[_tool(tool) for tool in options.get("tools") or ()],
        **{name: options[name] for name in _PLAIN_CHAT_OPTIONS if name in options},
    )
    choice = options.get("tool_choice")
    if choice is not None:
        made.tool_choice = choice if isinstance(choice, str) else choice["function"]["name"]
    if options.get("chat_template_kwargs") is not None:
        made.chat_template_kwargs_json = json.dumps(dict(options["chat_template_kwargs"]))
    return made


def _without_prompt(sampling: Sampling, options: Mapping[str, Any]) -> generation_pb2.GenerateRequest:
    made = generation_pb2.GenerateRequest(**{"return_prompt": True, **options})
    if sampling is not None:
        made.sampling_params.CopyFrom(_sampling_message(sampling))
    return made


def _checked_messages(messages: Any) -> list[Message]:
    """Return the messages after checking that they are a list of dicts: iterating a string would yield characters."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(f"{_EXPECTED_MESSAGES}, got {type(messages).__name__}", parameter="messages")
    found = list(cast("Iterable[Any]", messages))
    if not found:
        raise RequestError("a conversation needs at least one message", parameter="messages", value=[])
    for index, message in enumerate(found):
        if not isinstance(message, Mapping):
            raise RequestError(f"{_EXPECTED_MESSAGES}, got {type(message).__name__} at {index}", parameter="messages")
    return found


def _sampling_message(sampling: SamplingParams | Mapping[str, Any]) -> sampling_pb2.SamplingParams:
    """Build the message of all parameters, or of a dict's; only the server knows the defaults of the others, such as
    ``max_tokens``."""
    is_whole = isinstance(sampling, SamplingParams)
    params = sampling if is_whole else SamplingParams(**{"max_tokens": None, **sampling})
    given = [field.name for field in dataclasses.fields(SamplingParams)] if is_whole else sampling
    made = params_to_proto(params)
    if "max_tokens" not in given:
        made.ClearField("max_tokens")
    for name in given:
        value = getattr(params, name)
        if value is not None and name not in (*LIST_FIELDS, *OWN_FIELDS, *PYTHON_FIELDS):
            setattr(made, name, value)
    return made


def _chat_message(message: Message) -> chat_pb2.ChatMessage:
    made = chat_pb2.ChatMessage(role=message["role"])
    for name, value in message.items():
        if value is None or name == "role":
            continue
        if name == "content" and not isinstance(value, str):
            made.content = "\n".join(_part_text(part) for part in value)
        elif name in _MESSAGE_TEXTS:
            setattr(made, name, value)
        elif name == "tool_calls":
            made.tool_calls.extend(_tool_call(call) for call in value)
        else:
            raise RequestError(f"messages have an unsupported field {name!r}", parameter="messages", value=message)
    return made


def _part_text(part: Mapping[str, Any]) -> str:
    if part.get("type") != "text":
        raise RequestError("content parts must be {'type': 'text', 'text': …}", parameter="messages", value=part)
    return part["text"]


def _tool_call(call: Any) -> chat_pb2.ToolCall:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return chat_pb2.ToolCall(id=call.get("id", ""), name=function["name"], arguments=written)


def _tool(tool: Mapping[str, Any]) -> chat_pb2.Tool:
    function = tool.get("function", tool)
    parameters = function.get("parameters")
    return chat_pb2.Tool(
        name=function["name"],
        description=function.get("description"),
        parameters_json=None if parameters is None else json.dumps(dict(parameters)),
    )
