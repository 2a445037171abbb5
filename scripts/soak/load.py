"""The load of a soak test: each worker sends one request after another and aborts some of them."""

import asyncio
import contextlib
import random
import signal
import sys
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jaxserve.bench.serve.grpc import GrpcBackend, open_channels
from jaxserve.bench.serve.http import HttpClient, HttpResponse
from jaxserve.bench.serve.openai import OpenAIBackend, StreamNotes
from jaxserve.bench.serve.records import BenchRequest, BenchResponse, BenchServeError
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc
from scripts.server_child import RunningServer
from scripts.soak.report import Report
from scripts.soak.requests import (
    BAD,
    BAD_CALLS,
    FEATURES,
    LOOKS,
    RAW_BAD,
    KnownPrompt,
    half_a_request,
)
from scripts.soak.slow_reader import read_slowly

REQUEST_LIMIT_S = 120.0
"""Time limit of a response."""
MAX_KEPT_CLIENTS = 8
_CRASH_CLIENT = Path(__file__).with_name("crash_client.py")
_STREAM_FIELDS = {"stream": True, "stream_options": {"include_usage": True}}


class WrongError(Exception):
    """An incorrect response."""


class Load:
    """The requests of all workers.

    Args:
        server: The server.
        known: Prompts with their responses.
        report: Where outcomes go.
        seed: Of what is asked when.
    """

    def __init__(self, server: RunningServer, known: Sequence[KnownPrompt], report: Report, seed: int):
        self._server = server
        self._known = known
        self._report = report
        self._seed = seed
        self._clients: set[HttpClient] = set()
        self._channels: list[Any] = open_channels(server.grpc, 2)
        self._children: set[Any] = set()
        parts = urllib.parse.urlsplit(server.http)
        self._host, self._port = parts.hostname or "", parts.port or 0

    def actions(self) -> dict[str, tuple[int, Callable[[random.Random], Awaitable[str]]]]:
        """The requests by name: how often, and how."""
        return {
            "http stream": (12, self.http_stream),
            "http unary": (6, self.http_unary),
            "http chat": (4, self.http_chat),
            "http chat stream": (4, self.http_chat_stream),
            "http feature": (8, self.http_feature),
            "http look": (2, self.http_look),
            "http cancel": (12, self.http_cancel),
            "http bad": (6, self.http_bad),
            "http bad bytes": (2, self.http_bad_bytes),
            "http slow reader": (2, self.http_slow_reader),
            "http half open": (2, self.http_half_open),
            "grpc stream": (12, self.grpc_stream),
            "grpc unary": (6, self.grpc_unary),
            "grpc chat": (4, self.grpc_chat),
            "grpc cancel": (12, self.grpc_cancel),
            "grpc deadline": (6, self.grpc_deadline),
            "grpc bad": (6, self.grpc_bad),
            "crash http": (1, self.crash_http),
            "crash grpc": (1, self.crash_grpc),
        }

    async def work(self, worker: int, until_s: float) -> None:
        """Send one request after another until the deadline."""
        generator = random.Random(f"{self._seed} {worker}")
        actions = self.actions()
        names, weights = list(actions), [weight for weight, _ in actions.values()]
        while time.monotonic() < until_s:
            (name,) = generator.choices(names, weights)
            try:
                async with asyncio.timeout(REQUEST_LIMIT_S):
                    outcome = await actions[name][1](generator)
            except TimeoutError:
                outcome = "lost"
                self._report.complain(f"{name}: not finished within {REQUEST_LIMIT_S:.0f} s")
            except (WrongError, OSError, BenchServeError, KeyError, TypeError, IndexError) as error:
                outcome = "wrong"
                self._report.complain(f"{name}: {type(error).__name__}: {error}")
            self._report.note(name, outcome)

    async def close(self) -> None:
        """Close all connections and stop all children."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        for client in self._clients:
            await client.close()
        for channel in self._channels:
            await channel.close()

    # ---------------------------------------------------------------- HTTP

    @contextlib.asynccontextmanager
    async def _client(self, generator: random.Random) -> AsyncIterator[HttpClient]:
        """Return a connection: mostly a kept one, sometimes a new one."""
        if self._clients and generator.random() < 0.8:
            client = self._clients.pop()
        else:
            client = HttpClient(self._server.http)
        try:
            yield client
        finally:
            if len(self._clients) < MAX_KEPT_CLIENTS and generator.random() < 0.9:
                self._clients.add(client)
            else:
                await client.close()

    async def _ask(self, generator: random.Random, method: str, path: str, body: Any = None) -> HttpResponse:
        async with self._client(generator) as client:
            return await client.request(method, path, body)

    async def http_stream(self, generator: random.Random) -> str:
        """Return a completion as a stream."""
        known = generator.choice(self._known)
        async with self._client(generator) as client:
            backend = OpenAIBackend(client, "/v1/completions", "", {"temperature": 0, "ignore_eos": True})
            response = await backend.send(BenchRequest(known.prompt, known.max_tokens))
        return _checked(response, known.text, known.max_tokens)

    async def http_unary(self, generator: random.Random) -> str:
        """Return a completion in one piece."""
        known = generator.choice(self._known)
        response = await self._ask(generator, "POST", "/v1/completions", known.completion())
        return _checked_body(response, lambda found: found["choices"][0]["text"] == known.text)

    async def http_chat(self, generator: random.Random) -> str:
        """Return a chat in one piece."""
        known = generator.choice(self._known)
        response = await self._ask(generator, "POST", "/v1/chat/completions", known.chat_completion())
        return _checked_body(response, lambda found: found["choices"][0]["message"]["content"] == known.chat)

    async def http_chat_stream(self, generator: random.Random) -> str:
        """Return a chat as a stream."""
        known = generator.choice(self._known)
        async with self._client(generator) as client:
            fields = known.chat_completion()
            del fields["messages"], fields["max_completion_tokens"]
            backend = OpenAIBackend(client, "/v1/chat/completions", "", fields)
            response = await backend.send(BenchRequest(known.prompt, 16))
        return _checked(response, known.chat, None)

    async def http_feature(self, generator: random.Random) -> str:
        """Send a request whose response can be checked."""
        feature = generator.choice(FEATURES)
        response = await self._ask(generator, "POST", feature.path, feature.body)
        return _checked_body(response, feature.is_right, feature.kind)

    async def http_look(self, generator: random.Random) -> str:
        """Read the endpoints that operators use."""
        path = generator.choice(LOOKS)
        response = await self._ask(generator, "GET", path)
        if response.status != 200:
            raise WrongError(f"{path}: status {response.status}")
        return "completed"

    async def http_cancel(self, generator: random.Random) -> str:
        """Send a streaming or non-streaming request that is aborted at a random time."""
        known = generator.choice(self._known)
        body = known.completion(**(_STREAM_FIELDS if generator.random() < 0.8 else {}))
        client = HttpClient(self._server.http)
        try:
            async with asyncio.timeout(_some_time(generator)):
                await client.request("POST", "/v1/completions", body, lambda data, now: None)
            return "was faster"
        except TimeoutError:
            return "cut off"
        finally:
            await client.close()

    async def http_bad(self, generator: random.Random) -> str:
        """Send a request that must be rejected."""
        bad = generator.choice(BAD)
        response = await self._ask(generator, "POST", bad.path, bad.body)
        if response.status == 429:
            return "overloaded"
        if response.status not in bad.statuses:
            raise WrongError(f"{bad.path} {str(bad.body)[:200]}: status {response.status}: {response.body[:200]!r}")
        return f"refused {response.status}"

    async def http_bad_bytes(self, generator: random.Random) -> str:
        """Send bytes that are not a request."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(generator.choice(RAW_BAD))
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(1.0):
                    data = await reader.read(1000)
                    if data and not data.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
                        raise WrongError(f"a response to invalid bytes: {data[:100]!r}")
        finally:
            writer.transport.abort()
        return "cut off"

    async def http_slow_reader(self, generator: random.Random) -> str:
        """Read a stream slowly through a small window, with logprobs to make it long."""
        known = generator.choice(self._known)
        response = BenchResponse(0.0)
        notes = StreamNotes(response)
        message = HttpClient(self._server.http).message(
            "POST", "/v1/completions", known.completion(**_STREAM_FIELDS, logprobs=20)
        )
        status = await read_slowly(self._host, self._port, message, notes.feed)
        if status == 429:
            return "overloaded"
        if status != 200 or not notes.has_ended:
            raise WrongError(f"status {status}, ended: {notes.has_ended}")
        return _checked(response, known.text, known.max_tokens)

    async def http_half_open(self, generator: random.Random) -> str:
        """Open a connection that sends nothing or half a request, or never reads its response; then close it."""
        _, writer = await asyncio.open_connection(self._host, self._port)
        known = generator.choice(self._known)
        body = known.completion(**_STREAM_FIELDS, logprobs=20)
        whole = HttpClient(self._server.http).message("POST", "/v1/completions", body)
        try:
            writer.write(generator.choice((b"", half_a_request(), whole)))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(generator.uniform(0.0, 5.0))
        finally:
            writer.transport.abort()
        return "cut off"

    # ---------------------------------------------------------------- gRPC

    def _stub(self, generator: random.Random) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(generator.choice(self._channels))

    async def grpc_stream(self, generator: random.Random) -> str:
        """Return a text as a stream."""
        known = generator.choice(self._known)
        backend = GrpcBackend(self._channels, "", {"temperature": 0.0, "ignore_eos": True}, {}, {})
        response = await backend.send(BenchRequest(known.prompt, known.max_tokens))
        return _checked(response, known.text, known.max_tokens)

    async def grpc_unary(self, generator: random.Random) -> str:
        """Return a text in one piece."""
        known = generator.choice(self._known)
        return await self._grpc_unary(generator, known.grpc_request(), known.text)

    async def grpc_chat(self, generator: random.Random) -> str:
        """Return a conversation in one piece."""
        known = generator.choice(self._known)
        return await self._grpc_unary(generator, known.grpc_chat(), known.chat)

    async def _grpc_unary(self, generator: random.Random, request: Any, text: str) -> str:
        try:
            response = await self._stub(generator).Generate(request)
        except grpc.aio.AioRpcError as error:
            return _refused(error)
        if response.completions[0].text != text:
            raise WrongError(f"expected {text!r}, got {response.completions[0].text!r}")
        return "completed"

    async def grpc_cancel(self, generator: random.Random) -> str:
        """Send a call that is cancelled at a random time."""
        known = generator.choice(self._known)
        stub = self._stub(generator)
        try:
            async with asyncio.timeout(_some_time(generator)):
                if generator.random() < 0.2:
                    await stub.Generate(known.grpc_request())
                else:
                    request = generation_pb2.StreamGenerateRequest(request=known.grpc_request())
                    async for _ in stub.StreamGenerate(request):
                        pass
        except TimeoutError:
            return "cut off"
        except grpc.aio.AioRpcError as error:
            return _refused(error)
        return "was faster"

    async def grpc_deadline(self, generator: random.Random) -> str:
        """Send a call that times out at a random time."""
        known = generator.choice(self._known)
        request = generation_pb2.StreamGenerateRequest(request=known.grpc_request())
        try:
            async for _ in self._stub(generator).StreamGenerate(request, timeout=_some_time(generator)):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return "in time no more"
            return _refused(error)
        return "in time"

    async def grpc_bad(self, generator: random.Random) -> str:
        """Send a call that must be rejected."""
        bad = generator.choice(BAD_CALLS)
        try:
            await self._stub(generator).Generate(bad.request)
        except grpc.aio.AioRpcError as error:
            if error.code() == bad.code:
                return f"refused {error.code().name}"
            return _refused(error)
        raise WrongError(f"an invalid request was accepted: {str(bad.request)[:200]}")

    # ---------------------------------------------------------------- clients that crash

    async def crash_http(self, generator: random.Random) -> str:
        """Return a process with streams that is killed."""
        count, prompt = generator.randint(1, 4), generator.choice(self._known[:8]).prompt
        return await self._crash(generator, "-S", str(_CRASH_CLIENT), self._host, str(self._port), str(count), prompt)

    async def crash_grpc(self, generator: random.Random) -> str:
        """Return the same over gRPC."""
        count, known = generator.randint(1, 4), generator.choice(self._known)
        message = generation_pb2.StreamGenerateRequest(request=known.grpc_request()).SerializeToString().hex()
        return await self._crash(generator, str(_CRASH_CLIENT), "--grpc", self._server.grpc, str(count), message)

    async def _crash(self, generator: random.Random, *command: str) -> str:
        child = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
        self._children.add(child)
        try:
            assert child.stdout is not None
            line = await child.stdout.readline()
            if line != b"open\n":
                raise WrongError(f"a client ended with {await child.wait()}")
            await asyncio.sleep(_some_time(generator))
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGKILL)
            await child.wait()
            self._children.discard(child)
        return "killed"


def _some_time(generator: random.Random) -> float:
    """Draw the seconds until an abort, log-uniform from before the first token to after most responses."""
    return 10 ** generator.uniform(-3.5, 0.3)


def _checked(response: BenchResponse, text: str, num_tokens: int | None) -> str:
    """Return the outcome of a stream with a known text."""
    if response.error.startswith(("HTTP 429", "gRPC RESOURCE_EXHAUSTED")):
        return "overloaded"
    if not response.is_success:
        raise WrongError(response.error)
    if response.text != text:
        raise WrongError(f"expected {text!r}, got {response.text!r}")
    if num_tokens is not None and response.num_output_tokens not in (num_tokens, None):
        raise WrongError(f"expected {num_tokens} tokens, got {response.num_output_tokens}")
    return "completed"


def _checked_body(response: HttpResponse, is_right: Callable[[Any], bool], kind: str = "") -> str:
    """Return the outcome of a request that should succeed."""
    if response.status == 429:
        return "overloaded"
    if response.status != 200 or not is_right(response.json()):
        raise WrongError(f"{kind} status {response.status}: {response.body[:500]!r}")
    return "completed"


def _refused(error: grpc.aio.AioRpcError) -> str:
    """Return the outcome of a call that failed where it might have succeeded."""
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return "overloaded"
    raise WrongError(f"{error.code().name}: {error.details()}")
