"""What a request takes counts as long as it is held: a body from its first byte, a response until it is sent."""

import asyncio
import logging
import math
import threading
from typing import Any

import pytest

from jaxserve.api.errors import DeadlineError
from jaxserve.server.grpc_api import generation, services
from jaxserve.server.grpc_api.reader_pace import ReaderPace
from jaxserve.server.long_work import LONG_MESSAGE_BYTES
from jaxserve.server.proto.jaxserve.v1 import (
    chat_pb2,
    generation_pb2,
    generation_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)
from tests.grpc_servers import connected, run, serving
from tests.jaxserve.server.http_fakes import Connection, FakeEngine, make_server
from tests.observed_engine import make_frontend

LONG = "a" * (LONG_MESSAGE_BYTES + 1)


def test_a_body_counts_while_it_arrives() -> None:
    server = make_server()
    memory = server.frontend.ledger.memory

    async def leave(connection: Connection, task: "asyncio.Task[None]") -> None:
        del task
        part = {"type": "http.request", "body": b"x" * 1000, "more_body": True}
        connection.give(part, part)
        while memory.num_bytes < 2000:
            await asyncio.sleep(0)
        connection.is_gone.set()

    server.drive(leave, "/v1/completions", None)
    assert memory.num_bytes == 0


def test_a_body_without_room_is_refused_while_it_arrives() -> None:
    server = make_server(max_admitted_bytes=1 << 20)
    memory = server.frontend.ledger.memory
    memory.note("somebody", (1 << 20) - 1500)

    async def send(connection: Connection, task: "asyncio.Task[None]") -> None:
        del task
        part = {"type": "http.request", "body": b"x" * 1000, "more_body": True}
        connection.give(part, part, part)

    answer = server.drive(send, "/v1/completions", None)
    assert answer.status == 503 and "max_admitted_bytes" in answer.error["message"]
    assert memory.num_bytes == (1 << 20) - 1500


@pytest.mark.parametrize(
    ("path", "body", "least"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 50, "n": 4, "temperature": 1}, 40 * 200),
        ("/v1/embeddings", {"input": ["a", "b"]}, 40 * 600),
        ("/tokenize", {"prompt": "a" * 1000, "return_token_strs": True}, 40 * 2000),
    ],
)
def test_a_response_counts_until_it_is_sent(path: str, body: dict[str, Any], least: int) -> None:
    engine = FakeEngine(["x" * 50])
    engine.vector = [0.5] * 300
    server = make_server(engine)
    memory, found = server.frontend.ledger.memory, list[int]()

    async def read_nothing(connection: Connection, task: "asyncio.Task[None]") -> None:
        connection.block_at(1)
        while not connection.sent:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert not task.done() and server.frontend.ledger.num_in_flight == 0
        found.append(memory.num_bytes)
        connection.is_gone.set()

    server.drive(read_nothing, path, body)
    assert found[0] >= least
    assert memory.num_bytes == 0


def test_a_response_over_grpc_counts_until_it_is_sent_and_must_be_read() -> None:
    async def main() -> None:
        settings = {"stall_timeout": 0.3, "min_transfer_rate": 1 << 30}
        async with serving(**settings) as there, connected(there.target) as channel:
            there.engine.num_steps, there.engine.texts = 1, ["x" * (8 << 20)]
            call: Any = channel.unary_stream(
                "/jaxserve.v1.GenerationService/Generate",
                request_serializer=generation_pb2.GenerateRequest.SerializeToString,
                response_deserializer=generation_pb2.GenerateResponse.FromString,
            )(generation_pb2.GenerateRequest(text="Hi"))
            await call.initial_metadata()
            memory = there.frontend.ledger.memory
            await there.until_idle()
            while there.frontend.ledger.num_in_flight or not memory.num_bytes:
                await asyncio.sleep(0.001)
            assert memory.num_bytes >= 8 << 20
            while memory.num_bytes:
                await asyncio.sleep(0.01)

    run(main)


def test_a_client_must_read_as_many_bytes_per_second() -> None:
    async def main() -> None:
        pace = ReaderPace(0.3, 1000.0)
        for _ in range(3):  # as fast as it must
            async with pace.sending(200):
                await asyncio.sleep(0.15)
        with pytest.raises(DeadlineError, match=r"too slowly: \d+ bytes in .* limit: 1000 bytes per second"):
            for _ in range(9):
                async with pace.sending(10):
                    await asyncio.sleep(0.2)
        with pytest.raises(DeadlineError, match=r"did not read the response for 0.05 s"):
            async with ReaderPace(0.05, 1000.0).sending(10):
                await asyncio.sleep(5.0)
        assert ReaderPace(math.inf, 0.0).limit_s(10) is None

    asyncio.run(main())


@pytest.mark.parametrize("is_long", [False, True])
def test_long_messages_are_read_on_threads(is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[threading.Thread]()

    def note(module: Any, name: str) -> None:
        real = getattr(module, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            found.append(threading.current_thread())
            return real(*arguments, **named)

        monkeypatch.setattr(module, name, noted)

    for module, name in (
        (generation, "request_bytes"),
        (generation, "sampling_params"),
        (services, "conversation_fields"),
        (services, "conversion_bytes"),
    ):
        note(module, name)

    async def main() -> None:
        text = LONG if is_long else "Hi"
        async with serving() as there, connected(there.target) as channel:
            await generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest(text=text))
            messages = chat_pb2.Conversation(messages=[chat_pb2.ChatMessage(role="user", content=text)])
            stub = tokenization_pb2_grpc.TokenizationServiceStub(channel)
            await stub.ApplyChatTemplate(tokenization_pb2.ApplyChatTemplateRequest(messages=messages))

    run(main)
    assert len(found) == 4
    assert {each is threading.current_thread() for each in found} == {not is_long}


def test_the_budget_is_shown_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxserve"):
        make_frontend(max_admitted_bytes=3 << 20).open()
    assert "requests in flight may take 3 MiB of host memory (max_admitted_bytes)" in caplog.text
