"""Load-test backend for jaxserve's gRPC API."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format

from jaxserve.bench.serve.ready import NotReadyError
from jaxserve.bench.serve.records import BenchRequest, BenchResponse, BenchServeError
from jaxserve.bench.serve.tokens import TokenSource, plain_range
from jaxserve.server.proto.jaxserve.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)

STREAMS_A_CONNECTION = 128
MAX_CONNECTIONS = 8
MAX_RECONNECT_MS = 1000  # gRPC's backoff grows to two minutes otherwise
_NOT_READY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def open_channels(target: str, count: int, is_secure: bool = False, ca_file: str | None = None) -> list[Any]:
    """Open connections to a server, each with its own socket."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    options.append(("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS))
    if not is_secure:
        return [grpc.aio.insecure_channel(target, options) for _ in range(count)]
    credentials = grpc.ssl_channel_credentials(None if ca_file is None else Path(ca_file).read_bytes())
    return [grpc.aio.secure_channel(target, credentials, options) for _ in range(count)]


class GrpcBackend:
    """Sends prompts to ``StreamGenerate``.

    Args:
        channels: Connections to the server.
        model: Name of the model; empty for the server's default.
        sampling: Fields of the sampling parameters.
        fields: Further fields of each ``GenerateRequest``, in protobuf's JSON form.
        metadata: Sent with each call, such as ``authorization``.
        clock: Returns the time of messages.

    Raises:
        BenchServeError: A field is unknown.
    """

    def __init__(
        self,
        channels: list[Any],
        model: str,
        sampling: Mapping[str, Any],
        fields: Mapping[str, Any],
        metadata: Mapping[str, str],
        clock: Callable[[], float] = time.perf_counter,
    ):
        stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
        self._calls: list[Any] = [stub.StreamGenerate for stub in stubs]
        self._turn = 0
        self._metadata = tuple((name.lower(), value) for name, value in metadata.items())
        self._clock = clock
        template = {"model": model, "sampling_params": dict(sampling)}
        try:
            self._template = json_format.ParseDict(template, generation_pb2.GenerateRequest())
            json_format.ParseDict(dict(fields), self._template)
        except json_format.ParseError as error:
            raise BenchServeError(f"expected fields of a gRPC GenerateRequest: {error}") from error

    async def send(self, request: BenchRequest) -> BenchResponse:
        """Send a request and wait for the whole response. A failure is recorded in it, never raised."""
        message = self._message(request)
        call = self._calls[self._turn % len(self._calls)]
        self._turn += 1
        response = BenchResponse(self._clock(), request.num_prompt_tokens)
        try:
            async for delta in call(message, metadata=self._metadata):
                self._note(response, delta)
        except grpc.aio.AioRpcError as error:
            response.error = f"gRPC {error.code().name}: {error.details()}"
            return response
        if not response.chunk_s:
            response.error = "the stream ended without a text"
        return response

    def _note(self, response: BenchResponse, delta: Any) -> None:
        if delta.completions:
            response.chunk_s.append(self._clock())
            response.texts.append(delta.completions[0].text)
        if delta.HasField("prompt"):
            response.num_prompt_tokens = delta.prompt.num_tokens
        if delta.HasField("usage"):
            response.num_output_tokens = delta.usage.completion_tokens
            response.num_prompt_tokens = delta.usage.prompt_tokens

    def _message(self, request: BenchRequest) -> generation_pb2.StreamGenerateRequest:
        message = generation_pb2.StreamGenerateRequest(request=self._template)
        if isinstance(request.prompt, str):
            message.request.text = request.prompt
        else:
            message.request.token_ids.ids.extend(request.prompt)
        message.request.sampling_params.max_tokens = request.max_tokens
        return message


async def grpc_model(channel: Any, model: str, metadata: Mapping[str, str]) -> model_pb2.Model:
    """Return the server's model of this name, or its only one.

    Raises:
        NotReadyError: The server cannot be reached, or reports that it is not ready.
        BenchServeError: The model is unknown.
    """
    stub: Any = model_pb2_grpc.ModelServiceStub(channel)
    pairs = tuple((name.lower(), value) for name, value in metadata.items())
    try:
        response = await stub.GetModel(model_pb2.GetModelRequest(model=model), metadata=pairs, timeout=60)
    except grpc.aio.AioRpcError as error:
        kind = NotReadyError if error.code() in _NOT_READY else BenchServeError
        raise kind(f"the server does not report its model: {error.code().name}: {error.details()}") from error
    return response.model


def grpc_tokens(channel: Any, vocab_size: int, metadata: Mapping[str, str]) -> TokenSource:
    """Return the token ids of the server's model, with its tokenizer."""
    stub: Any = tokenization_pb2_grpc.TokenizationServiceStub(channel)
    pairs = tuple((name.lower(), value) for name, value in metadata.items())

    async def count(text: str) -> int:
        request = tokenization_pb2.TokenizeRequest(text=text, add_special_tokens=False)
        try:
            return len((await stub.Tokenize(request, metadata=pairs)).token_ids)
        except grpc.aio.AioRpcError as error:
            raise BenchServeError(f"the server's tokenizer: {error.code().name}: {error.details()}") from error

    return TokenSource(plain_range(vocab_size), None, count)


def extra_fields(text: str | None) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        BenchServeError: The text is not a JSON object.
    """
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise BenchServeError(f"extra-body: expected a JSON object, got {text!r} ({error})") from error
    if not isinstance(found, dict):
        raise BenchServeError(f"extra-body: expected a JSON object, got {text!r}")
    return found
