"""Long bodies and responses: read, made and encoded on threads, and part by part, so that the event loop goes on."""

import json
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from jaxserve.api.outputs import RequestOutput
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.server.http_api import endpoint, long_lists
from jaxserve.server.http_api.endpoint import HttpCall
from jaxserve.server.http_api.long_lists import ITEMS_AT_ONCE, LongList, in_parts, json_pieces
from jaxserve.server.http_api.responses import json_text
from jaxserve.server.long_work import MAX_ENTRIES_ON_LOOP
from tests.jaxserve.server.http_fakes import FakeEngine, Server, make_server

CHAT = {"messages": [{"role": "user", "content": "a"}]}
LONG = "ab\u2028é" * 1500


def of(items: list[Any], size: int) -> LongList:
    """A list in parts of a size."""

    def parts() -> Iterator[list[Any]]:
        yield []
        for start in range(0, len(items), size):
            yield items[start : start + size]

    return LongList(parts)


def test_pieces_join_to_the_whole() -> None:
    items = [{"a": 'x\u2028"', "b": [1, None, 2.5]}, "é", 7] * 20_000
    value = {"first": of([], 3), "a": {"of": [of(items, 1000), "text"]}, "end": of([1], 1)}
    pieces = [*json_pieces(value)]
    assert b"".join(pieces).decode() == json_text({"first": [], "a": {"of": [items, "text"]}, "end": [1]})
    assert len(pieces) > 10 and max(map(len, pieces)) < 200_000
    assert in_parts([1, 2]) == [1, 2]
    assert json.loads(b"".join(json_pieces(in_parts(range(ITEMS_AT_ONCE + 1))))) == [*range(ITEMS_AT_ONCE + 1)]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the lists that were encoded, none of them on this thread, which runs the event loop."""
    found, loop_thread = list[int](), threading.current_thread()

    def noted(value: Any) -> str:
        assert threading.current_thread() is not loop_thread
        found.append(len(value))
        return json_text(value)

    monkeypatch.setattr(long_lists, "json_text", noted)
    return found


def packing(engine: FakeEngine) -> FakeEngine:
    """An engine whose log-probabilities come as from another process."""
    generate = engine.generate

    async def packed(*arguments: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        async for output in generate(*arguments, **options):
            for one, name in [(output, "prompt_logprobs"), *((each, "logprobs") for each in output.outputs)]:
                if getattr(one, name) is not None:
                    setattr(one, name, PackedLogprobs.of(getattr(one, name)))
            yield output

    engine.generate = packed
    return engine


def compared(server: Server, whole: Server, path: str, body: dict[str, Any]) -> Any:
    """A response in pieces, and the same one from objects."""
    found, expected = (each.post(path, body) for each in (server, whole))
    assert found.status == expected.status == 200
    kept = ("choices", "usage", "prompt_logprobs")
    if body.get("stream"):
        assert [event.get("choices") for event in found.events] == [event.get("choices") for event in expected.events]
    else:
        assert [found.json().get(name) for name in kept] == [expected.json().get(name) for name in kept]
        assert "content-length" not in found.headers
    return found


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": LONG, "prompt_logprobs": 2, "logprobs": 3}),
        ("/v1/completions", {"prompt": LONG, "echo": True, "logprobs": 2}),
        ("/v1/completions", {"prompt": LONG, "echo": True, "logprobs": 2, "stream": True}),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "max_tokens": 5000}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
    ],
    ids=["prompt_logprobs", "echo", "stream", "completion", "chat"],
)
def test_logprobs_are_written_in_parts(path: str, fields: dict[str, Any], encoded: list[int]) -> None:
    """Of as many entries as the loop could write itself, and with the same bytes as all at once."""
    made = [FakeEngine([LONG[:4000]]) for _ in range(2)]
    compared(make_server(packing(made[0])), make_server(made[1]), path, fields)
    assert len(encoded) > 1 and max(encoded) <= MAX_ENTRIES_ON_LOOP / 2


def test_token_ids_and_vectors_are_written_in_parts(encoded: list[int]) -> None:
    engine = FakeEngine()
    server = make_server(engine, max_request_bytes=1 << 20)
    text = "a" * 10_000
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert (answer["count"], answer["tokens"], answer["token_strs"]) == (10_001, [1, *[97] * 10_000], ["<s>", *text])
    assert encoded == [ITEMS_AT_ONCE, ITEMS_AT_ONCE, 10_001 - 2 * ITEMS_AT_ONCE] * 2
    engine.vector = [0.5] * 3000
    answer = server.post("/v1/embeddings", {"input": ["a", "b", "c"]}).json()
    assert [one["embedding"] for one in answer["data"]] == [engine.vector] * 3
    assert encoded[6:] == [1, 1, 1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[1, 2, 3] * 30] * 1000, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a" * 70_000, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 70_000}]}),
        ("/tokenize", {"prompt": "a" * 70_000}),
        ("/detokenize", {"tokens": [97] * 30_000}),
        ("/v1/embeddings", {"input": [[1, 2, 3] * 30] * 1000}),
    ],
)
def test_long_bodies_are_read_on_threads(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    read, fields, threads = endpoint.read_json, HttpCall.fields, list[threading.Thread]()

    def noted(raw: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return read(raw)

    def noted_fields(call: HttpCall, *arguments: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return fields(call, *arguments)

    monkeypatch.setattr(endpoint, "read_json", noted)
    monkeypatch.setattr(HttpCall, "fields", noted_fields)
    server = make_server()
    assert server.post(path, body).status == 200
    assert len(threads) == 2 and threading.current_thread() not in threads
    short = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "tokens": [97], "input": "a"}
    assert server.post(path, {name: short[name] for name in body if name in short}).status == 200
    assert threads[2:] == [threading.current_thread()] * 2
