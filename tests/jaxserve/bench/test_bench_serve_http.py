"""``jaxserve bench serve``: the HTTP client, and how streams of events are read."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from jaxserve.bench.serve.http import HttpClient
from jaxserve.bench.serve.openai import EventReader, OpenAIBackend
from jaxserve.bench.serve.records import BenchRequest, BenchResponse, BenchServeError
from tests.jaxserve.fake_openai import FakeServer, Script, Seen, Wire, completion, echo_script, fake_server, usage

T = TypeVar("T")


def talk(server: FakeServer, work: Callable[[HttpClient], Awaitable[T]], **settings: Any) -> T:
    """Runs ``work`` with a client."""

    async def main() -> T:
        client = HttpClient(server.url, **settings)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(main())


def ask(
    script: Script,
    fields: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **request: Any,
) -> BenchResponse:
    """One completion from a server that follows a script."""

    async def work(client: HttpClient) -> BenchResponse:
        backend = OpenAIBackend(client, "/v1/completions", "fake", fields or {}, clock)
        return await backend.send(BenchRequest(**{"prompt": [1, 2, 3], "max_tokens": 4, **request}))

    with fake_server(script) as server:
        return talk(server, work, clock=clock)


EVENTS = b': ping\n\ndata: {"a":1}\n\ndata:2\r\n\r\nevent: x\ndata: one\ndata: two\n\nid: 7\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_read_however_they_were_cut(size: int) -> None:
    reader = EventReader()
    found = [event for i in range(0, len(EVENTS), size) for event in reader.feed(EVENTS[i : i + size])]
    assert found == [b'{"a":1}', b"2", b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines_of_events_end_in_any_of_three_ways(mark: bytes, end: bytes, size: int) -> None:
    stream = mark + "data: a\u2028b\n\n: nothing\n\ndata:one\ndata: two\n\ndata: [DONE]\n\n".encode().replace(
        b"\n", end
    )
    reader = EventReader()
    found = [event for i in range(0, len(stream), size) for event in reader.feed(stream[i : i + size])]
    assert found == ["a\u2028b".encode(), b"one\ntwo", b"[DONE]"]


def test_a_response_may_be_announced() -> None:
    """With 103 Early Hints, for instance, as proxies send them."""
    early = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(early)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            response = await client.request("GET", "/v1/models")
            await client.close()
        assert (response.status, response.json(), response.headers) == (200, {}, {"content-length": "2"})

    asyncio.run(main())


def test_connections_are_used_again() -> None:
    async def work(client: HttpClient) -> None:
        for _ in range(3):
            response = await client.request("GET", "/v1/models")
            assert response.status == 200
            assert response.json() == {"data": [{"id": "fake"}]}
        await asyncio.gather(*(client.request("GET", "/v1/models") for _ in range(3)))

    with fake_server() as server:
        talk(server, work, headers={"X-Mine": "yes"})
        assert server.num_connections == 3
        assert {seen.headers["x-mine"] for seen in server.seen} == {"yes"}


def test_a_connection_that_the_server_closed_is_replaced() -> None:
    async def once(seen: Seen, wire: Wire) -> None:
        await wire.respond(200, {})
        wire.writer.close()

    async def work(client: HttpClient) -> None:
        for _ in range(3):
            assert (await client.request("GET", "/")).status == 200
            await asyncio.sleep(0.02)

    with fake_server(once) as server:
        talk(server, work)
        assert server.num_connections == 3


def test_a_body_may_end_with_its_connection() -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        await wire.raw(b'HTTP/1.1 200 OK\r\n\r\n{"data":[]}')
        wire.writer.close()

    with fake_server(script) as server:
        assert talk(server, lambda client: client.request("GET", "/v1/models")).json() == {"data": []}


def test_an_response_that_breaks_off_is_an_error() -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")
        wire.writer.close()

    with fake_server(script) as server, pytest.raises(ConnectionError, match="in the middle of a response"):
        talk(server, lambda client: client.request("GET", "/v1/models"))


def test_what_is_not_http_is_an_error() -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        await wire.raw(b"SSH-2.0-OpenSSH\r\n\r\n")

    response = ask(script)
    assert not response.is_success
    assert "ConnectionError: the response is not HTTP" in response.error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_addresses_are_checked(url: str) -> None:
    with pytest.raises(BenchServeError, match="expected an address such as http://127.0.0.1:8000"):
        HttpClient(url)


def test_an_response_that_is_not_json() -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n<>")

    with fake_server(script) as server, pytest.raises(BenchServeError, match="expected a JSON response, got b'<>'"):
        talk(server, lambda client: client.request("GET", "/")).json()


def test_a_stream_is_noted_chunk_by_chunk() -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        assert seen.body == {
            "model": "fake",
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
        }
        await wire.begin()
        for i, text in enumerate(("a", "bc", "")):
            await until_read(i + 2)
            await wire.event(completion(text))
        await until_read(5)
        await wire.event(usage(11, 4))
        await wire.end()

    readings: list[float] = []

    def clock() -> float:
        readings.append(float(len(readings)))
        return readings[-1]

    async def until_read(count: int) -> None:
        while len(readings) < count:
            await asyncio.sleep(0.001)

    response = ask(script, {"temperature": 0.0}, clock)
    assert response.error == ""
    assert response.start_s == 0.0
    assert response.chunk_s == [2.0, 3.0, 4.0]  # reading 1 was of the headers
    assert (response.text, response.num_prompt_tokens, response.num_output_tokens) == ("abc", 11, 4)


def test_events_of_one_piece_came_at_one_time() -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        events = [completion("a"), completion("b"), usage(1, 2)]
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        await wire.begin()
        await wire.raw(b"%x\r\n%s\r\n" % (len(data), data))
        await wire.end()

    response = ask(script)
    assert response.error == ""
    assert response.itls_s == [0.0]


def test_usage_may_come_with_the_last_chunk_or_not_at_all() -> None:
    async def with_last(seen: Seen, wire: Wire) -> None:
        await wire.begin()
        await wire.event({**completion("a"), **{"usage": usage(5, 6)["usage"]}})
        await wire.end()

    async def without(seen: Seen, wire: Wire) -> None:
        await wire.begin()
        await wire.event({**completion("a"), "usage": None})
        await wire.end()

    response = ask(with_last)
    assert (response.num_prompt_tokens, response.num_output_tokens, len(response.chunk_s)) == (5, 6, 1)
    response = ask(without, num_prompt_tokens=3)
    assert (response.num_prompt_tokens, response.num_output_tokens) == (3, None)


def _stream(*events: Any, done: bool = True) -> Script:
    async def script(seen: Seen, wire: Wire) -> None:
        await wire.begin()
        for event in events:
            await (wire.chunk(event) if isinstance(event, bytes) else wire.event(event))
        await (wire.end() if done else wire.raw(b"0\r\n\r\n"))

    return script


def _status(status: int, body: Any) -> Script:
    async def script(seen: Seen, wire: Wire) -> None:
        await wire.respond(status, body)

    return script


async def _breaks(seen: Seen, wire: Wire) -> None:
    await wire.begin()
    await wire.event(completion("a"))
    wire.writer.close()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (_status(400, {"error": {"message": "too long", "code": 400}}), "HTTP 400: too long"),
        (_status(401, {"error": "Unauthorized"}), "HTTP 401: Unauthorized"),
        (_status(500, "oh"), "HTTP 500: oh"),
        (_stream(usage(1, 0)), "without a chunk of text"),
        (_stream(completion("a"), done=False), "ended without [DONE]"),
        (_stream(completion("a"), {"error": {"message": "it broke"}}), "ended with an error: it broke"),
        (_stream(b"data: {\n\n"), "expected an event with a JSON object"),
        (_stream(b"data: 3\n\n"), "expected an event with a JSON object"),
        (_breaks, "ConnectionError: the server closed the connection in the middle"),
    ],
)
def test_failures_are_noted(script: Script, error: str) -> None:
    response = ask(script)
    assert not response.is_success
    assert error in response.error


def test_no_server_is_noted() -> None:
    with fake_server() as server:
        pass  # its port is free again
    backend = OpenAIBackend(HttpClient(server.url), "/v1/completions", "fake", {})
    assert "ConnectionRefusedError" in asyncio.run(backend.send(BenchRequest("a", 1))).error


def test_chats() -> None:
    async def work(client: HttpClient) -> BenchResponse:
        backend = OpenAIBackend(client, "/v1/chat/completions", "fake", {"top_p": 0.5})
        return await backend.send(BenchRequest("hello you", 2))

    with fake_server(echo_script) as server:
        response = talk(server, work)
        (body,) = server.bodies("/v1/chat/completions")
    assert response.error == ""
    assert (response.text, response.num_output_tokens) == (" 0 1", 2)
    assert body["messages"] == [{"role": "user", "content": "hello you"}]
    assert (body["max_completion_tokens"], body["top_p"]) == (2, 0.5)
    assert "max_tokens" not in body


def test_reasoning_is_text_too() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"content": " yes"}, {}]
    response = ask(_stream(*({"choices": [{"delta": delta}]} for delta in deltas)))
    assert (response.text, len(response.chunk_s)) == ("hm yes", 4)


def test_endpoints_are_checked() -> None:
    with pytest.raises(BenchServeError, match="endpoint: expected a path that ends in completions, got '/v1/models'"):
        OpenAIBackend(HttpClient("http://localhost"), "/v1/models", "fake", {})
