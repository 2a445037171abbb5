"""A small HTTP server with OpenAI's paths, whose responses a test writes: for tests of what talks to such servers."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any


@dataclasses.dataclass
class Seen:
    """A request as the server read it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class Wire:
    """One connection, seen from the server."""

    def __init__(self, writer: asyncio.StreamWriter):
        self.writer = writer

    async def raw(self, data: bytes) -> None:
        """Sends bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def respond(self, status: int, body: Any) -> None:
        """Sends a whole response in JSON."""
        data = json.dumps(body).encode()
        await self.raw(b"HTTP/1.1 %d Status\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)

    async def begin(self) -> None:
        """Begins a stream of events."""
        await self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        """Sends a part of the body."""
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, fields: Any) -> None:
        """Sends an event."""
        await self.chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")

    async def end(self) -> None:
        """Ends a stream as OpenAI does."""
        await self.chunk(b"data: [DONE]\n\n")
        await self.raw(b"0\r\n\r\n")


Script = Callable[[Seen, Wire], Awaitable[None]]


def completion(text: str) -> dict[str, Any]:
    """An event of a completion."""
    return {"object": "text_completion", "choices": [{"index": 0, "text": text}]}


def usage(num_prompt: int, num_output: int) -> dict[str, Any]:
    """The event that says what was counted."""
    return {"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output}}


async def echo_script(seen: Seen, wire: Wire) -> None:
    """As many words as asked for, at once; a tokenizer that knows two letters a token."""
    if seen.path == "/v1/models":
        await wire.respond(200, {"data": [{"id": "fake"}]})
    elif seen.path == "/tokenize":
        words = seen.body["prompt"].split()
        await wire.respond(200, {"tokens": [26 * ord(word[0]) + ord(word[-1]) for word in words]})
    elif seen.path == "/detokenize":
        await wire.respond(200, {"prompt": " ".join(f"t{token}" for token in seen.body["tokens"])})
    else:
        num_tokens = seen.body.get("max_tokens") or seen.body["max_completion_tokens"]
        prompt = seen.body.get("prompt") or seen.body["messages"][0]["content"].split()
        await wire.begin()
        for i in range(num_tokens):
            delta = {"delta": {"content": f" {i}"}} if "messages" in seen.body else {"text": f" {i}"}
            await wire.event({"choices": [{"index": 0, **delta}]})
        await wire.event(usage(len(prompt), num_tokens))
        await wire.end()


@dataclasses.dataclass
class FakeServer:
    """A server that runs.

    Attributes:
        url: Its address.
        seen: The requests that came, in order.
        num_connections: How many connections there were.
        peak: Most requests at a time.
        metrics: What it answers when asked for metrics, one text after the other; these requests are not in ``seen``.
    """

    url: str = ""
    seen: list[Seen] = dataclasses.field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    peak: int = 0
    metrics: list[str] = dataclasses.field(default_factory=list)

    def bodies(self, path: str) -> list[Any]:
        """Bodies of the requests of a path."""
        return [seen.body for seen in self.seen if seen.path == path]

    async def serve(self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of a connection."""
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                seen = await _read(reader)
                if seen.path == "/metrics":
                    status, text = (
                        (b"200 OK", self.metrics.pop(0).encode()) if self.metrics else (b"404 Not Found", b"")
                    )
                    writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(text), text))
                    continue
                self.seen.append(seen)
                self.num_open += 1
                self.peak = max(self.peak, self.num_open)
                try:
                    await script(seen, Wire(writer))
                finally:
                    self.num_open -= 1
        writer.close()


async def _read(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split()
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(method, path, headers, json.loads(body) if body else None)


@contextlib.contextmanager
def fake_server(script: Script = echo_script, port: int = 0) -> Iterator[FakeServer]:
    """A server in a thread of its own while the block runs; without a port at any that is free."""
    server = FakeServer()
    is_ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        tasks: set[asyncio.Task[None]] = set()

        writers: list[asyncio.StreamWriter] = []

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            task = loop.create_task(server.serve(script, reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        listener = await asyncio.start_server(accept, "127.0.0.1", port, backlog=512)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        is_ready.set()
        await stop.wait()
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert is_ready.wait(10)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def late(server: contextlib.AbstractContextManager[Any], after_s: float = 0.5) -> Iterator[None]:
    """Starts a server a while after the block has begun, and ends it with the block."""
    with contextlib.ExitStack() as stack:
        timer = threading.Timer(after_s, stack.enter_context, [server])
        timer.start()
        try:
            yield
        finally:
            timer.join()
