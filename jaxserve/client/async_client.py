"""The asyncio client."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.api.errors import JaxserveError
from jaxserve.api.outputs import RequestOutput
from jaxserve.client.channel import Connection, open_async_channel
from jaxserve.client.failures import errors_of_calls
from jaxserve.client.requests import (
    ConversationOptions,
    Message,
    Prompt,
    RequestOptions,
    Sampling,
    chat_request,
    conversation,
    generate_request,
    token_id_list,
)
from jaxserve.client.results import (
    ChatDelta,
    ChatOutput,
    DeltaReader,
    RenderedPrompt,
    TokenizedText,
    whole_chat,
    whole_output,
)
from jaxserve.client.sync_client import GENERATION
from jaxserve.server.proto.jaxserve.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)


class AsyncClient(Connection):
    """Calls a server; methods and errors are those of ``Client``.

    Create it inside its event loop. To stop a stream early use ``contextlib.aclosing``, or cancel the reading task.

    Args:
        target: ``host:port`` of the server's gRPC listener.
        api_key: The caller's key.
        credentials: TLS credentials, such as ``grpc.ssl_channel_credentials(…)``; None for plain text.
        timeout_s: Seconds after which a call times out; None for no limit.
    """

    _open_channel = staticmethod(open_async_channel)

    def _open(self, channel: Any) -> None:
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self._tokenization: Any = tokenization_pb2_grpc.TokenizationServiceStub(channel)
        self._models: Any = model_pb2_grpc.ModelServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    async def generate(
        self, prompt: Prompt, sampling_params: Sampling = None, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Return the whole completion of a prompt."""
        request = generate_request(prompt, sampling_params, options)
        return whole_output(await self._call(self._generation.Generate, request))

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: Sampling = None,
        *,
        stream_interval: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield deltas of a completion as they are generated."""
        reader, request = DeltaReader(), generate_request(prompt, sampling_params, options)
        async with contextlib.aclosing(self._parts(request, stream_interval)) as parts:
            async for part in parts:
                yield reader.output(part)

    async def chat(
        self, messages: Sequence[Message], sampling_params: Sampling = None, **options: Unpack[RequestOptions]
    ) -> ChatOutput:
        """Return the response to a conversation."""
        request = chat_request(messages, sampling_params, options)
        return whole_chat(await self._call(self._generation.Generate, request))

    async def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: Sampling = None,
        *,
        stream_interval: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[ChatDelta, None]:
        """Yield deltas of the response to a conversation."""
        reader, request = DeltaReader(), chat_request(messages, sampling_params, options)
        async with contextlib.aclosing(self._parts(request, stream_interval)) as parts:
            async for part in parts:
                yield reader.chat(part)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, return_token_strings: bool = False, model: str = ""
    ) -> TokenizedText:
        """Tokenize a text."""
        request = tokenization_pb2.TokenizeRequest(
            model=model, text=text, add_special_tokens=add_special_tokens, return_token_strings=return_token_strings
        )
        found = await self._call(self._tokenization.Tokenize, request)
        return TokenizedText(list(found.token_ids), list(found.token_strings), found.max_model_len)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, model: str = "") -> str:
        """Convert token ids to text."""
        request = tokenization_pb2.DetokenizeRequest(
            model=model, token_ids=token_id_list("token_ids", token_ids), skip_special_tokens=skip_special_tokens
        )
        return (await self._call(self._tokenization.Detokenize, request)).text

    async def apply_chat_template(
        self, messages: Sequence[Message], *, model: str = "", **options: Unpack[ConversationOptions]
    ) -> RenderedPrompt:
        """Return the prompt that the chat template renders."""
        request = tokenization_pb2.ApplyChatTemplateRequest(model=model, messages=conversation(messages, options))
        found = await self._call(self._tokenization.ApplyChatTemplate, request)
        return RenderedPrompt(found.text, list(found.token_ids))

    async def models(self) -> list[model_pb2.Model]:
        """Return the served models, one entry per served name."""
        return list((await self._call(self._models.ListModels, model_pb2.ListModelsRequest())).models)

    async def model(self, name: str = "") -> model_pb2.Model:
        """Return one model by its name; without a name the only model."""
        return (await self._call(self._models.GetModel, model_pb2.GetModelRequest(model=name))).model

    async def health(self, service: str = GENERATION) -> bool:
        """Return whether the server can generate; for the service ``""``, whether its process is alive."""
        found = await self._call(self._health.Check, health_pb2.HealthCheckRequest(service=service))
        return found.status == health_pb2.HealthCheckResponse.SERVING

    async def watch_health(self, service: str = GENERATION) -> AsyncIterator[bool]:
        """Yield the health now and whenever it changes."""
        call = self._health.Watch(health_pb2.HealthCheckRequest(service=service), metadata=self._how["metadata"])
        try:
            with _errors_of_waits():
                async for found in call:
                    yield found.status == health_pb2.HealthCheckResponse.SERVING
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the connection and abort its calls."""
        await self._channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, error, traceback
        await self.close()

    async def _call(self, method: Any, request: Any) -> Any:
        with _errors_of_waits():
            return await method(request, **self._how)

    async def _parts(
        self, request: generation_pb2.GenerateRequest, interval: int | None
    ) -> AsyncGenerator[generation_pb2.StreamGenerateResponse, None]:
        whole = generation_pb2.StreamGenerateRequest(request=request, stream_interval=interval)
        call = self._generation.StreamGenerate(whole, **self._how)
        try:
            with _errors_of_waits():
                async for part in call:
                    yield part
        finally:
            call.cancel()


@contextlib.contextmanager
def _errors_of_waits() -> Iterator[None]:
    """Convert failures like ``errors_of_calls``, including calls aborted by closing the connection.

    For these gRPC raises ``CancelledError`` in the waiting task. In a task that was not cancelled,
    ``asyncio.TaskGroup`` would take that for success.
    """
    try:
        with errors_of_calls():
            yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise JaxserveError("CANCELLED: the connection was closed") from None
