"""One request, as each surface takes it: Python, HTTP and gRPC."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import grpc
import httpx2

from jaxserve import AsyncLLM, RequestError, RequestOutput
from jaxserve.server.proto.jaxserve.v1 import chat_pb2, generation_pb2, generation_pb2_grpc, sampling_pb2
from scripts.server_child import RunningServer
from tests.hooks import NAN_PROCESSOR

Kind = Literal["text", "token_ids", "messages"]


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        kind: What the prompt is.
        prompt: A text, token ids, or messages in OpenAI's form.
        fields: Of ``SamplingParams``.
        extras: ``priority``, ``cache_salt``, ``truncate_prompt_tokens``.
        chat: ``add_generation_prompt``, ``continue_final_message``, ``chat_template_kwargs``; for messages alone.
    """

    kind: Kind = "text"
    prompt: Any = "1+1="
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    chat: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


class Python:
    """An engine in this process, of the settings that the servers' has."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = AsyncLLM(
            "demo",
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=256,
            kv_cache_memory_bytes=8 << 20,
            compilation_cache_dir="",
            logits_processors=[NAN_PROCESSOR],
        )

    def close(self) -> None:
        """Ends it."""
        self._engine.shutdown()
        self._loop.close()

    def takes(self, asked: Asked) -> bool:
        """Whether it takes the request; anything but an answer and ``RequestError`` is a fault."""

        async def run() -> bool:
            try:
                async with contextlib.aclosing(self._outputs(asked)) as outputs:
                    async for _ in outputs:
                        pass
            except RequestError:
                return False
            return True

        return self._loop.run_until_complete(run())

    def _outputs(self, asked: Asked) -> AsyncGenerator[RequestOutput, None]:
        params = self._engine.get_default_sampling_params().clone(**asked.fields)
        extras = dict(asked.extras)
        if asked.kind == "messages":
            return self._engine.chat(asked.prompt, params, **extras, **asked.chat)
        prompt = {"prompt" if asked.kind == "text" else "prompt_token_ids": asked.prompt}
        if "cache_salt" in extras:
            prompt["cache_salt"] = extras.pop("cache_salt")
        return self._engine.generate(prompt, params, **extras)


class Http:
    """A server's HTTP side."""

    def __init__(self, server: RunningServer):
        self._client = httpx2.Client(base_url=server.http, timeout=60)

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()

    def takes(self, asked: Asked) -> bool:
        """Whether it takes the request; anything but 200 and 400 is a fault."""
        if asked.kind == "messages":
            body = {"messages": asked.prompt, **_chat_fields(asked.fields), **asked.extras, **asked.chat}
            answer = self._client.post("/v1/chat/completions", json=body)
        else:
            body = {"prompt": asked.prompt, **_http_fields(asked.fields), **asked.extras}
            answer = self._client.post("/v1/completions", json=body)
        assert answer.status_code in (200, 400), answer.text
        return answer.status_code == 200


class Grpc:
    """A server's gRPC side."""

    def __init__(self, server: RunningServer):
        self._channel = grpc.insecure_channel(server.grpc)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def takes(self, asked: Asked) -> bool:
        """Whether it takes the request; anything but OK and INVALID_ARGUMENT is a fault."""
        try:
            self._stub.Generate(grpc_request(asked), timeout=60)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
            return False
        return True


def _http_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"vllm_xargs" if name == "extra_args" else name: value for name, value in fields.items()}


def _chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same for ``/v1/chat/completions``, where ``logprobs`` is a flag and a number has another name."""
    found = _http_fields(fields)
    if "logprobs" in found:
        found["top_logprobs"] = found["logprobs"]
    if "logprobs" in found or "logprob_token_ids" in found:
        found["logprobs"] = True
    return found


def grpc_request(asked: Asked) -> generation_pb2.GenerateRequest:
    """The request as a client of the protocol writes it, unchecked."""
    request = generation_pb2.GenerateRequest(sampling_params=grpc_params(asked.fields), **asked.extras)
    if asked.kind == "text":
        request.text = asked.prompt
    elif asked.kind == "token_ids":
        request.token_ids.ids.extend(asked.prompt)
        request.token_ids.SetInParent()
    else:
        chat = dict(asked.chat)
        if "chat_template_kwargs" in chat:
            chat["chat_template_kwargs_json"] = json.dumps(chat.pop("chat_template_kwargs"))
        messages = [chat_pb2.ChatMessage(**message) for message in asked.prompt]
        request.messages.CopyFrom(chat_pb2.Conversation(messages=messages, **chat))
    return request


def grpc_params(fields: Mapping[str, Any]) -> sampling_pb2.SamplingParams:
    """The fields of ``SamplingParams`` as a client of the protocol writes them, unchecked."""
    message = sampling_pb2.SamplingParams()
    for name, value in fields.items():
        if name == "structured_outputs":
            ((kind, what),) = value.items()
            if kind == "choice":
                message.structured_outputs.choice.texts.extend(what)
            else:
                setattr(message.structured_outputs, kind, what)
        elif name == "repetition_detection":
            for part, number in value.items():
                setattr(message.repetition_detection, part, number)
        elif name == "allowed_token_ids":
            message.allowed_token_ids.ids.extend(value)
            message.allowed_token_ids.SetInParent()
        elif name == "logit_bias":
            message.logit_bias.update(value)
        elif name == "extra_args":
            message.extra_args_json = json.dumps(value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message
