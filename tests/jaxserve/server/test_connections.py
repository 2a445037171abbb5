"""Connections: how many, how fast, for which hosts, and what one may make the server keep before it has a key."""

import asyncio
import contextlib
import logging
import resource
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxserve.server import connections, http_listener
from jaxserve.server.connections import (
    AcceptFailures,
    ConnectionLimits,
    FewLines,
    TransferLimits,
    raise_open_files_limit,
)
from jaxserve.server.http_listener import http_listening
from jaxserve.server.http_protocol import Exchange
from jaxserve.server.http_transport import WatchedTransport
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc
from tests.grpc_servers import connected, run, serving
from tests.jaxserve.server.http_fakes import Server, make_server

# ---------------------------------------------------------------- hosts


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        *(({}, host, 200) for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "a.localhost", "LOCALHOST.")),
        *(({}, host, 403) for host in ("evil.example", "evil.example:8000", "10.0.0.1", "localhost.evil.example")),
        ({"api_key": ["k"]}, "evil.example", 200),
        ({"uds": "/tmp/socket"}, "evil.example", 200),
        ({"host": "0.0.0.0", "insecure": True}, "evil.example", 200),
        ({"allowed_hosts": ["api.example", "*.inner.example"]}, "api.example:443", 200),
        ({"allowed_hosts": ["api.example", "*.inner.example"]}, "a.inner.example", 200),
        ({"allowed_hosts": ["api.example", "*.inner.example"]}, "inner.example", 403),
        ({"allowed_hosts": ["api.example"]}, "localhost", 403),
        ({"api_key": ["k"], "allowed_hosts": ["api.example"]}, "evil.example", 403),
        ({"allowed_hosts": ["*"]}, "evil.example", 200),
    ],
)
def test_requests_are_for_hosts_that_the_server_is(settings: dict[str, Any], host: str, status: int) -> None:
    server = make_server(**{"allowed_hosts": None, **settings})
    answer = server.get("/health", host=host)
    assert answer.status == status
    if status == 403:
        assert "--allowed-hosts" in answer.error["message"]


def test_requests_without_a_host_are_those_of_old_clients() -> None:
    assert make_server(allowed_hosts=None).get("/health").status == 200


# ---------------------------------------------------------------- numbers of connections


def test_connections_are_limited_in_all_and_by_address() -> None:
    limits = ConnectionLimits(3, 2)
    assert [limits.enter(address) for address in ("a", "a", "a", "b", "c")] == [True, True, False, True, False]
    limits.leave("a")
    assert [limits.enter(address) for address in ("", "a")] == [True, False]


async def sent(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def closed(*writers: asyncio.StreamWriter) -> None:
    """Closes connections."""
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def port_of(address: str) -> int:
    """The port that is listened on."""
    return int(address.rpartition(":")[2])


HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def test_connections_beyond_the_limit_are_told_to_retry() -> None:
    async def main() -> None:
        server = make_server(port=0, grpc_port=-1, max_connections_per_address=2)
        async with http_listening(server.frontend) as address:
            port = port_of(address)
            first, second = [await sent(port, HEALTH) for _ in range(2)]
            assert (await first[0].readline()).startswith(b"HTTP/1.1 200")
            assert (await second[0].readline()).startswith(b"HTTP/1.1 200")
            reader, writer = await sent(port, b"")
            assert (await reader.read()).startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n")
            await closed(writer, first[1])
            while True:  # until the server has noticed
                reader, writer = await sent(port, HEALTH)
                line = await reader.readline()
                await closed(writer)
                if line.startswith(b"HTTP/1.1 200"):
                    break
            await closed(second[1])

    asyncio.run(main())


# ---------------------------------------------------------------- slow ones


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stall_timeout": 0.2, "min_transfer_rate": 100_000}, "100000 bytes per second (min_transfer_rate)"),
        ({"stall_timeout": 60.0, "body_timeout": 0.2}, "limits: 0.2 s (body_timeout)"),
        ({"stall_timeout": 0.0, "body_timeout": 0.2}, "limits: 0.2 s (body_timeout)"),
    ],
)
def test_a_body_that_trickles_ends(settings: dict[str, Any], message: str) -> None:
    """At a byte every hundredth of a second it would never stall."""

    async def main() -> bytes:
        server = make_server(port=0, grpc_port=-1, **settings)
        async with http_listening(server.frontend) as address:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            reader, writer = await sent(port_of(address), head + b"content-length: 100000\r\n\r\n")
            response = asyncio.ensure_future(reader.readuntil(b"}}"))
            while not response.done():
                writer.write(b" ")
                await asyncio.sleep(0.01)
            assert server.frontend.ledger.memory.num_bytes == 0
            await closed(writer)
            return response.result()

    found = asyncio.run(main()).decode()
    assert found.startswith("HTTP/1.1 408") and message in found


class FakeTransport:
    """A transport whose client receives as many bytes as the test says."""

    def __init__(self) -> None:
        self.buffered = 0
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.buffered += len(data)

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def get_extra_info(self, name: str) -> Any:
        if name == "socket":
            raise OSError("it is not a real one")
        return None

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


class FakeLoop:
    """A clock, and what is to be called next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.later: Any = None

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Any) -> Any:
        self.later = (self.now_s + delay_s, call)
        return None


@pytest.mark.parametrize(("rate", "ends"), [(99.0, True), (101.0, False)])
def test_a_reader_that_trickles_ends(rate: float, ends: bool) -> None:
    transport, loop = FakeTransport(), FakeLoop()
    watched: Any = WatchedTransport(transport, TransferLimits(8.0, 100.0), loop)  # pyright: ignore[reportArgumentType]
    watched._count_taken = lambda: 100_000 - transport.buffered
    watched.write(b"x" * 100_000)
    for _ in range(40):
        loop.now_s, look = loop.later
        transport.buffered = 100_000 - int(rate * loop.now_s)
        look()
        if transport.is_aborted:
            break
    assert transport.is_aborted == ends


def test_pipelined_requests_are_parsed_as_responses_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a MiB of them made 9,000 objects before the first was answered."""
    made, go = list[Exchange](), asyncio.Event()
    create = Exchange.__init__

    def noted(exchange: Exchange, *arguments: Any, **options: Any) -> None:
        made.append(exchange)
        create(exchange, *arguments, **options)

    async def health(server: Server) -> None:
        async def slow(*arguments: Any) -> Any:
            await go.wait()
            return await original(*arguments)

        original = server.frontend.engine.metrics
        server.frontend.engine.metrics = slow

    monkeypatch.setattr(Exchange, "__init__", noted)
    number = 6000

    async def main() -> None:
        server = make_server(port=0, grpc_port=-1)
        await health(server)
        async with http_listening(server.frontend) as address:
            request = b"GET /version HTTP/1.1\r\nhost:a\r\n\r\n"
            slow = b"GET /metrics HTTP/1.1\r\nhost:a\r\n\r\n"
            last = b"GET /version HTTP/1.1\r\nhost:a\r\nconnection:close\r\n\r\n"
            reader, writer = await sent(port_of(address), slow + request * number + last)
            for _ in range(20):
                await asyncio.sleep(0.005)
            assert 1 < len(made) < 60
            go.set()
            found = await reader.read()
            assert found.count(b"HTTP/1.1 200") == number + 2 == len(made)
            assert found.index(b"jaxserve:engine_up") < found.index(b'{"version"')
            await closed(writer)

    asyncio.run(main())


# ---------------------------------------------------------------- descriptors


def test_failures_to_accept_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s, loop = [100.0], asyncio.new_event_loop()
    handler = AcceptFailures(lambda: now_s[0])
    context: dict[str, Any] = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(24, "Too many open files"),
    }
    with caplog.at_level(logging.ERROR):
        for _ in range(5000):
            handler(loop, context)
        now_s[0] += 61
        handler(loop, context)
        handler(loop, {"message": "another error"})
    loop.close()
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first == "connections cannot be accepted: [Errno 24] Too many open files; failed attempts so far: 1"
    assert second.endswith("failed attempts so far: 5001") and third == "another error"


def test_lines_that_clients_cause_are_few(caplog: pytest.LogCaptureFixture) -> None:
    now_s, few = [100.0], FewLines(3, lambda: now_s[0])
    logger = logging.getLogger("jaxserve.test.few")
    logger.addFilter(few)
    with caplog.at_level(logging.INFO):
        for wave in range(3):
            for number in range(10):
                logger.info("%s is late by %d s", "client", number)
            logger.info("another kind")
            now_s[0] += 30 * (1 + wave)
    lines = [record.getMessage() for record in caplog.records]
    left_out = "; 17 lines like this were left out before"
    first = [f"client is late by {number} s" for number in range(3)]
    assert lines == [*first, *["another kind"] * 2, first[0] + left_out, *first[1:], "another kind"]


def test_late_requests_write_few_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listener, "_FEW_LINES", FewLines(2))

    async def main() -> None:
        server = make_server(port=0, grpc_port=-1, stall_timeout=0.2)
        async with http_listening(server.frontend) as address:
            opened = [await sent(port_of(address), b"GET") for _ in range(20)]
            with contextlib.suppress(ConnectionError):
                for reader, _ in opened:
                    await reader.read()
            await closed(*(writer for _, writer in opened))

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert sum("did not arrive within" in record.getMessage() for record in caplog.records) == 2


def test_as_many_files_may_be_open_as_the_machine_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[tuple[int, int]]()
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (256, 4096))
    monkeypatch.setattr(connections.resource, "setrlimit", lambda kind, limits: found.append((kind, limits)))
    raise_open_files_limit()
    assert found == [(resource.RLIMIT_NOFILE, (4096, 4096))]


# ---------------------------------------------------------------- gRPC


def test_silent_reflection_streams_leave_places_for_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no key. There are few, and they end."""
    monkeypatch.setattr("jaxserve.server.grpc_api.server._CONNECTIONS_AT_FULL", 1)
    monkeypatch.setattr("jaxserve.server.grpc_api.open_streams.MAX_REFLECTIONS", 3)

    async def main() -> None:
        async with serving(max_concurrent_streams=64, stall_timeout=1.0) as there, connected(there.target) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            silent = [stub.ServerReflectionInfo() for _ in range(3)]
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            for stream in silent:  # until each is open
                await stream.write(request)
                assert (await stream.read()).HasField("list_services_response")
            with pytest.raises(grpc.aio.AioRpcError, match="3 are open already") as refused:
                await stub.ServerReflectionInfo().read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            health: Any = health_pb2_grpc.HealthStub(channel)
            assert (
                await health.Check(health_pb2.HealthCheckRequest())
            ).status == health_pb2.HealthCheckResponse.SERVING
            calls: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            await calls.Generate(generation_pb2.GenerateRequest(text="Hi"))
            with pytest.raises(grpc.aio.AioRpcError, match="took longer than 1 s") as late:
                await silent[0].read()
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    run(main)


def test_grpc_connections_are_limited() -> None:
    async def main() -> None:
        async with serving(max_connections=1) as there, connected(there.target) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            async with connected(there.target, ("grpc.use_local_subchannel_pool", 1)) as other:
                second: Any = health_pb2_grpc.HealthStub(other)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await second.Check(health_pb2.HealthCheckRequest(), timeout=5)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    run(main)
