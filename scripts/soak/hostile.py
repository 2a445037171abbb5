"""The clients of an API key that means harm, or of one that does not: a process of its own beside those measured.

    python -m scripts.soak.hostile OPTIONS hostile

Options are JSON: ``http``, ``grpc``, ``key``, ``seconds``, ``seed``, and for ``polite`` the number of ``sequences``
that it keeps in flight. The process runs at a low priority, since clients elsewhere would take no core of the server's.
It writes a line once it begins, and at the end one of JSON with the outcomes of each kind of request.
"""

import asyncio
import collections
import contextlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from jaxserve.bench.serve.grpc import open_channels
from jaxserve.bench.serve.http import HttpClient
from jaxserve.server.proto.jaxserve.v1 import generation_pb2_grpc
from scripts.soak.attacks import (
    CALLS,
    KINDS,
    NUM_IDLE_CONNECTIONS,
    idle_addresses,
)

NICENESS = 5
PAUSE_S = 0.02
"""After a request that was refused: a client that asks again at once takes a core for itself."""
REQUEST_LIMIT_S = 60.0
NUM_VARIANTS = 6
"""Bodies of each kind."""
_READ_BYTES = 1 << 16
_Attack = Callable[[random.Random], Awaitable[str]]


class Hostile:
    """Sends the requests of a key until a time.

    Args:
        http: Base URL.
        grpc_target: Target of gRPC.
        key: API key.
        seed: Of what is sent when.
    """

    def __init__(self, http: str, grpc_target: str, key: str, seed: int):
        self._grpc, self._seed = grpc_target, seed
        generator = random.Random(seed)
        client = HttpClient(http, {"Authorization": f"Bearer {key}", "Connection": "close"})
        # Made once: a client that works on its bodies sends none.
        self._messages = {
            name: [client.message("POST", kind.path, kind.make(generator)) for _ in range(NUM_VARIANTS)]
            for name, kind in KINDS.items()
        }
        nobody = HttpClient(http, {"Authorization": "Bearer wrong", "Connection": "close"})
        self._messages["without a key"] = [nobody.message("POST", "/v1/completions", {"prompt": "a"})]
        self._calls = [make(generator) for make in CALLS]
        self._metadata = (("authorization", f"Bearer {key}"),)
        host, _, port = http.rpartition("/")[2].rpartition(":")
        self._host, self._port = host, int(port)
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.problems: list[str] = []

    def attacks(self) -> dict[str, tuple[int, _Attack]]:
        """What is done at a time: how many of each."""
        bodies = {name: (kind.num_workers, self._whole(name)) for name, kind in KINDS.items() if kind.num_workers}
        return {
            **bodies,
            "grpc call": (4, self.grpc_call),
            "flood": (2, self.flood),
            "slow reader": (12, self.slow_reader),
            "no reader": (12, self.no_reader),
            "slow writer": (12, self.slow_writer),
            "cut off": (4, self.cut_off),
            "pipelined": (2, self.pipelined),
            "reflection": (2, self.reflection),
            "idle": (1, self.idle),
        }

    async def run(self, until_s: float) -> None:
        """Send until a time, and then close everything."""
        workers = [
            asyncio.create_task(self._work(name, number, attack, until_s))
            for name, (count, attack) in self.attacks().items()
            for number in range(count)
        ]
        await asyncio.sleep(until_s - time.monotonic())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    async def run_polite(self, until_s: float, num_sequences: int) -> None:
        """Keep plain requests in flight until a time."""
        workers = [
            asyncio.create_task(self._work("polite", number, self._whole("polite"), until_s))
            for number in range(num_sequences)
        ]
        await asyncio.sleep(until_s - time.monotonic())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, name: str, number: int, attack: _Attack, until_s: float) -> None:
        generator = random.Random(f"{self._seed} {name} {number}")
        while time.monotonic() < until_s:
            try:
                async with asyncio.timeout(REQUEST_LIMIT_S if name != "idle" else None):
                    outcome = await attack(generator)
            except TimeoutError:
                outcome = "not finished"
            except (OSError, asyncio.IncompleteReadError) as error:
                outcome = type(error).__name__
            self.outcomes[name][outcome] += 1
            if outcome not in ("200", "OK"):
                await asyncio.sleep(PAUSE_S)

    # ---------------------------------------------------------------- whole requests

    async def _send(self, name: str, message: bytes) -> str:
        """Send a request over a connection of its own, and return the status once the response has ended."""
        async with self._connection() as (reader, writer):
            writer.write(message)
            status = (await reader.readline())[9:12].decode() or "closed"
            begin = data = await reader.read(_READ_BYTES)
            while data:
                data = await reader.read(_READ_BYTES)
        if status.startswith("5") and status != "503":
            self.problems.append(f"{name}: status {status}: {begin[:600]!r}")
        return status

    def _whole(self, name: str) -> _Attack:
        async def send(generator: random.Random) -> str:
            return await self._send(name, self._message(name, generator))

        return send

    async def flood(self, generator: random.Random) -> str:
        """Send many small requests at once: without a key, invalid, and valid ones."""
        calls = [self._send("flood", self._message("plain", generator)) for _ in range(40)]
        calls += [self._send("flood", self._message("without a key", generator)) for _ in range(20)]
        calls += [self._send("flood", self._message("invalid", generator)) for _ in range(20)]
        found = collections.Counter(await asyncio.gather(*calls, return_exceptions=True))
        return "+".join(sorted({status if isinstance(status, str) else type(status).__name__ for status in found}))

    async def grpc_call(self, generator: random.Random) -> str:
        """Make a costly call."""
        (channel,) = open_channels(self._grpc, 1)
        try:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            await stub.Generate(generator.choice(self._calls), metadata=self._metadata)
            return "OK"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            if code in ("INTERNAL", "UNKNOWN"):
                self.problems.append(f"grpc: {code}: {error.details()}")
            return code
        finally:
            await channel.close()

    # ---------------------------------------------------------------- connections

    def _message(self, name: str, generator: random.Random) -> bytes:
        return generator.choice(self._messages[name])

    @contextlib.asynccontextmanager
    async def _connection(
        self, local: str | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        where = None if local is None else (local, 0)
        reader, writer = await asyncio.open_connection(self._host, self._port, local_addr=where, limit=1024)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def slow_reader(self, generator: random.Random) -> str:
        """Read a long stream very slowly."""
        async with self._connection() as (reader, writer):
            writer.write(self._message("long stream", generator))
            while data := await reader.read(256):
                if b"[DONE]" in data:
                    return "to the end"
                await asyncio.sleep(0.2)
        return "closed"

    async def no_reader(self, generator: random.Random) -> str:
        """Never read a stream."""
        async with self._connection() as (_, writer):
            writer.write(self._message("long stream", generator))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(generator.uniform(1.0, 20.0))
        return "left"

    async def slow_writer(self, generator: random.Random) -> str:
        """Send a request byte by byte: its headers or its body."""
        async with self._connection() as (reader, writer):
            message = self._message("plain", generator)
            start = 0 if generator.random() < 0.5 else message.index(b"\r\n\r\n") + 4
            writer.write(message[:start])
            for byte in message[start:]:
                if reader.at_eof():
                    return "closed"
                writer.write(bytes([byte]))
                await asyncio.sleep(generator.choice((0.01, 1.0)))
            return (await reader.read(100))[9:12].decode()

    async def cut_off(self, generator: random.Random) -> str:
        """Leave in the middle of a response."""
        async with self._connection() as (_, writer):
            writer.write(self._message(generator.choice(list(KINDS)), generator))
            await asyncio.sleep(10 ** generator.uniform(-3, 0.5))
        return "left"

    async def pipelined(self, generator: random.Random) -> str:
        """Send a thousand requests in one piece, and read nothing."""
        async with self._connection() as (_, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
            writer.write(self._message("plain", generator) * 20)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(generator.uniform(0.5, 5.0))
        return "left"

    async def reflection(self, generator: random.Random) -> str:
        """Open streams of reflection and of health that say nothing, on one connection."""
        (channel,) = open_channels(self._grpc, 1)
        try:
            reflections: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            healths: Any = health_pb2_grpc.HealthStub(channel)
            opened: list[Any] = [reflections.ServerReflectionInfo() for _ in range(150)]
            opened += [healths.Watch(health_pb2.HealthCheckRequest()) for _ in range(150)]
            await asyncio.sleep(generator.uniform(3.0, 10.0))
            return f"{len(opened)} streams"
        finally:
            await channel.close()

    async def idle(self, generator: random.Random) -> str:
        """Keep connections open that send nothing, from several addresses; open those again that are closed."""
        del generator

        async def stay(local: str) -> None:
            while True:
                with contextlib.suppress(OSError):
                    async with self._connection(local) as (reader, _):
                        await reader.read(1)
                await asyncio.sleep(0.5)

        await asyncio.gather(*map(stay, idle_addresses(NUM_IDLE_CONNECTIONS)))
        return "left"


async def _main(options: dict[str, Any], kind: str) -> dict[str, Any]:
    hostile = Hostile(options["http"], options["grpc"], options["key"], options["seed"])
    print("ready", flush=True)
    until_s = time.monotonic() + options["seconds"]
    if kind == "polite":
        await hostile.run_polite(until_s, options["sequences"])
    else:
        await hostile.run(until_s)
    return {"outcomes": hostile.outcomes, "problems": hostile.problems[:20], "num_problems": len(hostile.problems)}


if __name__ == "__main__":
    os.nice(NICENESS)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # connections that the server has closed
    print(json.dumps(asyncio.run(_main(json.loads(sys.argv[1]), sys.argv[2]))), flush=True)
