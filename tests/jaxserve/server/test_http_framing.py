"""HTTP/1.1 on the wire, through real sockets: other protocols, old versions, framing, pipelining and errors."""

import asyncio
import contextlib
import json
import queue
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.server import http_listener
from tests.jaxserve.server.http_fakes import CHAT, FakeEngine, Server
from tests.jaxserve.server.test_http_listener import HEALTH, connected, listening, make, port_of, post, run, until

HELLO = {"prompt": "Hello"}
STREAM = {"prompt": "Hi", "stream": True}
JDK = (
    b"POST /v1/chat/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: %d\r\n"
    b"Host: 127.0.0.1:8000\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/17.0.11\r\nContent-Type: application/json\r\n\r\n%s"
)
"""A request of the JDK's HttpClient, whose default version is HTTP/2."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a server that takes bodies of at most 4 KiB."""
    with in_thread(make(max_request_bytes=4096, enable_request_id_headers=True)) as port:
        yield port


@contextlib.contextmanager
def in_thread(server: Server) -> Iterator[int]:
    """Runs a server in a thread; yields its port."""
    ports: queue.SimpleQueue[int] = queue.SimpleQueue()
    loop, done = asyncio.new_event_loop(), asyncio.Event()

    async def main() -> None:
        async with listening(server) as address:
            ports.put(port_of(address))
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        yield ports.get(timeout=30)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def exchange(port: int, *parts: bytes) -> bytes:
    """Everything that a connection gets for what it sends; its last request must close it."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            client.sendall(part)
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    """Everything until the server hangs up."""
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def closing(request: bytes) -> bytes:
    """The request, as the last one of its connection."""
    return request.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)


def chunked(path: str, value: Any, *trailers: bytes) -> bytes:
    """A request whose body comes in two chunks."""
    body = json.dumps(value).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:3], body[3:]))
    return head.encode() + chunks + b"0\r\n" + b"".join(trailers) + b"\r\n"


def statuses(found: bytes) -> list[int]:
    """The statuses of the responses in what came."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", found)]


# ---------------------------------------------------------------- other protocols


@pytest.mark.parametrize("body", [post("/tokenize", HELLO), chunked("/tokenize", HELLO)])
@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"TLS/1.0, IRC/6.9"])
def test_a_request_for_another_protocol_is_served_with_its_body(port: int, upgrade: bytes, body: bytes) -> None:
    asked = body.replace(b"\r\n", b"\r\nconnection: upgrade\r\nupgrade: " + upgrade + b"\r\n", 1)
    found = exchange(port, asked + asked, closing(HEALTH))
    assert statuses(found) == [200, 200, 200]
    assert found.count(b'"count":6') == 2  # "Hello" and what is in front


@pytest.mark.parametrize("place", [1, 30, 100, 240, 280, 310])
def test_a_request_for_another_protocol_may_arrive_in_pieces(port: int, place: int) -> None:
    body = json.dumps({"messages": CHAT}).encode()
    asked = JDK % (len(body), body)
    assert len(asked) > place
    found = exchange(port, asked[:place], asked[place:], closing(HEALTH))
    assert statuses(found) == [200, 200]
    assert b'"content":"Hello"' in found


def test_a_stream_may_be_asked_for_together_with_another_protocol(port: int) -> None:
    body = json.dumps({"messages": CHAT, "stream": True}).encode()
    found = exchange(port, (JDK % (len(body), body)) + closing(HEALTH))
    assert statuses(found) == [200, 200]
    assert b"data: [DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 200 OK" in found


def test_many_requests_for_another_protocol_in_one_packet(port: int) -> None:
    asked = HEALTH.replace(b"here", b"here\r\nconnection: upgrade\r\nupgrade: h2c")
    assert statuses(exchange(port, asked * 1500 + closing(asked))) == [200] * 1501


# ---------------------------------------------------------------- HTTP/1.0


def as_old(request: bytes, *headers: bytes) -> bytes:
    """The request of an HTTP/1.0 client."""
    return request.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n" + b"".join(header + b"\r\n" for header in headers), 1)


def test_a_stream_to_an_old_client_has_no_chunks(port: int) -> None:
    found = exchange(port, as_old(post("/v1/completions", STREAM), b"connection: keep-alive"))
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: ") for event in events[:-1])


def test_a_whole_response_to_an_old_client_has_its_length(port: int) -> None:
    head, _, body = exchange(port, as_old(post("/tokenize", HELLO))).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["count"] == 6


def test_a_stream_to_an_old_client_that_breaks_does_not_look_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise RuntimeError("lost")

    monkeypatch.setattr(http_listener, "make_app", lambda frontend: broken)

    async def main() -> None:
        async with listening(make()) as address, connected(address) as client:
            await client.send(as_old(HEALTH))
            with pytest.raises(ConnectionResetError):
                while await asyncio.get_running_loop().sock_recv(client.sock, 1000):
                    pass

    run(main)


# ---------------------------------------------------------------- Expect: 100-continue


def split_expecting(request: bytes) -> tuple[bytes, bytes]:
    """Head and body of a request whose client waits between them."""
    head, _, body = request.partition(b"\r\n\r\n")
    return head + b"\r\nexpect: 100-continue\r\n\r\n", body


def test_a_client_that_waits_is_told_to_go_on(port: int) -> None:
    head, body = split_expecting(post("/tokenize", HELLO))
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(head)
        assert client.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body + closing(HEALTH))
        assert statuses(read_all(client)) == [200, 200]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (post("/health", HELLO), 405),
        (post("/tokenize", HELLO).replace(b"application/json", b"text/plain"), 400),
        (post("/tokenize", {"prompt": "x" * 5000}), 413),
    ],
)
def test_a_client_that_waits_in_vain_need_not_guess_whether_to_send(port: int, request_: bytes, status: int) -> None:
    """The connection is closed: the client may send the body nevertheless, or another request."""
    found = exchange(port, split_expecting(request_)[0])
    assert statuses(found) == [status]
    assert b"\r\nconnection: close\r\n" in found


def test_who_sends_at_once_or_is_old_is_not_told_to_go_on(port: int) -> None:
    head, body = split_expecting(post("/tokenize", HELLO))
    assert statuses(exchange(port, head + body + closing(HEALTH))) == [200, 200]
    assert exchange(port, as_old(head), body).startswith(b"HTTP/1.1 200 ")


# ---------------------------------------------------------------- what requests must have


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400, b"one Host header, got 0"),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400, b"one Host header, got 2"),
        (b"GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", 400, b"one Host header, got 2"),
        (HEALTH.replace(b"here", b"a b"), 400, b"as Host, got 'a b'"),
        (HEALTH.replace(b"here", b"user@here"), 400, b"as Host, got 'user@here'"),
        (HEALTH.replace(b"HTTP/1.1", b"HTTP/2.0"), 505, b"HTTP/2.0 is not supported"),
        (b"GET /health\r\n\r\n", 505, b"HTTP/0.9 is not supported"),
        (b"CONNECT here:443 HTTP/1.1\r\nhost: here:443\r\n\r\n", 501, b"CONNECT is not supported"),
        (chunked("/tokenize", HELLO).replace(b"chunked", b"gzip, chunked"), 501, b"Transfer-Encoding is chunked"),
        (chunked("/tokenize", HELLO).replace(b"chunked", b"gzip"), 400, b"invalid HTTP request"),
        (as_old(chunked("/tokenize", HELLO)), 400, b"HTTP/1.0 has no Transfer-Encoding"),
        (chunked("/tokenize", HELLO).replace(b"host", b"content-length: 3\r\nhost"), 400, b"Content-Length"),
        (post("/tokenize", HELLO).replace(b"host", b"content-length: 18\r\nhost"), 400, b"Content-Length"),
        (HEALTH.replace(b"host", b"a : b\r\nhost"), 400, b"invalid HTTP request"),
        (HEALTH.replace(b"/health", b"*"), 400, b"expected a path or a URL as its target, got '*'"),
    ],
)
def test_a_request_that_the_rfcs_do_not_allow_is_refused(
    port: int, request_: bytes, status: int, message: bytes
) -> None:
    found = exchange(port, request_)
    head, _, body = found.partition(b"\r\n\r\n")
    assert statuses(found) == [status]
    assert b"\r\nconnection: close" in head and b"\r\ndate: " in head
    assert b"\r\ncontent-length: %d\r\n" % len(body) in head
    error = json.loads(body)["error"]
    assert error["code"] == status and message.decode() in error["message"]


@pytest.mark.parametrize(
    ("target", "status"),
    [(b"http://here/health", 200), (b"http://here:80/health?a=b", 200), (b"http://here", 200), (b"http://here?a", 200)],
)
def test_a_target_may_be_a_whole_url(port: int, target: bytes, status: int) -> None:
    assert statuses(exchange(port, closing(HEALTH.replace(b"/health", target)))) == [status]


@pytest.mark.parametrize("host", [b"", b"here:8000", b"[::1]:8000", b"127.0.0.1", b"a_b.example"])
def test_hosts(port: int, host: bytes) -> None:
    assert statuses(exchange(port, closing(HEALTH.replace(b"here", host)))) == [200]


def test_options_for_the_whole_server_are_no_error_of_the_protocol(port: int) -> None:
    found = exchange(port, closing(b"OPTIONS * HTTP/1.1\r\nhost: here\r\n\r\n"))
    assert statuses(found) == [404] and b"unknown path" in found


def test_old_clients_need_no_host(port: int) -> None:
    assert statuses(exchange(port, b"GET /health HTTP/1.0\r\n\r\n")) == [200]


def test_trailers_are_no_headers(port: int) -> None:
    trailers = (b"authorization: Bearer secret\r\n", b"x-request-id: mine\r\n", b"content-type: text/plain\r\n")
    found = exchange(port, chunked("/tokenize", HELLO, *trailers) + closing(HEALTH))
    assert statuses(found) == [200, 200] and b"x-request-id: mine" not in found
    with in_thread(make(api_key=["secret"])) as locked:
        assert statuses(exchange(locked, closing(chunked("/tokenize", HELLO, *trailers)))) == [401]


@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/nowhere", b"/metrics"])
def test_a_response_to_head_is_the_head_of_get(port: int, path: bytes) -> None:
    def head_of(method: bytes) -> tuple[list[bytes], bytes]:
        found = exchange(port, closing(HEALTH.replace(b"GET", method).replace(b"/health", path)))
        head, _, body = found.partition(b"\r\n\r\n")
        return [line for line in head.split(b"\r\n") if not line.startswith((b"date: ", b"x-request-id: "))], body

    (get_head, get_body), (head, body) = head_of(b"GET"), head_of(b"HEAD")
    assert body == b""
    assert head[0] == get_head[0] and (len(get_body) > 0 or path == b"/health")
    if path != b"/metrics":  # whose numbers change
        assert head == get_head


def test_a_refused_head_has_no_body(port: int) -> None:
    assert exchange(port, b"HEAD / HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")


def test_a_compressed_body_is_refused_by_name(port: int) -> None:
    request = post("/tokenize", HELLO).replace(b"host", b"content-encoding: gzip\r\nhost")
    found = exchange(port, closing(request))
    assert statuses(found) == [415]
    assert b"accept-encoding: identity" in found and b"Content-Encoding 'gzip' is not supported" in found
    assert statuses(exchange(port, closing(request.replace(b"gzip", b"identity")))) == [200]


# ---------------------------------------------------------------- pipelining and errors


def test_pipelined_requests_get_their_responses_in_order(port: int) -> None:
    asked = [post("/tokenize", {"prompt": "x" * length}) for length in range(40)]
    found = exchange(port, b"".join(asked) + closing(HEALTH))
    counts = [int(part.partition(b",")[0]) for part in found.split(b'"count":')[1:]]
    assert counts == [length + 1 for length in range(40)]


def test_nothing_is_served_after_the_last_request(port: int) -> None:
    assert statuses(exchange(port, closing(HEALTH) + HEALTH)) == [200]


@pytest.mark.parametrize(
    "broken", [b"nonsense\r\n\r\n", HEALTH.replace(b"host: here", b"x: y"), b"GET / HTTP/1.1\r\n\0"]
)
def test_an_error_waits_for_the_responses_before_it(port: int, broken: bytes) -> None:
    """The client would take it for a response to an earlier request, or for a part of a stream."""
    found = exchange(port, post("/v1/completions", STREAM) + post("/tokenize", HELLO) + broken)
    assert statuses(found) == [200, 200, 400]
    assert b"data: [DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 200 OK" in found


def test_an_error_while_a_stream_runs_does_not_end_it() -> None:
    engine: Any = FakeEngine(["a", "b"])
    go_on = asyncio.Event()
    generate = engine.generate

    async def waiting(request: Any, **options: Any) -> Any:
        async for output in generate(request, **options):
            yield output
            await go_on.wait()

    engine.generate = waiting

    async def main() -> bytes:
        async with listening(make(engine)) as address, connected(address) as client:
            await client.send(post("/v1/completions", STREAM))
            found = await client.read()
            await client.send(b"nonsense\r\n\r\n")
            await client.send(HEALTH)
            await asyncio.sleep(0.01)
            go_on.set()
            return found + await client.read_all()

    found = run(main)
    assert statuses(found) == [200, 400]
    assert found.index(b"data: [DONE]\n\n\r\n0\r\n\r\n") < found.index(b" 400 ")


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_body_that_is_no_body_is_refused(port: int, num_before: int) -> None:
    broken = chunked("/tokenize", HELLO).replace(b"\r\n0\r\n", b"\r\nz\r\n")
    found = exchange(port, post("/tokenize", HELLO) * num_before + broken)
    assert statuses(found) == [200] * num_before + [400]


def test_a_pipelined_request_ends_when_its_client_disconnects() -> None:
    engine = FakeEngine(["a", "b"])
    engine.stall_at = 1

    async def main() -> None:
        async with listening(make(engine)) as address:
            async with connected(address) as client:
                await client.send(post("/v1/completions", STREAM) + HEALTH * 3)
                await until(lambda: bool(engine.requests))
            await until(lambda: engine.cancelled == list(engine.requests))

    run(main)


def test_the_response_to_an_early_end_can_be_read(port: int) -> None:
    """Closing while the client still sends would reset the connection, and the client would never see the response."""
    found = exchange(port, closing(post("/tokenize", {"prompt": "x" * (4 << 20)})))
    assert statuses(found) == [413] and found.endswith(b"}")


def test_who_never_ends_a_refused_body_is_cut(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(closing(post("/tokenize", {"prompt": "x" * 5000}))[:-100])
        assert statuses(read_all(client)) == [413]
        with pytest.raises(ConnectionError):
            while True:
                client.sendall(b"x" if client.recv(1) == b"" else b"")


def test_no_line_end_of_unicode_is_in_a_stream() -> None:
    """Clients that split a stream with Python's ``splitlines``, as httpx does, would see an event cut in two."""
    with in_thread(make(FakeEngine(["a\x85b\u2028c\u2029d"]))) as port:
        found = exchange(port, closing(post("/v1/completions", STREAM))).decode()
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in found.splitlines() if line.startswith("data: {")]
    assert "".join(texts) == "a\x85b\u2028c\u2029d"
    assert not {"\x85", "\u2028", "\u2029"} & set(found)
