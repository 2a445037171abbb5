"""Costly requests of a hostile client: their bodies by kind, and how many of each are in flight."""

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.server.proto.jaxserve.v1 import generation_pb2, sampling_pb2
from scripts.soak.requests import LETTERS

NUM_IDLE_CONNECTIONS = 2000
_PER_ADDRESS = 800
"""Idle connections of one address, so that its bound does not do all the work."""
_VOCABULARY_SIZE = 350
_PROMPT_TOKENS = 480
Body = dict[str, Any]


def idle_addresses(count: int) -> list[str]:
    """Return the local addresses of idle connections, none of them that of other clients."""
    return [f"127.0.0.{2 + number // _PER_ADDRESS}" for number in range(count)]


def _text(generator: random.Random, length: int) -> str:
    return "".join(generator.choices(LETTERS + " ", k=length))


def _plain(generator: random.Random) -> Body:
    return {"prompt": _text(generator, 20), "max_tokens": 32, "temperature": 1.0, "ignore_eos": True, "stream": True}


def _many_samples(generator: random.Random) -> Body:
    ids = range(_VOCABULARY_SIZE)
    return {
        **_plain(generator),
        "n": generator.choice((8, 32, 128)),
        "logit_bias": {str(i): generator.uniform(-1, 1) for i in ids},
        "stop_token_ids": generator.choices(ids, k=100),
        "bad_words": [_text(generator, 3) + "x" for _ in range(50)],
        "stop": [f"{i}#" for i in range(4)],
        "seed": generator.randrange(1000),
    }


def _long_text(generator: random.Random) -> Body:
    return {"prompt": _text(generator, 1000) * generator.choice((2, 20, 1000, 4000))}


def _many_texts(generator: random.Random) -> Body:
    return {"prompt": [_text(generator, 2000)] * 1024, "max_tokens": 1}


def _token_lists(generator: random.Random) -> Body:
    """A prompt of 128k token ids, or as many in prompts that fit, with log-probabilities of all."""
    if generator.random() < 0.3:
        return {"prompt": [5] * (128 << 10), "max_tokens": 1, "prompt_logprobs": 20}
    prompts = [generator.choices(range(10, _VOCABULARY_SIZE), k=_PROMPT_TOKENS) for _ in range(273)]
    return {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20, "echo": True, "logprobs": 20}


def _many_logprobs(generator: random.Random) -> Body:
    return {**_plain(generator), "n": 8, "logprobs": 20, "max_tokens": 400, "prompt_logprobs": None}


def _to_tokenize(generator: random.Random) -> Body:
    return {"prompt": _text(generator, 1000) * 4000, "return_token_strs": True}


def _regex(generator: random.Random) -> Body:
    bombs = (
        "((a{1,300}){1,300}){1,300}",
        "(" * 2000 + "a" + ")*" * 2000,
        f"[0-9]{{1,{generator.randrange(2000, 60_000)}}}(a|b|c){{500}}",
        "(.*a.*b.*c.*d){200}" + _text(generator, 3),
    )
    return {**_plain(generator), "structured_outputs": {"regex": generator.choice(bombs)}}


def _grammar(generator: random.Random) -> Body:
    rules = [f'r{i} ::= r{i + 1} r{i + 1} | "{_text(generator, 2)}"' for i in range(2000)]
    text = "\n".join(["root ::= r0", *rules, 'r2000 ::= "x"'])
    return {**_plain(generator), "structured_outputs": {"grammar": text}}


def _schema(generator: random.Random) -> Body:
    many = {f"{_text(generator, 8)}{i}": {"type": "string", "maxLength": 1000} for i in range(5000)}
    deep: Body = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    schemas: tuple[Body, ...] = (
        {"type": "object", "properties": many},
        {"allOf": [{"minLength": 9}] * 3000},
        {"type": "array", "items": {"enum": [f"{i}" * 20 for i in range(5000)]}},
        deep,
    )
    schema = generator.choice(schemas)
    return {**_plain(generator), "structured_outputs": {"json": schema}}


def _template(generator: random.Random) -> Body:
    bombs = (
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    )
    chat = {"messages": [{"role": "user", "content": _text(generator, 9)}], "max_completion_tokens": 4}
    return {**chat, "chat_template": generator.choice(bombs) + f"{{# {generator.random()} #}}"}


def _tools(generator: random.Random) -> Body:
    properties = {f"p{i}": {"type": "object", "properties": {"a": {"type": "string"}}} for i in range(10_000)}
    function = {"name": _text(generator, 1).strip() or "f", "parameters": {"type": "object", "properties": properties}}
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 8, "stream": True}
    return {**chat, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def _messages(generator: random.Random) -> Body:
    messages = [{"role": role, "content": _text(generator, 40)} for role in ("user", "assistant") for _ in range(9)]
    return {"messages": messages * generator.choice((1, 100, 2000)), "max_completion_tokens": 4, "stream": True}


def _embeddings(generator: random.Random) -> Body:
    return {"input": [_text(generator, 300) for _ in range(500)]}


def _repetition(generator: random.Random) -> Body:
    return {
        **_plain(generator), "max_tokens": 400, "prompt": _text(generator, 100), "repetition_penalty": 1.1,
        "repetition_detection": {"max_pattern_size": 1024, "min_count": 8},
    }  # fmt: skip


def _nested(generator: random.Random) -> Body:
    inner: Any = 1
    for _ in range(900):
        inner = [inner]
    return {**_plain(generator), "metadata": inner, "vllm_xargs": {"a": inner}}


def _polite(generator: random.Random) -> Body:
    """A plain request of the lengths that the hostile ones have."""
    return {**_plain(generator), "max_tokens": generator.choice((32, 400, 400, 400))}


def _long_stream(generator: random.Random) -> Body:
    return {**_plain(generator), "max_tokens": 400, "logprobs": 20}


class Kind(NamedTuple):
    """A kind of request.

    Attributes:
        num_workers: How many send it at a time.
        path: Of the request.
        make: Makes a body.
    """

    num_workers: int
    path: str
    make: Callable[[random.Random], Body]


KINDS = {
    "n with options": Kind(6, "/v1/completions", _many_samples),
    "long text": Kind(4, "/v1/completions", _long_text),
    "many texts": Kind(2, "/v1/completions", _many_texts),
    "128k tokens": Kind(2, "/v1/completions", _token_lists),
    "logprobs": Kind(4, "/v1/completions", _many_logprobs),
    "tokenize": Kind(2, "/tokenize", _to_tokenize),
    "regex": Kind(8, "/v1/completions", _regex),
    "grammar": Kind(4, "/v1/completions", _grammar),
    "schema": Kind(4, "/v1/completions", _schema),
    "template": Kind(12, "/v1/chat/completions", _template),
    "tools": Kind(3, "/v1/chat/completions", _tools),
    "messages": Kind(4, "/v1/chat/completions", _messages),
    "embeddings": Kind(2, "/v1/embeddings", _embeddings),
    "repetition": Kind(4, "/v1/completions", _repetition),
    "nested": Kind(2, "/v1/completions", _nested),
    "plain": Kind(0, "/v1/completions", _plain),
    "polite": Kind(0, "/v1/completions", _polite),
    "long stream": Kind(0, "/v1/completions", _long_stream),
    "invalid": Kind(0, "/v1/completions", lambda generator: {"prompt": generator.randrange(9)}),
}
"""Requests by name; those without workers of their own are sent in other ways."""


def _call(generator: random.Random, **params: Any) -> generation_pb2.GenerateRequest:
    found = sampling_pb2.SamplingParams(**{"temperature": 1.0, "max_tokens": 64, "ignore_eos": True, **params})
    return generation_pb2.GenerateRequest(text=_text(generator, 30), sampling_params=found)


CALLS: tuple[Callable[[random.Random], generation_pb2.GenerateRequest], ...] = (
    lambda generator: _call(generator, n=64, logit_bias={i: 0.5 for i in range(_VOCABULARY_SIZE)}),
    lambda generator: _call(generator, n=8, logprobs=20, max_tokens=300),
    lambda generator: generation_pb2.GenerateRequest(text=_text(generator, 1000) * 3000),
    lambda generator: generation_pb2.GenerateRequest(
        token_ids=sampling_pb2.TokenIds(ids=list(itertools.repeat(7, 128 << 10))),
        sampling_params=sampling_pb2.SamplingParams(prompt_logprobs=20),
    ),
)
