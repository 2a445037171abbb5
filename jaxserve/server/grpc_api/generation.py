"""``GenerationService``: completions, whole or streamed; and the parts of a request that other services share."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from jaxserve.api.errors import EngineDeadError, RequestError
from jaxserve.api.field_checks import token_ids
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.request import Request
from jaxserve.api.sampling_checks import RequestOutputKind
from jaxserve.parsers import MessageDelta
from jaxserve.server.byte_budget import request_bytes
from jaxserve.server.chat import ChatParser, chat_request, check_variables
from jaxserve.server.frontend import Frontend, sampling_params
from jaxserve.server.grpc_api.calls import Context
from jaxserve.server.grpc_api.interceptor import CURRENT_CALL
from jaxserve.server.grpc_api.reader_pace import ReaderPace
from jaxserve.server.proto.jaxserve.v1 import chat_pb2, generation_pb2, generation_pb2_grpc
from jaxserve.server.proto_codec import completion_to_proto, given_fields, prompt_to_proto, read_json
from jaxserve.server.request_log import RequestEntry

_CONVERTED = ("messages", "tools", "chat_template_kwargs_json")
REQUEST_ID_KEY = "x-request-id"
"""In the initial metadata: the server's name for a request that was admitted."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Generates. A call that is cancelled, or ends in any other way, aborts its request."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        """Generate completions and return them whole."""
        entry, parser, num_bytes = await self._read(request, RequestOutputKind.FINAL_ONLY, context.time_remaining())
        writer = _ResponseWriter(parser, entry, request.return_prompt)
        async with self._outputs(entry, num_bytes, context) as outputs:
            async for output in outputs:
                if output.finished:
                    response = generation_pb2.GenerateResponse(request_id=CURRENT_CALL.get().request_id)
                    await self._frontend.long_work.write_output(entry.request.turn, output, writer.write, response)
                    return response
        raise EngineDeadError("the engine stopped before the request finished")

    async def StreamGenerate(self, request: generation_pb2.StreamGenerateRequest, context: Context) -> None:
        """Generate completions and send deltas."""
        interval = request.stream_interval if request.HasField("stream_interval") else 1
        if interval < 1:
            message = f"stream_interval must be at least 1, got {interval}"
            raise RequestError(message, parameter="stream_interval", value=interval)
        entry, parser, num_bytes = await self._read(
            request.request, RequestOutputKind.DELTA, context.time_remaining(), interval
        )
        writer = _ResponseWriter(parser, entry, request.request.return_prompt)
        pace = ReaderPace.of(self._frontend.config)
        async with self._outputs(entry, num_bytes, context) as outputs:
            async for output in outputs:
                response = generation_pb2.StreamGenerateResponse(request_id=CURRENT_CALL.get().request_id)
                await self._frontend.long_work.write_output(entry.request.turn, output, writer.write, response)
                async with pace.sending(response.ByteSize()):
                    await context.write(response)

    @contextlib.asynccontextmanager
    async def _outputs(
        self, entry: RequestEntry, num_bytes: int, context: Context
    ) -> AsyncIterator[AsyncIterator[RequestOutput]]:
        """Admit a request, which takes some bytes, and give its outputs; the request has ended when the block has."""
        call, request = CURRENT_CALL.get(), entry.request
        with self._frontend.ledger.admit(call.caller, request.params.n, num_bytes):
            await context.send_initial_metadata(((REQUEST_ID_KEY, call.request_id),))
            async with contextlib.aclosing(self._frontend.generate(entry)) as outputs:
                yield outputs

    async def _read(
        self,
        message: generation_pb2.GenerateRequest,
        kind: RequestOutputKind,
        timeout_s: float | None,
        stream_interval: int = 1,
    ) -> tuple[RequestEntry, ChatParser | None, int]:
        """Return the entry of a request, the parser of a conversation's completions if they need one, and its bytes.

        Args:
            message: The client's request.
            kind: Whether outputs are whole or deltas.
            timeout_s: Seconds until the call's deadline; None for none.
            stream_interval: As in ``Request``.

        Raises:
            UnavailableError: The engine is not ready.
            UnknownModelError: It names another model.
            RequestError: A wrong value.
        """
        frontend, caller = self._frontend, CURRENT_CALL.get().caller
        size, options = message.ByteSize(), (message, kind, timeout_s, stream_interval)
        request, parser = await frontend.long_work.read(caller.turn, size, self._request, *options)
        entry, model = frontend.entry(caller, request), frontend.info.model
        return entry, parser, await frontend.long_work.read(caller.turn, size, request_bytes, entry.request, model)

    def _request(
        self,
        message: generation_pb2.GenerateRequest,
        kind: RequestOutputKind,
        timeout_s: float | None,
        stream_interval: int,
    ) -> tuple[Request, ChatParser | None]:
        frontend = self._frontend
        prompt = message.WhichOneof("prompt")
        if prompt is None:
            raise RequestError("expected one of text, token_ids and messages", parameter="prompt")
        frontend.check_model(message.model)
        names = ("priority", "cache_salt", "truncate_prompt_tokens", "add_special_tokens")
        found: dict[str, Any] = {name: getattr(message, name) for name in names if message.HasField(name)}
        found["request_id"] = CURRENT_CALL.get().request_id
        given = {**given_fields(message.sampling_params), "output_kind": kind}
        found |= {"timeout_s": timeout_s, "is_strict_length": "max_tokens" in given, "stream_interval": stream_interval}
        if prompt == "messages":
            return chat_request(frontend, conversation_fields(message.messages), given, **found)
        found[prompt] = message.text if prompt == "text" else token_ids("token_ids", tuple(message.token_ids.ids))
        if not found[prompt]:
            raise RequestError("the prompt must not be empty", parameter="prompt")
        return Request(**found, params=sampling_params(frontend.info, given)), None


def conversation_fields(conversation: chat_pb2.Conversation) -> dict[str, Any]:
    """Return the fields of a conversation in OpenAI's form.

    Raises:
        RequestError: No messages, or wrong variables.
    """
    fields: dict[str, Any] = {
        field.name: value for field, value in conversation.ListFields() if field.name not in _CONVERTED
    }
    choice = fields.get("tool_choice")
    if choice not in (None, "auto", "none", "required"):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice}}
    if not conversation.messages:
        raise RequestError("a conversation needs at least one message", parameter="messages", value=[])
    fields["messages"] = [_message(message) for message in conversation.messages]
    fields["tools"] = [_tool(tool) for tool in conversation.tools]
    if conversation.HasField("chat_template_kwargs_json"):
        name = "chat_template_kwargs"
        fields[name] = check_variables(name, read_json(name, conversation.chat_template_kwargs_json))
    return fields


def _message(message: chat_pb2.ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, **{field.name: value for field, value in message.ListFields()}}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found


def _tool(tool: chat_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters_json"):
        function["parameters"] = read_json("tools", tool.parameters_json)
    return {"type": "function", "function": function}


class _ResponseWriter:
    """Writes the outputs of one request into messages.

    Args:
        parser: Parses the completions of a conversation; None for other prompts, and where all text is content.
        entry: Has counted the tokens of the outputs that are written.
        returns_prompt: Whether to return the prompt's token ids and text.
    """

    def __init__(self, parser: ChatParser | None, entry: RequestEntry, returns_prompt: bool):
        self._parser = parser
        self._entry = entry
        self._returns_prompt = returns_prompt
        self._is_begun = False

    def write(
        self, response: generation_pb2.GenerateResponse | generation_pb2.StreamGenerateResponse, output: RequestOutput
    ) -> None:
        """Write an output, whole or a delta, into a response."""
        if not self._is_begun:
            self._is_begun = True
            response.prompt.CopyFrom(prompt_to_proto(output, with_tokens=self._returns_prompt))
            if self._parser is not None:
                self._parser.begin(self._entry.request, output.prompt)
        for completion in output.outputs:
            written = completion_to_proto(completion)
            if self._entry.request.chat is not None:
                delta = self._delta(completion)
                if delta:
                    written.message.CopyFrom(_delta_message(delta))
            response.completions.append(written)
        if output.finished:
            response.usage.prompt_tokens = self._entry.num_prompt_tokens or 0
            response.usage.completion_tokens = self._entry.num_generated.total()
            response.usage.cached_tokens = self._entry.num_cached_tokens

    def _delta(self, completion: CompletionOutput) -> MessageDelta:
        if self._parser is None:
            return MessageDelta(completion.text or None)
        return self._parser.feed(completion.index, completion.text, is_end=completion.finish_reason is not None)


def _delta_message(delta: MessageDelta) -> chat_pb2.ParsedMessage:
    made = chat_pb2.ParsedMessage(content=delta.content, reasoning=delta.reasoning)
    for call in delta.tool_calls:
        made.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
    return made
