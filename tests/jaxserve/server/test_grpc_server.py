"""The gRPC server's life: ports, health, reflection, stopping; and what does not kill it."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api.errors import ConfigError, OverloadedError
from jaxserve.client import AsyncClient
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.server import GENERATION, MAX_METADATA_BYTES, GrpcServer
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc
from jaxserve.server.settings import ServerConfig
from tests.conftest import REPOSITORY
from tests.grpc_servers import FakeEngine, connected, run, serving

Code = grpc.StatusCode
Status = health_pb2.HealthCheckResponse
STREAM = generation_pb2.StreamGenerateRequest(request=generation_pb2.GenerateRequest(text="Hi"))
REQUEST = generation_pb2.GenerateRequest(text="Hi")


def make_server(**settings: Any) -> GrpcServer:
    """A server that does not listen yet."""
    config = ServerConfig(**{"port": -1, "grpc_port": 0, "admin_port": 0, **settings})
    frontend = Frontend(config, FakeEngine(), "fake")
    return GrpcServer(frontend, lambda timeout_s: None)


async def assert_serves(target: str) -> None:
    """Fails unless a server still generates."""
    async with AsyncClient(target) as client:
        assert (await client.generate("Hi")).outputs[0].text == "0:0 0:1 0:2 0:3 "


def test_ports_that_are_left_out() -> None:
    async def main() -> None:
        server = make_server(grpc_port=-1, port=0)
        await server.start()
        assert server.port is None and server.admin_port is not None
        await server.stop(0.0)
        server = make_server(admin_port=-1)
        await server.start()
        assert server.port is not None and server.admin_port is None
        await server.stop(0.0)

    run(main)


@pytest.mark.parametrize("which", ["grpc_port", "admin_port"])
def test_a_port_in_use(which: str) -> None:
    async def main() -> None:
        async with serving() as there:
            server = make_server(**{which: there.server.port})
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{there.server.port}: it is in use"):
                await server.start()
            await assert_serves(there.target)

    run(main)


def test_an_address_of_another_machine() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1:0"):
            await make_server(host="192.0.2.1", insecure=True).start()

    run(main)


def test_ip_version_6() -> None:
    async def main() -> None:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"needs an IPv6 loopback: {error}")
        async with serving(host="::1") as there:
            await assert_serves(f"[::1]:{there.server.port}")

    run(main)


def test_protobuf_in_python_is_refused() -> None:
    code = "from jaxserve.server.grpc_api.server import check_protobuf; check_protobuf()"
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "ConfigError: protobuf runs without its native code" in ended.stderr


def test_health_is_that_of_the_process_and_of_the_engine() -> None:
    async def main() -> None:
        async with serving() as there:
            for target in (there.target, there.admin_target):
                async with connected(target) as channel:
                    stub = health_pb2_grpc.HealthStub(channel)

                    async def status(service: str, stub: Any = stub) -> int:
                        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

                    assert (await status(""), await status(GENERATION)) == (Status.SERVING, Status.SERVING)
                    there.server.set_serving(False)
                    assert (await status(""), await status(GENERATION)) == (Status.SERVING, Status.NOT_SERVING)
                    there.server.set_serving(True)
                    assert (await status(""), await status(GENERATION)) == (Status.SERVING, Status.SERVING)
                    with pytest.raises(grpc.aio.AioRpcError) as failure:
                        await status("nothing.such")
                    assert failure.value.code() is Code.NOT_FOUND

    run(main)


def test_a_server_that_starts_does_not_serve_yet() -> None:
    async def main() -> None:
        server = make_server()
        await server.start()
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            assert (await client.health(), await client.health("")) == (False, True)
        await server.stop(0.0)

    run(main)


def test_who_watches_the_health_sees_it_change() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            there.server.set_serving(False)
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watched = stub.Watch(health_pb2.HealthCheckRequest(service=GENERATION))
            assert (await watched.read()).status == Status.NOT_SERVING
            there.server.set_serving(True)
            assert (await watched.read()).status == Status.SERVING
            there.server.set_serving(False)
            there.server.set_serving(True)
            there.server.set_serving(False)
            assert (await watched.read()).status == Status.NOT_SERVING
            there.server.set_serving(True)
            assert (await watched.read()).status == Status.SERVING
            stopping = asyncio.create_task(there.server.stop(20.0))
            assert (await watched.read()).status == Status.NOT_SERVING
            await asyncio.wait_for(stopping, 10)  # who watches does not keep it

    run(main)


def test_what_runs_may_end_within_the_grace() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel, connected(there.target) as other:
            await assert_serves(there.target)
            there.engine.stops_at = 1
            call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(STREAM)
            await there.engine.reached.wait()
            stopping = asyncio.create_task(there.server.stop(30.0))
            await asyncio.sleep(0.05)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await generation_pb2_grpc.GenerationServiceStub(other).Generate(REQUEST)
            assert failure.value.code() is Code.UNAVAILABLE
            there.engine.go.set()
            assert len([part async for part in call]) == 4
            await stopping

    run(main)


def test_what_runs_longer_than_the_grace_is_ended() -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            there.engine.stops_at = 1
            call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(STREAM)
            await there.engine.reached.wait()
            await there.server.stop(0.1)
            await there.server.stop(0.1)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                async for _ in call:
                    pass
            assert failure.value.code() is Code.UNAVAILABLE
            await there.until_idle()

    run(main)


def test_a_client_that_knows_nothing_but_reflection() -> None:
    def generate(target: str) -> list[str]:
        with grpc.insecure_channel(target) as channel:
            pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            method = pool.FindServiceByName(GENERATION).FindMethodByName("StreamGenerate")
            request, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            call: Any = channel.unary_stream(
                f"/{GENERATION}/{method.name}",
                request_serializer=request.SerializeToString,
                response_deserializer=answer.FromString,
            )
            message: Any = request()
            message.request.text = "Hi"
            return [part.completions[0].text for part in call(message)]

    async def main() -> None:
        async with serving() as there:
            assert await asyncio.to_thread(generate, there.target) == ["0:0 ", "0:1 ", "0:2 ", "0:3 "]

    run(main)


def test_reflection_can_be_left_out() -> None:
    def services(target: str) -> list[str]:
        with grpc.insecure_channel(target) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    async def main() -> None:
        async with serving(disable_grpc_reflection=True) as there:
            with pytest.raises(grpc.RpcError, match="Method not found"):
                await asyncio.to_thread(services, there.target)
            await assert_serves(there.target)

    run(main)


def test_the_limit_of_calls_lies_above_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.server.grpc_api.server._CONNECTIONS_AT_FULL", 1)

    async def main() -> None:
        async with serving(max_concurrent_streams=2) as there, contextlib.AsyncExitStack() as stack:
            there.engine.stops_at = 0
            own = ("grpc.use_local_subchannel_pool", 1)
            channels = [await stack.enter_async_context(connected(there.target, own)) for _ in range(3)]
            stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
            running = [asyncio.ensure_future(stub.Generate(REQUEST)) for stub in stubs[:2]]
            while len(there.engine.running) < 2:
                await asyncio.sleep(0.001)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stubs[2].Generate(REQUEST)
            assert failure.value.code() is Code.RESOURCE_EXHAUSTED
            there.engine.go.set()
            await asyncio.gather(*running)
            with contextlib.suppress(OverloadedError):  # gRPC may count one call too many once
                await assert_serves(there.target)
            await assert_serves(there.target)

    run(main)


def test_a_message_that_is_too_long() -> None:
    async def main() -> None:
        async with serving(max_request_bytes=2000) as there, connected(there.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Generate(generation_pb2.GenerateRequest(text="x" * 2001))
            assert failure.value.code() is Code.RESOURCE_EXHAUSTED
            await stub.Generate(generation_pb2.GenerateRequest(text="x" * 1900))

    run(main)


@pytest.mark.parametrize(
    "metadata", [[("x", "y" * 4 * MAX_METADATA_BYTES)], [(f"x{n}", "y" * 50) for n in range(2000)]]
)
def test_metadata_that_is_too_long(metadata: list[tuple[str, str]]) -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Generate(REQUEST, metadata=metadata)
            assert failure.value.code() in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.INTERNAL)
            assert not there.engine.requests
            await assert_serves(there.target)

    run(main)


@pytest.mark.parametrize("method", ["/jaxserve.v1.GenerationService/Nothing", "/nothing", "/", "/a/b/c"])
def test_methods_that_there_are_not(method: str) -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await channel.unary_unary(method)(b"")
            assert failure.value.code() is Code.UNIMPLEMENTED
            await assert_serves(there.target)

    run(main)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
RUBBISH = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    PREFACE + b"\xff" * 500,
    PREFACE + bytes.fromhex("000000040000000000") + bytes.fromhex("000005010500000001") + b"\xff\xff\xff\xff\xff",
    b"\x00" * 10_000,
    PREFACE,
    b"",
]


@contextlib.asynccontextmanager
async def socket_to(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A plain connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("data", RUBBISH)
def test_rubbish_on_the_socket(data: bytes) -> None:
    async def main() -> None:
        async with serving() as there:
            assert there.server.port is not None
            for _ in range(3):
                async with socket_to(there.server.port) as (_, writer):
                    writer.write(data)
                    with contextlib.suppress(ConnectionError):
                        await writer.drain()
            async with socket_to(there.server.port) as (_, writer):
                writer.write(data)
                await assert_serves(there.target)

    run(main)


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=20))
def test_random_bytes_as_messages(messages: list[bytes]) -> None:
    async def main() -> None:
        async with serving() as there, connected(there.target) as channel:
            for name in ("GenerationService/Generate", "TokenizationService/Tokenize", "ModelService/GetModel"):
                method = channel.unary_unary(f"/jaxserve.v1.{name}")
                for message in messages:
                    try:
                        await method(message)
                    except grpc.aio.AioRpcError as failure:
                        assert failure.code() in (Code.INVALID_ARGUMENT, Code.NOT_FOUND), failure
            await assert_serves(there.target)

    run(main)
