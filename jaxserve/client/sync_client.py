"""The blocking client, for programs with threads."""

from collections.abc import Iterator, Sequence
from typing import Any, Unpack

from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.api.outputs import RequestOutput
from jaxserve.client.channel import BlockingConnection
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
from jaxserve.server.proto.jaxserve.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)

GENERATION = "jaxserve.v1.GenerationService"


class Client(BlockingConnection):
    """Calls a server. Thread-safe.

    All methods raise the exceptions of ``jaxserve.client.failures.error_of``: ``RequestError``, ``OverloadedError``,
    ``DeadlineError``, ``UnavailableError`` and others.

    Args:
        target: ``host:port`` of the server's gRPC listener.
        api_key: The caller's key.
        credentials: TLS credentials, such as ``grpc.ssl_channel_credentials(…)``; None for plain text.
        timeout_s: Seconds after which a call times out; None for no limit.
    """

    def _open(self, channel: Any) -> None:
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self._tokenization: Any = tokenization_pb2_grpc.TokenizationServiceStub(channel)
        self._models: Any = model_pb2_grpc.ModelServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    def generate(
        self, prompt: Prompt, sampling_params: Sampling = None, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Return the whole completion of a prompt.

        Args:
            prompt: A string, token ids or a conversation.
            sampling_params: Sampling parameters.
            **options: See ``RequestOptions``.
        """
        return whole_output(self._call(self._generation.Generate, generate_request(prompt, sampling_params, options)))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Sampling = None,
        *,
        stream_interval: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[RequestOutput]:
        """Yield deltas of a completion as they are generated. Closing the iterator early aborts the request.

        Args:
            prompt: A string, token ids or a conversation.
            sampling_params: Sampling parameters.
            stream_interval: Smallest number of tokens per delta.
            **options: See ``RequestOptions``.
        """
        reader, request = DeltaReader(), generate_request(prompt, sampling_params, options)
        yield from map(reader.output, self._parts(request, stream_interval))

    def chat(
        self, messages: Sequence[Message], sampling_params: Sampling = None, **options: Unpack[RequestOptions]
    ) -> ChatOutput:
        """Return the response to a conversation; arguments as ``generate``."""
        return whole_chat(self._call(self._generation.Generate, chat_request(messages, sampling_params, options)))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: Sampling = None,
        *,
        stream_interval: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[ChatDelta]:
        """Yield deltas of the response to a conversation; arguments as ``stream``."""
        reader, request = DeltaReader(), chat_request(messages, sampling_params, options)
        yield from map(reader.chat, self._parts(request, stream_interval))

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, return_token_strings: bool = False, model: str = ""
    ) -> TokenizedText:
        """Tokenize a text."""
        request = tokenization_pb2.TokenizeRequest(
            model=model, text=text, add_special_tokens=add_special_tokens, return_token_strings=return_token_strings
        )
        found = self._call(self._tokenization.Tokenize, request)
        return TokenizedText(list(found.token_ids), list(found.token_strings), found.max_model_len)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, model: str = "") -> str:
        """Convert token ids to text."""
        request = tokenization_pb2.DetokenizeRequest(
            model=model, token_ids=token_id_list("token_ids", token_ids), skip_special_tokens=skip_special_tokens
        )
        return self._call(self._tokenization.Detokenize, request).text

    def apply_chat_template(
        self, messages: Sequence[Message], *, model: str = "", **options: Unpack[ConversationOptions]
    ) -> RenderedPrompt:
        """Return the prompt that the chat template renders; options: see ``ConversationOptions``."""
        request = tokenization_pb2.ApplyChatTemplateRequest(model=model, messages=conversation(messages, options))
        found = self._call(self._tokenization.ApplyChatTemplate, request)
        return RenderedPrompt(found.text, list(found.token_ids))

    def models(self) -> list[model_pb2.Model]:
        """Return the served models, one entry per served name."""
        return list(self._call(self._models.ListModels, model_pb2.ListModelsRequest()).models)

    def model(self, name: str = "") -> model_pb2.Model:
        """Return one model by its name; without a name the only model."""
        return self._call(self._models.GetModel, model_pb2.GetModelRequest(model=name)).model

    def health(self, service: str = GENERATION) -> bool:
        """Return whether the server can generate; for the service ``""``, whether its process is alive."""
        found = self._call(self._health.Check, health_pb2.HealthCheckRequest(service=service))
        return found.status == health_pb2.HealthCheckResponse.SERVING

    def _parts(
        self, request: generation_pb2.GenerateRequest, interval: int | None
    ) -> Iterator[generation_pb2.StreamGenerateResponse]:
        whole = generation_pb2.StreamGenerateRequest(request=request, stream_interval=interval)
        call = self._generation.StreamGenerate(whole, **self._how)
        try:
            with errors_of_calls():
                yield from call
        finally:
            call.cancel()
