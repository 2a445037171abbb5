"""Requests of a soak test: prompts with known completions, features with checkable responses, and invalid requests."""

import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from jaxserve.demo.tasks import TASKS, completion_prompt, held_out
from jaxserve.server.proto.jaxserve.v1 import chat_pb2, generation_pb2, sampling_pb2

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class KnownPrompt(NamedTuple):
    """A prompt, and its greedy completions once they are known.

    Attributes:
        prompt: Text.
        max_tokens: New tokens of the response to the prompt as it is; the end of sequence does not end it.
        text: That response.
        chat: The response to the prompt as a user's message, of at most 16 tokens.
    """

    prompt: str
    max_tokens: int
    text: str = ""
    chat: str = ""

    def completion(self, **fields: Any) -> dict[str, Any]:
        """Return a request for the response."""
        return {
            "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True, **fields
        }  # fmt: skip

    def chat_completion(self, **fields: Any) -> dict[str, Any]:
        """Return a request for the response to a message."""
        messages = [{"role": "user", "content": self.prompt}]
        return {"messages": messages, "max_completion_tokens": 16, "temperature": 0, **fields}

    def grpc_request(self) -> generation_pb2.GenerateRequest:
        """Return the request over gRPC."""
        params = sampling_pb2.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=self.max_tokens)
        return generation_pb2.GenerateRequest(text=self.prompt, sampling_params=params)

    def grpc_chat(self) -> generation_pb2.GenerateRequest:
        """Return the conversation over gRPC."""
        message = chat_pb2.ChatMessage(role="user", content=self.prompt)
        conversation = chat_pb2.Conversation(messages=[message])
        params = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=16)
        return generation_pb2.GenerateRequest(messages=conversation, sampling_params=params)


def prompts(seed: int) -> list[KnownPrompt]:
    """Short prompts of the demo model's tasks, and longer texts that fill more than a page."""
    generator = random.Random(seed)
    found = [KnownPrompt(completion_prompt(q), 8 + 7 * i) for i, task in enumerate(TASKS) for q in held_out(task, 4)]
    for length in (40, 70, 100, 130):
        words = ["".join(generator.choices(LETTERS, k=3)) for _ in range(length // 4)]
        found.append(KnownPrompt(" ".join(words), 60))
    return found


class Feature(NamedTuple):
    """An HTTP request with a check of the response's JSON."""

    kind: str
    path: str
    body: Any
    is_right: Callable[[Any], bool]


def _texts(response: Any) -> list[str]:
    return [choice["text"] for choice in response["choices"]]


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda response: all(re.fullmatch(pattern, text) for text in _texts(response))


def _completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "12+30=", "max_tokens": 8, **fields}


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_completion_tokens": 24, **fields}


ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}]
_NAMED = {"type": "function", "function": {"name": "add"}}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["p", "q"]}}}

FEATURES = (
    Feature(
        "n",
        "/v1/completions",
        _completion(n=3, temperature=1.0, seed=7),
        lambda response: len(response["choices"]) == 3,
    ),
    Feature(
        "logprobs",
        "/v1/completions",
        _completion(logprobs=3, temperature=0, ignore_eos=True),
        lambda response: len(response["choices"][0]["logprobs"]["token_logprobs"]) == 8,
    ),
    Feature(
        "echo",
        "/v1/completions",
        _completion(echo=True, logprobs=1, temperature=0),
        lambda response: _texts(response)[0].startswith("12+30="),
    ),
    Feature("choice", "/v1/completions", _completion(structured_outputs={"choice": ["yes", "no"]}), _matches("yes|no")),
    Feature("regex", "/v1/completions", _completion(structured_outputs={"regex": "[0-9]{3}"}), _matches("[0-9]{3}")),
    Feature(
        "stop", "/v1/completions", _completion(stop=["4"], temperature=0), lambda response: _texts(response) == [""]
    ),
    Feature("several prompts", "/v1/completions", _completion(prompt=["1+1=", "2+2="]), lambda a: len(_texts(a)) == 2),
    Feature(
        "json schema",
        "/v1/chat/completions",
        _chat(response_format=_SCHEMA),
        lambda response: response["choices"][0]["message"]["content"] in ('"p"', '"q"'),
    ),
    Feature(
        "tool",
        "/v1/chat/completions",
        _chat(tools=TOOLS, tool_choice=_NAMED),
        lambda response: response["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add",
    ),
    Feature(
        "tool none",
        "/v1/chat/completions",
        _chat(tools=TOOLS, tool_choice="none", temperature=0),
        lambda response: isinstance(response["choices"][0]["message"]["content"], str),
    ),
    Feature("embeddings", "/v1/embeddings", {"input": ["one", "two"]}, lambda response: len(response["data"]) == 2),
    Feature(
        "tokenize", "/tokenize", {"prompt": "hello"}, lambda response: response["count"] == len(response["tokens"])
    ),
)
LOOKS = ("/v1/models", "/health", "/version", "/metrics", "/")


class Bad(NamedTuple):
    """An invalid HTTP request and its expected error."""

    path: str
    body: Any
    statuses: tuple[int, ...] = (400,)


BAD = (
    Bad("/v1/completions", _completion(temperature=9)),
    Bad("/v1/completions", _completion(n=2, temperature=0)),
    Bad("/v1/completions", _completion(top_p=0)),
    Bad("/v1/completions", _completion(logprobs=1000)),
    Bad("/v1/completions", _completion(max_tokens=0)),
    Bad("/v1/completions", _completion(max_tokens=10**9)),
    Bad("/v1/completions", _completion(prompt=5)),
    Bad("/v1/completions", _completion(prompt="")),
    Bad("/v1/completions", _completion(prompt=[10**6])),
    Bad("/v1/completions", _completion(prompt="a b " * 20_000)),
    Bad("/v1/completions", _completion(stop=[""])),
    Bad("/v1/completions", _completion(structured_outputs={"regex": "("})),
    Bad("/v1/completions", _completion(structured_outputs={"grammar": "start: nowhere"})),
    Bad("/v1/completions", _completion(structured_outputs={"json": {"type": "nothing"}})),
    Bad("/v1/completions", _completion(structured_outputs={"regex": "a", "choice": ["b"]})),
    Bad("/v1/completions", _completion(stream_options={"include_usage": True})),
    Bad("/v1/completions", _completion(model="nobody"), (404,)),
    Bad("/v1/completions", ["not", "an", "object"]),
    Bad("/v1/completions", {}),
    Bad("/v1/chat/completions", {"messages": []}),
    Bad("/v1/chat/completions", {"messages": [{"role": 5}]}),
    Bad("/v1/chat/completions", _chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "no"}})),
    Bad("/v1/chat/completions", _chat(top_logprobs=2)),
    Bad("/v1/embeddings", {"input": []}),
    Bad("/detokenize", {"tokens": ["a"]}),
    Bad("/v1/nothing", {}, (404,)),
    Bad("/v1/models", {}, (405,)),
)
RAW_BAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 3\r\n\r\n{,}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: -1\r\n\r\n",
    b"GET /v1/models HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET " + b"/x" * 100_000 + b" HTTP/1.1\r\n\r\n",
)


class BadCall(NamedTuple):
    """An invalid gRPC call and its expected status."""

    request: generation_pb2.GenerateRequest
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT


def _call(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(**{"text": "12+30=", **fields})


BAD_CALLS = (
    BadCall(_call(sampling_params=sampling_pb2.SamplingParams(temperature=9.0))),
    BadCall(_call(sampling_params=sampling_pb2.SamplingParams(max_tokens=0))),
    BadCall(_call(sampling_params=sampling_pb2.SamplingParams(max_tokens=2**60))),
    BadCall(_call(text="a b " * 20_000)),
    BadCall(generation_pb2.GenerateRequest()),
    BadCall(generation_pb2.GenerateRequest(token_ids=sampling_pb2.TokenIds(ids=[10**6]))),
    BadCall(generation_pb2.GenerateRequest(messages=chat_pb2.Conversation())),
    BadCall(_call(model="nobody"), grpc.StatusCode.NOT_FOUND),
)


def half_a_request() -> bytes:
    """Return the first part of a request that is never completed."""
    body = json.dumps(_completion()).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return head + body[: len(body) // 2]
