"""Callers who leave and who do not send: their requests end, and nothing else does.

Those who do not read are a matter of connections: see test_http_listener.py.
"""

import asyncio
import logging
from typing import Any

import pytest

from tests.jaxserve.server.http_fakes import CHAT, Connection, FakeEngine, make_server

BODIES = [("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": CHAT})]


async def until(condition: Any) -> None:
    """Waits until something is so."""
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_before_the_first_output_ends_the_request(path: str, body: dict[str, Any], stream: bool) -> None:
    engine = FakeEngine()
    engine.stall_at = 0
    server = make_server(engine)

    async def leave(connection: Connection, task: "asyncio.Task[None]") -> None:
        await until(lambda: engine.requests)
        assert server.frontend.ledger.num_in_flight == 1
        connection.is_gone.set()

    answer = server.drive(leave, path, {**body, "stream": stream})
    assert answer.messages == []
    assert engine.cancelled == list(engine.requests)
    assert server.frontend.ledger.num_in_flight == 0


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_who_leaves_a_stream_ends_the_request(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(["a", "b", "c"])
    engine.stall_at = 2
    server = make_server(engine)

    async def leave(connection: Connection, task: "asyncio.Task[None]") -> None:
        await until(lambda: len(connection.sent) == 3)
        assert not engine.ended
        connection.is_gone.set()

    answer = server.drive(leave, path, {**body, "stream": True})
    assert b"[DONE]" not in answer.body and b"error" not in answer.body
    assert engine.cancelled == list(engine.requests)
    assert server.frontend.ledger.num_in_flight == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_who_leaves_a_batch_ends_all_of_it(path: str) -> None:
    engine = FakeEngine()
    engine.stall_at = 0
    server = make_server(engine)
    prompts = ["one", "two", "three"]

    async def leave(connection: Connection, task: "asyncio.Task[None]") -> None:
        await until(lambda: len(engine.requests) == 3)
        connection.is_gone.set()

    server.drive(leave, path, {"input" if path.endswith("embeddings") else "prompt": prompts})
    assert sorted(engine.ended) == sorted(engine.requests)
    assert server.frontend.ledger.num_in_flight == 0


def test_who_leaves_while_sending_the_body_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    server = make_server()

    async def run() -> list[Any]:
        headers = {"content-type": "application/json"}
        connection = Connection("POST", "/v1/completions", b"", headers)
        connection.give({"type": "http.request", "body": b'{"prom', "more_body": True})
        connection.is_gone.set()
        await server.app(connection.scope, connection.receive, connection.send)
        return connection.sent

    with caplog.at_level(logging.INFO, "jaxserve"):
        assert asyncio.run(run()) == []
    assert '"POST /v1/completions" 499' in caplog.text
    assert not server.engine.requests


def test_a_body_that_does_not_come_is_waited_for_so_long() -> None:
    server = make_server(stall_timeout=0.05)

    async def run() -> Connection:
        connection = Connection("POST", "/v1/completions", b"", {"content-type": "application/json"})
        connection.give({"type": "http.request", "body": b'{"prom', "more_body": True})
        await server.app(connection.scope, connection.receive, connection.send)
        return connection

    connection = asyncio.run(run())
    assert connection.sent[0]["status"] == 408
    assert (b"connection", b"close") in connection.sent[0]["headers"]


def test_a_server_that_is_cancelled_gives_back_what_it_holds() -> None:
    engine = FakeEngine(["a", "b"])
    engine.stall_at = 1
    server = make_server(engine)

    async def run() -> None:
        headers = {"content-type": "application/json"}
        connection = Connection("POST", "/v1/completions", b'{"prompt": "Hi", "stream": true}', headers)
        task = asyncio.ensure_future(server.app(connection.scope, connection.receive, connection.send))
        await until(lambda: len(connection.sent) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert engine.cancelled == list(engine.requests)
    assert server.frontend.ledger.num_in_flight == 0


def test_outputs_of_a_batch_wait_in_the_engines_slots_not_in_a_queue() -> None:
    """While nobody reads, each request is at most one output ahead, so that the engine client joins what comes."""
    engine = FakeEngine(["x"] * 200)
    server = make_server(engine, stall_timeout=0.0)
    num_given = 0
    outputs = engine._outputs

    def counted(*arguments: Any) -> Any:
        nonlocal num_given
        for output in outputs(*arguments):
            num_given += 1
            yield output

    engine._outputs = counted  # pyright: ignore[reportAttributeAccessIssue]

    async def run() -> None:
        headers = {"content-type": "application/json"}
        body = b'{"prompt": ["a", "b", "c"], "stream": true, "max_tokens": 200}'
        connection = Connection("POST", "/v1/completions", body, headers)
        connection.block_at(2)
        task = asyncio.ensure_future(server.app(connection.scope, connection.receive, connection.send))
        await until(lambda: len(connection.sent) == 2)
        for _ in range(300):
            await asyncio.sleep(0)
        connection.is_gone.set()
        await task

    asyncio.run(run())
    assert num_given < 12
