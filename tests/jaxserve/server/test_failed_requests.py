"""A request that failed, or a connection that ended, leaves nothing that only a garbage collection frees."""

import asyncio
import contextlib
import gc
import socket
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve import RequestError
from jaxserve.server.errors import UnavailableError
from jaxserve.server.http_api.endpoint import HttpCall
from jaxserve.server.http_listener import http_listening
from jaxserve.server.output_collector import OutputCollector
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.renderers import Renderers
from jaxserve.server.wire import EngineInfo
from tests.jaxserve.server.http_fakes import CHAT, FakeEngine, make_server
from tests.observed_engine import ANYBODY

PROMPTS = {"prompt": ["a", "b", "bad"]}


@pytest.fixture(autouse=True)
def _without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": 3}, 400),
        ("/v1/completions", {"prompt": "bad"}, 400),
        ("/v1/completions", PROMPTS, 400),
        ("/v1/completions", {"prompt": "a", "n": 5, "temperature": 1}, 400),
        ("/v1/chat/completions", {"messages": CHAT, "n": 4, "temperature": 1}, 429),
        ("/v1/embeddings", {"input": ["a", "bad"]}, 400),
    ],
)
def test_over_http(path: str, body: dict[str, Any], status: int, is_streamed: bool) -> None:
    engine = FakeEngine()
    engine.fails_on = {"bad"}
    server = make_server(engine, limit=4)
    with contextlib.ExitStack() as stack:
        if status == 429:
            stack.enter_context(server.frontend.ledger.admit(ANYBODY))
        stream = {"stream": True} if is_streamed and "input" not in body else {}
        answer = server.post(path, {**body, **stream})
    assert answer.status == status, answer.body
    assert not [one for one in gc.get_objects() if isinstance(one, HttpCall)]


@pytest.mark.parametrize("is_full", [False, True])
def test_connections(is_full: bool) -> None:
    def num_transports() -> int:
        return sum(isinstance(one, asyncio.Transport) for one in gc.get_objects())

    async def respond(port: int) -> bytes:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return await loop.sock_recv(client, 1000)

    async def main() -> None:
        server = make_server(port=0, grpc_port=-1, max_connections=1)
        async with http_listening(server.frontend) as address:
            before, port = num_transports(), int(address.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as held:
                if is_full:
                    before += 1
                else:
                    held.close()
                await asyncio.sleep(0.05)
                for _ in range(5):
                    assert (await respond(port)).startswith(b"HTTP/1.1 503" if is_full else b"HTTP/1.1 200")
                    while num_transports() > before:
                        await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_of_the_engine_process() -> None:
    async def fail() -> "weakref.ref[OutputCollector]":
        collector = OutputCollector()
        collector.fail(UnavailableError("lost"))
        with contextlib.suppress(UnavailableError):
            await collector.get()
        return weakref.ref(collector)

    assert asyncio.run(fail())() is None


def test_of_a_template() -> None:
    class Chat(dict[str, Any]):
        pass

    renderers = Renderers(10.0)
    info = EngineInfo(model_pb2.Model(), {}, None, {"default": "{{ nothing() }}"}, None, {})

    async def fail() -> "weakref.ref[Chat]":
        chat = Chat(messages=CHAT)
        with contextlib.suppress(RequestError):
            await renderers.render(chat, info)
        return weakref.ref(chat)

    chat = asyncio.run(fail())
    renderers.end(UnavailableError("over"))
    renderers.close()
    assert chat() is None
