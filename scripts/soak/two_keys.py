"""What a hostile API key costs another one: the times of a key's requests beside it, and beside a polite one.

First a hostile key does what ``scripts/soak/attacks.py`` lists; then a polite one keeps as many sequences in flight as
the hostile one had, running or waiting. Meanwhile a third key's requests are timed.
"""

import asyncio
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.serve.grpc import GrpcBackend, open_channels
from jaxserve.bench.serve.http import HttpClient
from jaxserve.bench.serve.openai import OpenAIBackend
from jaxserve.bench.serve.records import Backend, BenchRequest
from scripts.server_child import REPOSITORY, RunningServer
from scripts.soak.report import MIB, Report
from scripts.soak.requests import KnownPrompt
from scripts.soak.watch import ProcessMemory, tree_memory, wait_until_quiet, watch

KEYS = {"measured": "key-of-the-measured", "other": "key-of-the-other", "watcher": "key-of-the-watcher"}
INTERVAL_S = 0.4
"""Mean time between two requests of the measured key."""
MAX_IN_FLIGHT = 8
"""Requests of the measured key at a time: on a busy machine it must not fill the queue itself."""
TIME_LIMIT_S = 5.0
"""Time limit of a template or grammar, which is how long one of another key may hold up a request."""
OVERHEAD_BYTES = 300 * MIB
AFTER_S = 30.0
POLITE_S = 300.0
"""Most seconds of the polite part, enough for its percentiles: what grows in a longer run is looked at before."""
SETTLE_S = 7.0
LEAST_FOR_RISES_S = 120.0
"""In less, what rises is still what caches take."""


def write_auth_file(folder: Path) -> Path:
    """Write the keys of ``KEYS``."""
    path = folder / "keys.yaml"
    path.write_text(json.dumps([{"key": key, "name": name} for name, key in KEYS.items()]))
    return path


async def compare(
    server: RunningServer, known: list[KnownPrompt], report: Report, duration_s: float, seed: int, budget_bytes: int
) -> dict[str, Any]:
    """Put a server with ``KEYS`` under the load of both keys, one after the other; return what was measured.

    Args:
        server: An idle server, whose ``headers`` have the key of the watcher.
        known: Prompts with their completions.
        report: Gets samples and problems of the hostile part.
        duration_s: Seconds of each part; the polite one ends after ``POLITE_S``.
        seed: Of what is sent when.
        budget_bytes: The server's ``max_admitted_bytes``.
    """
    measured = _Measured(server, known, report, seed)
    other = _Other(server, report, seed)
    rest_bytes = _sum(tree_memory(server.process.pid))
    await _beside(
        await other.begin("hostile", min(20.0, duration_s / 3)), measured
    )  # what is made once is there from here on
    report.before = await wait_until_quiet(server, AFTER_S, SETTLE_S)
    peak = _Peak(server.process.pid)
    watching = [
        asyncio.create_task(watch(server, report.samples, max(2.0, duration_s / 600))),
        asyncio.create_task(peak.watch()),
    ]
    start_s, report.outcomes = time.monotonic(), {}
    hostile = await _beside(await other.begin("hostile", duration_s), measured)
    report.duration_s = time.monotonic() - start_s
    for task in watching:
        task.cancel()
    for error in await asyncio.gather(*watching, return_exceptions=True):
        if isinstance(error, Exception):
            report.complain(f"the server could not be watched to the end: {error!r}")
    await asyncio.sleep(AFTER_S)
    report.after = await wait_until_quiet(server, 0.0)
    report.judge(has_rises=duration_s >= LEAST_FOR_RISES_S)
    limit_bytes = rest_bytes + budget_bytes + OVERHEAD_BYTES
    if peak.num_bytes > limit_bytes:
        each = ", ".join(f"{found.rss_bytes / MIB:.0f} MiB by {found.command}" for found in peak.processes)
        report.complain(
            f"all processes took {peak.num_bytes / MIB:.0f} MiB, more than {limit_bytes / MIB:.0f} MiB: {each}"
        )
    num_sequences = round(np.mean([sample.values["texts_in_flight"] for sample in report.samples]))
    polite = await _beside(await other.begin("polite", min(duration_s, POLITE_S), num_sequences), measured)
    all_hostile, all_polite = [*itertools.chain(*hostile.values())], [*itertools.chain(*polite.values())]
    worst_s, allowed_s = max(all_hostile), max(all_polite) + TIME_LIMIT_S
    if worst_s > allowed_s:
        report.complain(f"a first token came after {worst_s:.2f} s beside the hostile key, more than {allowed_s:.2f} s")
    return {
        "ratio_p99": float(np.percentile(all_hostile, 99) / np.percentile(all_polite, 99)),
        "hostile": percentiles(all_hostile),
        "polite": percentiles(all_polite),
        "by_kind": {
            name: {"hostile": percentiles(hostile[name]), "polite": percentiles(polite[name])} for name in hostile
        },
        "num_sequences": num_sequences,
        "rest_bytes": rest_bytes,
        "peak_bytes": peak.num_bytes,
        "peak_by_process": peak.processes,
        "limit_bytes": limit_bytes,
    }


def percentiles(times_s: list[float]) -> dict[str, float]:
    """Return percentiles of times to the first token."""
    found = {f"p{percent}_s": float(np.percentile(times_s, percent)) for percent in (50, 90, 99, 100)}
    return {"num_requests": len(times_s), **found}


async def _beside(sending: "asyncio.Task[None]", measured: "_Measured") -> dict[str, list[float]]:
    """Return the times of the measured key's requests, by kind, while the other one sends."""
    try:
        return await measured.run(sending)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


def _sum(processes: list[ProcessMemory]) -> float:
    return sum(found.rss_bytes for found in processes)


class _Peak:
    """The most memory that a process and all processes below it have taken together."""

    def __init__(self, pid: int):
        self._pid = pid
        self.processes: list[ProcessMemory] = []

    @property
    def num_bytes(self) -> float:
        """Their memory together."""
        return _sum(self.processes)

    async def watch(self) -> None:
        """Look until it is cancelled."""
        while True:
            self.processes = max(self.processes, tree_memory(self._pid), key=_sum)
            await asyncio.sleep(0.1)


class _Other:
    """The processes of the other key's clients."""

    def __init__(self, server: RunningServer, report: Report, seed: int):
        self._server, self._report, self._seed = server, report, seed

    async def begin(self, kind: str, seconds: float, num_sequences: int = 0) -> "asyncio.Task[None]":
        """Send for some time, once all bodies are made. The task returned notes the outcomes of the requests."""
        options = {
            "http": self._server.http, "grpc": self._server.grpc, "key": KEYS["other"], "seed": self._seed,
            "seconds": seconds, "sequences": num_sequences,
        }  # fmt: skip
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scripts.soak.hostile", json.dumps(options), kind),
            cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdout is not None
        await child.stdout.readline()
        return asyncio.create_task(self._finish(kind, child))

    async def _finish(self, kind: str, child: asyncio.subprocess.Process) -> None:
        try:
            output, _ = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode:
            raise RuntimeError(f"the clients of the other key ended with status {child.returncode}")
        found = json.loads(output)
        for name, counts in found["outcomes"].items():
            for outcome, count in counts.items():
                self._report.note(f"{kind}: {name}", outcome, count)
        for problem in found["problems"]:
            self._report.complain(f"{kind}: {problem}")


class _Measured:
    """The requests that are timed: streams over HTTP and gRPC, and chats, with known responses."""

    def __init__(self, server: RunningServer, known: list[KnownPrompt], report: Report, seed: int):
        self._server, self._known, self._report = server, known, report
        self._generator = random.Random(seed)
        self._headers = {"Authorization": f"Bearer {KEYS['measured']}"}

    async def run(self, until: "asyncio.Task[None]") -> dict[str, list[float]]:
        """Send requests, at random times, until a task is done; return the seconds to the first tokens, by kind."""
        client, channels = HttpClient(self._server.http, self._headers), open_channels(self._server.grpc, 1)
        chat = {"temperature": 0}
        metadata = {"authorization": self._headers["Authorization"]}
        backends: dict[str, tuple[Backend, bool]] = {
            "measured http": (OpenAIBackend(client, "/v1/completions", "", {**chat, "ignore_eos": True}), False),
            "measured grpc": (GrpcBackend(channels, "", {"temperature": 0.0, "ignore_eos": True}, {}, metadata), False),
            "measured chat": (OpenAIBackend(client, "/v1/chat/completions", "", chat), True),
        }
        times_s: dict[str, list[float]] = {name: [] for name in backends}

        async def send(name: str, known: KnownPrompt) -> None:
            backend, is_chat = backends[name]
            response = await backend.send(BenchRequest(known.prompt, 16 if is_chat else known.max_tokens))
            is_right = response.is_success and response.text == (known.chat if is_chat else known.text)
            self._report.note(name, "completed" if is_right else "wrong")
            if is_right:
                times_s[name].append(response.ttft_s)
            else:
                self._report.complain(f"{name}: {response.error or repr(response.text)}")

        sending: set[asyncio.Task[None]] = set()
        while not until.done():
            if len(sending) < MAX_IN_FLIGHT:
                name = self._generator.choice(list(backends))
                task = asyncio.create_task(send(name, self._generator.choice(self._known)))
                sending.add(task)
                task.add_done_callback(sending.discard)
            await asyncio.sleep(self._generator.expovariate(1 / INTERVAL_S))
        await asyncio.gather(*sending)
        until.result()
        await client.close()
        for channel in channels:
            await channel.close()
        return times_s
