"""Typed results of the client; the classes of ``LLM`` where they exist."""

import dataclasses

from jaxserve.api.outputs import RequestOutput
from jaxserve.parsers.message import MessageDelta, ParsedMessage, ToolCall, ToolCallDelta
from jaxserve.server.proto.jaxserve.v1 import chat_pb2, generation_pb2
from jaxserve.server.proto_codec import completion_from_proto, prompt_logprobs_from_proto


@dataclasses.dataclass(frozen=True)
class ChatOutput:
    """The whole response to a conversation.

    Attributes:
        output: The completions as generated.
        messages: Each completion parsed to a message, in order.
    """

    output: RequestOutput
    messages: tuple[ParsedMessage, ...]


@dataclasses.dataclass(frozen=True)
class ChatDelta:
    """A delta of the response to a conversation.

    Attributes:
        output: The new tokens and text as generated.
        messages: Index of a completion -> delta of its parsed message; completions without a delta are omitted.
    """

    output: RequestOutput
    messages: dict[int, MessageDelta]


@dataclasses.dataclass(frozen=True)
class TokenizedText:
    """The tokens of a text.

    Attributes:
        token_ids: Token ids.
        token_strings: The string of each token; empty unless requested.
        max_model_len: Longest context of the model in tokens.
    """

    token_ids: list[int]
    token_strings: list[str]
    max_model_len: int


@dataclasses.dataclass(frozen=True)
class RenderedPrompt:
    """A rendered prompt.

    Attributes:
        text: The text of the prompt.
        token_ids: Its token ids.
    """

    text: str
    token_ids: list[int]


class DeltaReader:
    """Converts the messages of a stream to deltas; the prompt comes in the first one and is repeated in each delta."""

    def __init__(self) -> None:
        self._prompt = generation_pb2.PromptInfo()

    def output(self, message: generation_pb2.StreamGenerateResponse) -> RequestOutput:
        """Return the delta of a message."""
        is_first = message.HasField("prompt")
        if is_first:
            self._prompt = message.prompt
        made = _output(message.request_id, self._prompt)
        made.outputs = [completion_from_proto(completion) for completion in message.completions]
        made.finished = message.HasField("usage")
        if is_first:
            made.prompt_logprobs = prompt_logprobs_from_proto(message.prompt)
        if made.finished:
            made.num_cached_tokens = message.usage.cached_tokens
        return made

    def chat(self, message: generation_pb2.StreamGenerateResponse) -> ChatDelta:
        """Return the delta of a conversation's message."""
        deltas = {
            completion.index: _delta(completion.message)
            for completion in message.completions
            if completion.HasField("message")
        }
        return ChatDelta(self.output(message), deltas)


def whole_output(message: generation_pb2.GenerateResponse) -> RequestOutput:
    """Return a whole completion."""
    made = _output(message.request_id, message.prompt)
    made.outputs = [completion_from_proto(completion) for completion in message.completions]
    made.finished = True
    made.prompt_logprobs = prompt_logprobs_from_proto(message.prompt)
    made.num_cached_tokens = message.usage.cached_tokens
    return made


def whole_chat(message: generation_pb2.GenerateResponse) -> ChatOutput:
    """Return the whole response to a conversation."""
    messages = tuple(_parsed(completion.message) for completion in message.completions)
    return ChatOutput(whole_output(message), messages)


def _output(request_id: str, prompt: generation_pb2.PromptInfo) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text if prompt.HasField("text") else None,
        prompt_token_ids=list(prompt.token_ids),
        outputs=[],
        finished=False,
        num_cached_tokens=prompt.num_cached_tokens,
    )


def _parsed(message: chat_pb2.ParsedMessage) -> ParsedMessage:
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    return ParsedMessage(_content(message), _reasoning(message), calls)


def _delta(message: chat_pb2.ParsedMessage) -> MessageDelta:
    calls = tuple(
        ToolCallDelta(
            call.index,
            call.id if call.HasField("id") else None,
            call.name if call.HasField("name") else None,
            call.arguments,
        )
        for call in message.tool_calls
    )
    return MessageDelta(_content(message), _reasoning(message), calls)


def _content(message: chat_pb2.ParsedMessage) -> str | None:
    return message.content if message.HasField("content") else None


def _reasoning(message: chat_pb2.ParsedMessage) -> str | None:
    return message.reasoning if message.HasField("reasoning") else None
