"""The listener, through real sockets: what clients may send, who does not read, and addresses."""

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvicorn

from jaxserve.api.errors import ConfigError
from jaxserve.api.outputs import CompletionOutput, RequestOutput
from jaxserve.api.request import Request
from jaxserve.server.grpc_api.server import GrpcServer
from jaxserve.server.http_api.app import RequestLabels
from jaxserve.server.http_listener import http_listening
from jaxserve.server.http_protocol import MAX_HEADER_BYTES, HttpProtocol
from tests.certificates import Authority
from tests.jaxserve.server.http_fakes import Connection, FakeEngine, Server, make_server

STALL_S = 0.3
LONG_PROMPT = {"prompt": "x" * 1_300_000}  # about 6 MB in tokens
HEALTH = b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n"
Result = TypeVar("Result")


class LongEngine(FakeEngine):
    """Streams megabytes."""

    async def generate(self, request: Request, *, is_waiting: bool = False) -> AsyncGenerator[RequestOutput, None]:
        """40 of them."""
        self.requests[request.request_id] = request
        try:
            for _ in range(40):
                output = CompletionOutput(index=0, text="x" * (1 << 20), token_ids=[120], cumulative_logprob=None)
                yield RequestOutput(
                    request_id=request.request_id,
                    prompt="Hi",
                    prompt_token_ids=[72],
                    outputs=[output],
                    finished=False,
                    num_cached_tokens=0,
                )
                await asyncio.sleep(0)
        finally:
            self.ended.append(request.request_id)


class Client:
    """A TCP connection that reads when told to."""

    def __init__(self, sock: socket.socket):
        self.sock = sock

    async def send(self, data: bytes) -> None:
        """Sends."""
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def read(self, size: int = 1 << 16) -> bytes:
        """What is there; nothing where the server has hung up."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.get_running_loop().sock_recv(self.sock, size)
        return b""

    async def read_all(self) -> bytes:
        """Everything until the server hangs up."""
        found = b""
        while part := await self.read():
            found += part
        return found


def run(main: Callable[[], Awaitable[Result]]) -> Result:
    """Runs a test's coroutine, not for ever."""

    async def bounded() -> Result:
        async with asyncio.timeout(30):
            return await main()

    return asyncio.run(bounded())


def listening(server: Server) -> contextlib.AbstractAsyncContextManager[str]:
    """A server's listener."""
    return http_listening(server.frontend)


def make(engine: FakeEngine | None = None, **settings: Any) -> Server:
    """A server for a port that is free."""
    return make_server(engine, **{"port": 0, "grpc_port": -1, "stall_timeout": STALL_S, **settings})


@contextlib.asynccontextmanager
async def connected(address: str, receive_buffer: int = 1 << 14) -> AsyncIterator[Client]:
    """A connection to an address that a listener gave."""
    family = socket.AF_UNIX if address.startswith("unix:") else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        to = address.removeprefix("unix:") if family == socket.AF_UNIX else ("127.0.0.1", port_of(address))
        await asyncio.get_running_loop().sock_connect(sock, to)
        yield Client(sock)


@contextlib.asynccontextmanager
async def unread(address: str, context: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    """A connection that asks for megabytes and reads some bytes of them."""
    sock = socket.create_connection(("127.0.0.1", port_of(address)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    name = None if context is None else "localhost"
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 12, ssl=context, server_hostname=name)
    try:
        writer.write(post("/tokenize", LONG_PROMPT))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        yield
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


def port_of(address: str) -> int:
    """The port in an address."""
    return int(address.rpartition(":")[2])


def post(path: str, value: Any) -> bytes:
    """A request."""
    body = json.dumps(value).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def num_open() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


async def until(condition: Callable[[], bool]) -> None:
    """Waits until something is so."""
    while not condition():
        await asyncio.sleep(0.005)


async def answer(address: str) -> bytes:
    """What a new connection's request gets."""
    async with connected(address) as client:
        await client.send(HEALTH.replace(b"here", b"here\r\nconnection: close"))
        return await client.read_all()


async def assert_cut(address: str, *parts: bytes) -> None:
    """Fails unless a connection that sends this and waits is hung up on, and its descriptor is given back."""
    before = num_open()
    async with connected(address) as client:
        for part in parts:
            await client.send(part)
            await asyncio.sleep(0.01)
        assert b"HTTP/1.1 500" not in await client.read_all()
        await until(lambda: num_open() == before + 1)


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * (70 << 10) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * (70 << 10) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: aaaa\r\n" * (8 << 10) + b"\r\n",
    ],
)
def test_headers_that_are_too_long_are_refused(head: bytes) -> None:
    async def main() -> None:
        async with listening(make()) as address, connected(address) as client:
            await client.send(head)
            assert (await client.read_all()).startswith(b"HTTP/1.1 431 ")

    run(main)


ENDLESS = [
    (b"GET /", b"a" * 1000),
    (b"GET / HTTP/1.1\r\nx: ", b"a" * 1000),
    (b"GET / HTTP/1.1\r\n", b"x: " + b"a" * 1000 + b"\r\n"),
    (b"GET / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: " + b"a" * 1000 + b"\r\n"),
    (b"GET / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a" * 1000),
    (b"GET / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n3;", b"a" * 1000),
    (b"", b"\r\n" * 500),
]


@pytest.mark.parametrize(("begin", "more"), ENDLESS)
def test_headers_and_trailers_that_never_end_are_cut_off(begin: bytes, more: bytes) -> None:
    async def main() -> int:
        num_sent = 0
        async with listening(make(stall_timeout=0.0)) as address, connected(address) as client:
            await client.send(begin)
            with contextlib.suppress(ConnectionError):
                while num_sent < 20 << 20:
                    await client.send(more)
                    await asyncio.sleep(0)
                    num_sent += len(more)
        return num_sent

    assert run(main) < 4 << 20  # what is in the sockets' buffers when the server hangs up


def test_who_sends_too_long_a_body_gets_the_answer_and_may_go_on() -> None:
    async def main() -> None:
        async with listening(make(max_request_bytes=1024)) as address, connected(address) as client:
            await client.send(post("/tokenize", LONG_PROMPT))
            assert b" 413 " in await client.read()
            await client.send(HEALTH)
            assert b" 200 OK" in await client.read()

    run(main)


@pytest.mark.parametrize("path", [b"/health", b"/llm/health"])
def test_a_proxy_may_keep_its_path_or_take_it_away(path: bytes) -> None:
    async def main() -> None:
        async with listening(make(root_path="/llm")) as address, connected(address) as client:
            await client.send(HEALTH.replace(b"/health", path))
            assert b" 200 OK" in await client.read()

    run(main)


def test_headers_that_are_long_enough_are_read() -> None:
    """Each request counts for itself, and a body is no header."""

    async def main() -> None:
        async with listening(make()) as address, connected(address) as client:
            for _ in range(3):
                await client.send(HEALTH.replace(b"here", b"h" * (MAX_HEADER_BYTES - 1000)))
                assert (await client.read()).startswith(b"HTTP/1.1 200 ")
            await client.send(post("/tokenize", {"prompt": "Hi" * MAX_HEADER_BYTES}))
            assert (await client.read()).startswith(b"HTTP/1.1 200 ")

    run(main)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (b"GET / HT",),
        (b"GET / HTTP/1.1\r\nhost: here\r\n",),
        (HEALTH, b"GET / HT"),
        (HEALTH + b"GET / HT",),
        (HEALTH, b"\r\n"),
        (b"POST /health HTTP/1.1\r\nhost: here\r\ncontent-length: 9\r\n\r\n1", b"2", b"3"),
    ],
)
def test_a_request_that_does_not_come_whole_is_cut(parts: tuple[bytes, ...]) -> None:
    async def main() -> None:
        async with listening(make(keepalive_timeout=600)) as address:
            await assert_cut(address, *parts)
            assert b"200 OK" in await answer(address)

    run(main)


def test_a_request_sent_bit_by_bit_is_cut_too() -> None:
    async def main() -> None:
        async with listening(make()) as address, connected(address) as client:
            await client.send(b"GET /")
            with contextlib.suppress(ConnectionError):
                while True:
                    await client.send(b"a")
                    await asyncio.sleep(STALL_S / 10)

    run(main)


def test_a_request_that_waits_for_its_answer_is_not_cut() -> None:
    engine = FakeEngine(["a", "b"])
    engine.stall_at = 1

    async def main() -> None:
        async with listening(make(engine)) as address, connected(address) as client:
            await client.send(post("/v1/completions", {"prompt": "Hi", "stream": True}))
            await until(lambda: bool(engine.requests))
            await asyncio.sleep(2 * STALL_S)
            assert not engine.ended

    run(main)


def test_idle_connections_wait_as_long_as_the_keepalive_timeout() -> None:
    async def main() -> None:
        async with listening(make(keepalive_timeout=600)) as address, connected(address) as client:
            for _ in range(2):
                await client.send(HEALTH)
                assert b"200 OK" in await client.read()
                await asyncio.sleep(1.5 * STALL_S)

    run(main)


# ---------------------------------------------------------------- who does not read


def test_who_does_not_read_a_stream_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    engine = LongEngine()
    server = make(engine)

    async def main() -> None:
        async with listening(server) as address:
            before = num_open()
            async with connected(address) as client:
                await client.send(post("/v1/completions", {"prompt": "Hi", "stream": True}))
                await until(lambda: bool(engine.requests))
                assert num_open() == before + 2
                await until(lambda: bool(engine.ended) and num_open() == before + 1)
                assert b"[DONE]" not in await client.read_all()
            assert server.frontend.ledger.num_in_flight == 0
            assert b"200 OK" in await answer(address)

    with caplog.at_level(logging.INFO):
        run(main)
    assert '"POST /v1/completions" 499' in caplog.text and "received nothing for" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("ending", ["keep-alive", "close"])
def test_who_does_not_read_a_whole_answer_is_cut(ending: str, caplog: pytest.LogCaptureFixture) -> None:
    """A whole answer is one send, which returns at once; what is left waits in the transport."""
    wanted = post("/v1/completions", {"prompt": "a", "max_tokens": 10_000_000})
    wanted = wanted.replace(b"here", b"here\r\nconnection: " + ending.encode())

    async def main() -> int:
        async with listening(make(FakeEngine(["x" * 6_000_000]), keepalive_timeout=1)) as address:
            before = num_open()
            async with connected(address) as client:
                await client.send(wanted)
                await until(lambda: "/v1/completions" in caplog.text)
                assert num_open() == before + 2
                await until(lambda: num_open() == before + 1)
                return len(await client.read_all())

    with caplog.at_level(logging.INFO):
        assert run(main) < 4_000_000
    assert "received nothing for" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_who_does_not_read_through_tls_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path / "known")
    context = ssl.create_default_context(cafile=str(authority.pair.certificate))

    async def main() -> None:
        async with listening(make(keepalive_timeout=600, **authority.sign("web").settings)) as address:
            before = num_open()
            async with unread(address, context):
                assert num_open() == before + 2
                await until(lambda: num_open() == before + 1)

    with caplog.at_level(logging.INFO):
        run(main)
    assert "received nothing for" in caplog.text


def test_who_reads_slowly_is_waited_for() -> None:
    """Some bytes within the limit are enough, though the transport's buffer gets new ones all the while."""

    async def main() -> None:
        async with listening(make(LongEngine(), keepalive_timeout=600)) as address, connected(address, 4096) as client:
            await client.send(post("/v1/completions", {"prompt": "Hi", "stream": True}))
            begin_s = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() < begin_s + 4 * STALL_S:
                assert await client.read(1 << 15)
                await asyncio.sleep(STALL_S / 10)
            num_left = 0
            while not (part := await client.read(1 << 20)).endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
                assert part
                num_left += len(part)
            assert num_left > 30 << 20

    run(main)


def test_without_a_limit_who_does_not_read_is_waited_for() -> None:
    async def main() -> None:
        async with listening(make(stall_timeout=0.0)) as address, connected(address) as client:
            await client.send(post("/tokenize", LONG_PROMPT))
            await asyncio.sleep(2 * STALL_S)
            found = b""
            while not found.endswith(b"\r\n0\r\n\r\n"):  # it comes in chunks
                found += (part := await client.read(1 << 20))
                assert part
            assert len(found) > 5_000_000

    run(main)


def test_connections_that_are_not_read_do_not_outlive_the_server() -> None:
    async def main() -> int:
        async with contextlib.AsyncExitStack() as stack:
            async with listening(make(stall_timeout=0.0)) as address:
                client = await stack.enter_async_context(connected(address))
                await client.send(post("/tokenize", LONG_PROMPT))
                assert await client.read(1)
            return len(await client.read_all())

    assert run(main) < 4_000_000


# ---------------------------------------------------------------- addresses


def test_a_port_has_one_listener() -> None:
    async def main() -> None:
        async with listening(make()) as address:
            with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: .*in use"):
                async with listening(make(port=port_of(address))):
                    pass
            assert b"200 OK" in await answer(address)

    run(main)


def test_grpc_cannot_have_the_port_of_http() -> None:
    async def main() -> None:
        async with listening(make()) as address:
            server = make(port=-1, grpc_port=port_of(address))
            with pytest.raises(ConfigError, match="cannot listen"):
                await GrpcServer(server.frontend, lambda timeout_s: None).start()
            assert b"200 OK" in await answer(address)

    run(main)


def test_small_writes_are_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[int] = []
    connection_made = HttpProtocol.connection_made

    def note(protocol: HttpProtocol, transport: asyncio.Transport) -> None:
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        connection_made(protocol, transport)

    async def main() -> None:
        async with listening(make()) as address:
            assert b"200 OK" in await answer(address)

    monkeypatch.setattr(HttpProtocol, "connection_made", note)
    run(main)
    assert options and all(options)


def test_a_server_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*arguments: Any, **settings: Any) -> None:
        raise OSError("no more sockets")

    async def main() -> None:
        before = num_open()
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "create_server", fail)
            with pytest.raises(ConfigError, match=r"cannot serve HTTP at http://127.*: OSError: no more sockets"):
                async with listening(make()):
                    pytest.fail("it has started")
        assert num_open() == before

    run(main)


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_server_that_ends_by_itself_says_so(
    is_failing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.Event()

    async def tick(server: uvicorn.Server, counter: int) -> bool:
        if is_failing and ended.is_set():
            raise RuntimeError("lost")
        return ended.is_set()

    monkeypatch.setattr(uvicorn.Server, "on_tick", tick)

    noted: list[None] = []

    async def main() -> None:
        async with http_listening(make().frontend, lambda: noted.append(None)):
            ended.set()
            await until(lambda: "has ended" in caplog.text)
            raise KeyError("the result that counts")

    with pytest.raises(KeyError, match="the result that counts"):
        run(main)
    assert len(noted) == 1
    assert ("RuntimeError: lost" if is_failing else "no error was raised") in caplog.text


def test_a_server_that_is_told_to_end_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with listening(make()) as address:
            assert b"200 OK" in await answer(address)

    run(main)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_unix_socket_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    mask = os.umask(0)
    try:

        async def main() -> None:
            async with listening(make(uds=str(path))) as address:
                assert address == f"unix:{path}"
                assert stat.S_IMODE(path.stat().st_mode) == 0o660
                assert b"200 OK" in await answer(address)

        run(main)
    finally:
        os.umask(mask)
    assert not path.exists()


def test_a_unix_socket_that_was_left_behind_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    async def main() -> None:
        async with listening(make(uds=str(path))) as address:
            assert b"200 OK" in await answer(address)

    run(main)
    assert not path.exists()


def test_a_unix_socket_of_a_server_that_runs_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"

    async def main() -> None:
        async with listening(make(uds=str(path))) as address:
            with pytest.raises(ConfigError, match=r"cannot listen on .*http\.sock: .*in use"):
                async with listening(make(uds=str(path))):
                    pass
            assert b"200 OK" in await answer(address)

    run(main)


def test_another_file_or_server_at_the_path_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    path.write_text("mine")

    async def main() -> None:
        with pytest.raises(ConfigError, match="cannot listen on"):
            async with listening(make(uds=str(path))):
                pass
        assert path.read_text() == "mine"
        path.unlink()
        async with listening(make(uds=str(path))):
            path.unlink()
            path.write_text("mine")

    run(main)
    assert path.read_text() == "mine"


# ---------------------------------------------------------------- the log


def test_who_calls_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> int:
        async with listening(make()) as address, connected(address) as client:
            forged = b"here\r\nx-forwarded-for: 6.6.6.6\r\nx-forwarded-proto: https\r\nconnection: close"
            await client.send(HEALTH.replace(b"here", forged))
            await client.read_all()
            return client.sock.getsockname()[1]

    with caplog.at_level(logging.INFO, "jaxserve"):
        port = run(main)
    assert f'127.0.0.1:{port} "GET /health" 200' in caplog.text
    assert "6.6.6.6" not in caplog.text


def test_the_callers_address_is_escaped(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    connection = Connection("GET", "/", b"", {})
    connection.scope["client"] = ("fe80::1%\n\x1b[31m", 1)
    with caplog.at_level(logging.INFO, "jaxserve"):
        asyncio.run(RequestLabels(app, make().frontend)(connection.scope, connection.receive, connection.send))
    assert r'fe80::1%\n\x1b[31m:1 "GET /" 200' in caplog.text


def test_small_parts_of_a_stream_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections have TCP_NODELAY, or each part would wait for the acknowledgement of the one before."""
    found = list[int]()

    def note(self: HttpProtocol, transport: asyncio.Transport) -> None:
        connection = transport.get_extra_info("socket")
        found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        connection_made(self, transport)

    connection_made = HttpProtocol.connection_made
    monkeypatch.setattr(HttpProtocol, "connection_made", note)

    async def main() -> None:
        async with listening(make()) as address, connected(address) as client:
            await client.send(post("/tokenize", {"prompt": "Hi"}))
            assert await client.read(1 << 15)

    run(main)
    assert found and all(found)
