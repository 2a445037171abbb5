"""Calls over gRPC that say nothing: how many one connection may hold, and what they cost other clients."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxserve.server.grpc_api.wakeups import whole_wakeups
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc
from tests.grpc_servers import Serving, connected, run, serving

Code = grpc.StatusCode
OWN = ("grpc.use_local_subchannel_pool", 1)
"""Option of a channel that shares no connection."""
STREAM = "/jaxserve.v1.GenerationService/StreamGenerate"
GENERATE = "/jaxserve.v1.GenerationService/Generate"


async def held_of(silent: Sequence[Any]) -> list[Any]:
    """The calls that are open once one, whichever came last, was refused although no message of it has come."""
    codes = [asyncio.ensure_future(call.code()) for call in silent]
    await asyncio.wait(codes, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = [call for call in silent if call.done()]
    assert await refused.code() is Code.RESOURCE_EXHAUSTED
    assert "2 of this connection are open already" in await refused.details()
    for code in codes:
        code.cancel()
    return [call for call in silent if call is not refused]


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_a_connection_holds_few_silent_health_calls(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr("jaxserve.server.grpc_api.open_streams.MAX_HEALTH_CALLS_PER_CONNECTION", 2)

    async def main() -> None:
        async with (
            serving(stall_timeout=0.5) as there,
            connected(there.target, OWN) as channel,
            connected(there.target, OWN) as other,
        ):
            silent = [channel.stream_stream(f"/grpc.health.v1.Health/{method}")() for _ in range(3)]
            held = await held_of(silent)
            health: Any = health_pb2_grpc.HealthStub(other)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == (
                health_pb2.HealthCheckResponse.SERVING
            )
            await generation_pb2_grpc.GenerationServiceStub(channel).Generate(generation_pb2.GenerateRequest(text="Hi"))
            with pytest.raises(grpc.aio.AioRpcError, match="was not complete after 0.5 s") as late:
                await held[0].read()
            assert late.value.code() is Code.DEADLINE_EXCEEDED
            mine: Any = health_pb2_grpc.HealthStub(channel)  # there is room again
            await held[1].code()
            await mine.Check(health_pb2.HealthCheckRequest())

    run(main)


def test_a_connection_holds_few_reflection_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.server.grpc_api.open_streams.MAX_REFLECTIONS_PER_CONNECTION", 2)

    async def main() -> None:
        async with serving() as there, connected(there.target, OWN) as channel, connected(there.target, OWN) as other:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            silent = [stub.ServerReflectionInfo() for _ in range(3)]
            held = await held_of(silent)
            others: Any = reflection_pb2_grpc.ServerReflectionStub(other)
            stream = others.ServerReflectionInfo()
            await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert (await stream.read()).HasField("list_services_response")
            held[0].cancel()
            while True:
                again = stub.ServerReflectionInfo()
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await again.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                    assert (await again.read()).HasField("list_services_response")
                    break
                await asyncio.sleep(0.001)

    run(main)


def test_a_message_that_is_no_health_check() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="cannot be parsed") as failure:
                await channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff")
            assert failure.value.code() is Code.INVALID_ARGUMENT

    run(main)


# ---------------------------------------------------------------- turns of the event loop


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


def begin_call(stream: int, method: str) -> bytes:
    """The frame that begins a call, whose message may follow."""
    fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost", "te": "trailers"}
    fields["content-type"] = "application/grpc"
    sized = [[bytes([len(part)]) + part.encode() for part in pair] for pair in fields.items()]
    return frame(1, 4, stream, b"".join(b"\x00" + name + value for name, value in sized))


HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")


class Turns:
    """Counts the turns of the event loop while the block runs, each of which takes a millisecond or more."""

    def __init__(self) -> None:
        self.count = 0
        self._is_counting = True

    def __enter__(self) -> "Turns":
        asyncio.get_running_loop().call_soon(self._turn)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_counting = False

    def _turn(self) -> None:
        self.count += 1
        time.sleep(0.001)  # for gRPC's threads
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._turn)


async def until_running(there: Serving, count: int) -> None:
    """Wait until the server has accepted so many calls that are open."""
    while there.server._interceptor._num_running != count:
        await asyncio.sleep(0.001)


async def turns_of_a_call(port: int) -> int:
    """Turns of the event loop that a call of a new connection takes."""
    message = generation_pb2.GenerateRequest(text="Hi").SerializeToString()
    data = frame(0, 1, 1, b"\0" + len(message).to_bytes(4, "big") + message)
    with Turns() as turns:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HELLO + begin_call(1, GENERATE) + data)
        received = b""
        while b"grpc-status" not in received:
            received += await reader.read(1 << 16)
        writer.close()
        return turns.count


def test_calls_of_another_connection_that_end_at_once_do_not_hold_up_a_call() -> None:
    """Each has two events at its end. gRPC's thread stopped after 278, until 209 turns of the event loop had passed."""

    async def main() -> None:
        async with serving() as there:
            assert there.server.port is not None
            alone = await turns_of_a_call(there.server.port)
            count = 250
            reader, writer = await asyncio.open_connection("127.0.0.1", there.server.port)
            writer.write(HELLO + b"".join(begin_call(2 * i + 1, STREAM) for i in range(count)))
            await until_running(there, count)
            writer.transport.abort()
            assert await turns_of_a_call(there.server.port) < alone + 100
            await until_running(there, 0)
            del reader

    run(main)


@pytest.mark.parametrize("fails_at", [None, 0, 2])
def test_a_reader_is_called_for_all_bytes_in_one_turn(fails_at: int | None) -> None:
    """Also behind an event at which it fails, such as one of an event loop that is closed."""
    sizes = (1, 2, 250, 3)

    async def main() -> tuple[list[bytes], int]:
        mine, other = socket.socketpair()
        mine.setblocking(False)
        loop, found, errors = asyncio.get_running_loop(), list[bytes](), list[Any]()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

        def read(number: int) -> None:
            found.append(mine.recv(number))
            if len(found) - 1 == fails_at:
                raise RuntimeError("the event loop is closed")

        with whole_wakeups(loop):
            loop.add_reader(mine, read, 1)
        assert "add_reader" not in vars(loop)
        for size in sizes:
            before = len(found)
            other.send(b"1" * size)
            while len(found) == before:
                await asyncio.sleep(0)
            assert len(found) == before + size
            for _ in range(5):  # it is not called again
                await asyncio.sleep(0)
            assert len(found) == before + size
        loop.remove_reader(mine)
        mine.close()
        other.close()
        return found, len(errors)

    found, num_errors = asyncio.run(main())
    assert found == [b"1"] * sum(sizes)
    assert num_errors == (fails_at is not None)
