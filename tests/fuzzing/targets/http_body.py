"""Bodies of HTTP requests: whatever is posted gets a response below 500 in the form that clients expect."""

import asyncio
import json
import logging

from jaxserve.parsers import ParserNames
from tests.fuzzing.target import Target
from tests.jaxserve.server.http_fakes import Answer, Connection, FakeEngine, make_server

_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize")
_TEXT = "<think>Hm.</think>Well: "
_CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
_HEADERS = {"content-type": "application/json"}
_LIMIT_S = 20

_PARSERS = ParserNames(tools="hermes", reasoning="qwen3")
_SERVER = make_server(FakeEngine([_TEXT, _CALL]), parsers=_PARSERS, enable_auto_tool_choice=True)
_LOOP = asyncio.new_event_loop()


def run(data: bytes) -> None:
    """Post all but the first byte, which chooses the path."""
    if not data:
        return
    logging.disable(logging.CRITICAL)  # lines about bad requests are no findings
    try:
        answer = _LOOP.run_until_complete(_post(_PATHS[data[0] % len(_PATHS)], data[1:]))
    finally:
        logging.disable(logging.NOTSET)
    _SERVER.engine.requests.clear()
    _SERVER.engine.ended.clear()
    if answer.status != 200:
        assert 400 <= answer.status < 500, answer.body
        assert answer.error["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.events
    else:
        answer.json()


async def _post(path: str, body: bytes) -> Answer:
    connection = Connection("POST", path, body, _HEADERS)
    async with asyncio.timeout(_LIMIT_S):
        await _SERVER.app(connection.scope, connection.receive, connection.send)
    return Answer(connection.sent)


_MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": "Hi", "name": "me"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "2"},
]
_FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}, "strict": True}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
_BODIES = (
    (0, {"prompt": "Hi", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "logit_bias": {"5": 1}}),
    (0, {"prompt": ["a", "b"], "n": 2, "stream": True, "logprobs": 2, "stream_options": {"include_usage": True}}),
    (0, {"prompt": [1, 2], "echo": True, "prompt_logprobs": 1, "seed": 3, "suffix": None, "best_of": 1, "min_p": 0.1}),
    (0, {"prompt": "a", "guided_regex": "a+", "structured_outputs": {"choice": ["a"]}, "truncate_prompt_tokens": 1}),
    (0, {"prompt": "a", "bad_words": ["x"], "stop_token_ids": [1], "min_tokens": 1, "allowed_token_ids": [1, 2]}),
    (1, {"messages": _MESSAGES, "tools": _TOOLS, "tool_choice": "auto", "logprobs": True, "top_logprobs": 2}),
    (1, {"messages": _MESSAGES, "tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    (1, {"messages": _MESSAGES[:2], "response_format": _SCHEMA, "stream": True, "max_completion_tokens": 9}),
    (1, {"messages": _MESSAGES[:2], "chat_template_kwargs": {"x": 1}, "add_generation_prompt": True, "priority": 1}),
    (2, {"input": ["a", "b"], "encoding_format": "base64", "model": "tiny"}),
    (2, {"input": [[1, 2], [3]], "encoding_format": "float"}),
    (3, {"prompt": "Hi", "add_special_tokens": False, "return_token_strs": True}),
    (3, {"messages": _MESSAGES, "tools": _TOOLS}),
    (4, {"tokens": [72, 105], "skip_special_tokens": True}),
)

TARGET = Target(
    run,
    seeds=tuple(bytes([number]) + json.dumps(body).encode() for number, body in _BODIES),
    words=(
        b'"stream":true,',
        b'"n":3,',
        b"\\ud800",
        b"NaN",
        b"-0",
        b"1e999",
        b"[" * 60,
        b'{"a":' * 60,
        b"null",
        b"\xff",
    ),
    packages=("jaxserve.server.http_api", "jaxserve.api", "jaxserve.server.chat", "jaxserve.parsers"),
    is_json=True,
)
