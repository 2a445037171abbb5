"""OpenAI's own client against the application, over a real socket of uvicorn."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.api.errors import OverloadedError, RequestFailedError
from jaxserve.parsers import ParserNames
from tests.jaxserve.server.http_fakes import CHAT, FakeEngine, Server, make_server
from tests.jaxserve.server.threaded_server import threaded_server

openai = pytest.importorskip("openai", reason="needs the extra clients")


@contextlib.contextmanager
def listening(server: Server) -> Iterator[str]:
    """The base URL of a server that runs in a thread."""
    with threaded_server(server.app, log_level="error", access_log=False, timeout_graceful_shutdown=1) as url:
        yield f"{url}/v1"


@pytest.fixture
def server() -> Server:
    """With a key and parsers."""
    parsers = ParserNames("qwen3", "hermes")
    engine = FakeEngine(["<think>h", "m</think>He", "llo"])
    return make_server(engine, parsers=parsers, enable_auto_tool_choice=True, api_key=["key"])


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    """The synchronous client."""
    with listening(server) as url, openai.OpenAI(base_url=url, api_key="key", max_retries=0) as made:
        yield made


def test_chat_completions(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.reasoning == "hm"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].token == "<"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_completions(client: Any) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == "Hello"
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == 2 * len("<think>hm</think>Hello")


def test_the_clients_own_accumulator_reads_tool_calls(client: Any, server: Server) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    server.engine.texts = ([text[i : i + 3] for i in range(0, len(text), 3)],)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with client.chat.completions.stream(model="tiny", messages=CHAT, tools=[tool]) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "add"
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    whole = client.chat.completions.create(model="tiny", messages=CHAT, tools=[tool], tool_choice="auto")
    assert whole.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'


def test_completions(client: Any) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=4, extra_body={"top_k": 5}
    )
    assert [choice.text for choice in answer.choices] == ["a<thi", "b<thi"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    chunks = list(client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=9))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "<think>hm"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_embeddings_and_models(client: Any) -> None:
    answer = client.embeddings.create(model="tiny", input=["a", "b"])  # in base64, as this client asks for it
    assert [one.embedding for one in answer.data] == [[0.5, -0.25]] * 2
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_errors_have_the_clients_types(client: Any, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be in") as caught:
        client.completions.create(model="tiny", prompt="a", temperature=3)
    assert (caught.value.param, caught.value.code) == ("temperature", "400")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="x", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    server.engine.error = OverloadedError("full")
    with pytest.raises(openai.RateLimitError, match="full"):
        client.completions.create(model="tiny", prompt="a")
    server.engine.error, server.engine.error_at = RequestFailedError("it failed"), 1
    with pytest.raises(openai.APIError, match="it failed"):
        list(client.completions.create(model="tiny", prompt="a", stream=True))


def test_the_client_tries_again_when_told_to(client: Any, server: Server) -> None:
    server.engine.error = OverloadedError("full", retry_after_s=0.01)
    timer = threading.Timer(0.3, setattr, (server.engine, "error", None))
    timer.start()
    answer = client.with_options(max_retries=3).completions.create(model="tiny", prompt="a")
    timer.join()
    assert answer.choices[0].text == "<think>hm</think"


def test_the_asynchronous_client_streams_many_at_a_time(server: Server) -> None:
    async def one(client: Any) -> str:
        stream = await client.chat.completions.create(model="tiny", messages=CHAT, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(40)))

    with listening(server) as url:
        assert asyncio.run(run(url)) == ["Hello"] * 40
    assert len(server.engine.requests) == 40 and not server.engine.cancelled


def test_closing_a_stream_ends_the_request(client: Any, server: Server) -> None:
    server.engine.stall_at = 2
    stream = client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=50)
    next(iter(stream))
    assert not server.engine.ended
    stream.close()
    for _ in range(500):
        if server.engine.ended:
            break
        threading.Event().wait(0.01)
    assert server.engine.cancelled == list(server.engine.requests)
