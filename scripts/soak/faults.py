"""Requests to an engine of several processes, one of which is killed or stopped every minute: none is lost silently.

A request ends with the right response, or with an error that says which process ended. After each fault the engine must
answer again, and before the next one memory, descriptors and threads of all processes are noted: those of the front end
and the launcher live on, those of the engine and its followers are new, and must be like the ones before.
"""

import asyncio
import collections
import contextlib
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.bench.serve.grpc import GrpcBackend, open_channels
from jaxserve.bench.serve.http import HttpClient
from jaxserve.bench.serve.openai import OpenAIBackend
from jaxserve.bench.serve.records import BenchRequest, BenchServeError
from scripts.server_child import RunningServer, family
from scripts.soak.report import MIB, Limit, Report, Sample
from scripts.soak.requests import KnownPrompt
from scripts.soak.watch import metric_values, process_values, wait_until_quiet

INTERVAL_S = 60.0
BETWEEN_S = 0.05
"""Pause of a client between two requests, and twenty times as long after an error."""
REQUEST_LIMIT_S = 60.0
"""Of any request, whatever befalls the engine: the time limit of a step, and a margin for busy machines."""
BACK_LIMIT_S = 120.0
"""Until the engine answers again."""
QUIET_LIMIT_S = 30.0
OUTAGE = re.compile(
    r"(HTTP 503|gRPC UNAVAILABLE|the stream ended with an error|status 503).*"
    r"(rank \d+ of its processes ended, failed or is late|was killed by SIG\w+|it sent nothing for 15 s and was killed|"
    r"the engine is starting|has ended)"
)
"""What a request is told whose engine has ended or is not there."""
LIMITS = (
    Limit("front_rss_bytes", 8 * MIB, 0.03),
    Limit("front_fds", 6.0),
    Limit("front_threads", 6.0),
    Limit("launcher_rss_bytes", 2 * MIB, 0.03),
    Limit("launcher_fds", 2.0),
    Limit("engine_rss_bytes", 16 * MIB, 0.03),
    Limit("engine_fds", 4.0),
    Limit("engine_threads", 6.0),
    Limit("follower_rss_bytes", 16 * MIB, 0.03),
    Limit("follower_fds", 4.0),
    Limit("follower_threads", 6.0),
    Limit("processes", 1.0),
    Limit("shared_files", 1.0),
)
FAULTS = {
    "follower killed": ("follower", signal.SIGKILL),
    "engine killed": ("engine", signal.SIGKILL),
    "follower stopped": ("follower", signal.SIGSTOP),
    "engine stopped": ("engine", signal.SIGSTOP),
}
"""What happens to which process of a group."""


class Processes(NamedTuple):
    """The processes of a group that ``jaxserve launch`` started on this machine.

    Attributes:
        launcher: It starts the others.
        front: It holds the clients' connections.
        engine: The engine's process 0, a child of the front end.
        follower: Its process 1.
        total: Number of them and of all others below the launcher.
    """

    launcher: int
    front: int
    engine: int
    follower: int
    total: int

    @classmethod
    def below(cls, launcher: int) -> "Processes":
        """Find the processes of a launcher.

        Raises:
            LookupError: Some have ended or do not run yet.
        """
        found = dict[int, str]()
        for pid in family(launcher):
            with contextlib.suppress(OSError):  # it has just ended
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text()

        def one(sign: str) -> int:
            for pid, command in found.items():
                if sign in command:
                    return pid
            raise LookupError(f"no process below {launcher} has {sign!r} in its command line")

        ranks = [one(f"--node-rank={rank}\0") for rank in range(2)]
        return cls(launcher, ranks[0], one("engine_process"), ranks[1], len(found))


async def run_faults(
    server: RunningServer,
    known: list[KnownPrompt],
    report: Report,
    duration_s: float,
    seed: int,
    num_workers: int,
    interval_s: float = INTERVAL_S,
) -> dict[str, Any]:
    """Send requests for some time, while something happens to one of the processes every minute.

    Args:
        server: A server that ``jaxserve launch --nproc 2`` started, with ``--restart-engine``.
        known: Prompts with their completions.
        report: Gets outcomes, samples and problems.
        duration_s: Seconds of requests.
        seed: Of what is sent and of the order of the faults.
        num_workers: Requests at a time.
        interval_s: From one fault to the next; longer where the engine is not back yet.

    Returns:
        How often each fault happened, and the longest time until the engine answered again, in seconds.
    """
    clients, watcher = _Clients(server, known, report, seed), HttpClient(server.http, {"Connection": "close"})
    start_s = time.monotonic()
    workers = [asyncio.create_task(clients.work(number, start_s + duration_s)) for number in range(num_workers)]
    counts, longest_s = collections.Counter[str](), 0.0
    order = random.Random(seed)
    names = itertools.chain.from_iterable(order.sample(list(FAULTS), len(FAULTS)) for _ in itertools.count())
    while time.monotonic() - start_s < duration_s - interval_s:
        began_s = time.monotonic()
        name = next(names)
        role, number = FAULTS[name]
        os.kill(getattr(Processes.below(server.process.pid), role), number)
        counts[name] += 1
        longest_s = max(longest_s, await clients.back_s(name, began_s))
        await asyncio.sleep(max(0.0, interval_s - (time.monotonic() - began_s)))
        report.samples.append(Sample(time.monotonic() - start_s, await _values(server, watcher)))
    await asyncio.gather(*workers)
    report.duration_s = time.monotonic() - start_s
    await clients.close()
    await watcher.close()
    report.after = await wait_until_quiet(server, QUIET_LIMIT_S, read=_values)
    report.before = report.samples[0].values
    report.judge_rises(LIMITS)
    report.judge_zeros(report.after)
    return {"faults": dict(counts), "longest_outage_s": round(longest_s, 1)}


async def _values(server: RunningServer, client: HttpClient) -> dict[str, float]:
    """Return what is noted: of all processes, of shared memory, and of the metrics."""
    found = Processes.below(server.process.pid)
    values = await metric_values(client)
    for role in ("launcher", "front", "engine", "follower"):
        values |= process_values(role, getattr(found, role))
    return values | {"processes": float(found.total), "shared_files": float(len(os.listdir("/dev/shm")))}


class _Clients:
    """The clients of a group, who are told how their requests ended."""

    def __init__(self, server: RunningServer, known: list[KnownPrompt], report: Report, seed: int):
        self._server, self._known, self._report, self._seed = server, known, report, seed
        self._client = HttpClient(server.http)
        self._channels = open_channels(server.grpc, 2)
        self._numbers = itertools.count()

    async def work(self, worker: int, until_s: float) -> None:
        """Send one request after another until a time."""
        generator = random.Random(f"{self._seed} {worker}")
        kinds: dict[str, Callable[[KnownPrompt], Awaitable[str]]] = {
            "http stream": self._http_stream,
            "http unary": self._http_unary,
            "http chat": self._http_chat,
            "http grammar": self._http_grammar,
            "grpc stream": self._grpc_stream,
        }
        while time.monotonic() < until_s:
            name = generator.choice(list(kinds))
            try:
                async with asyncio.timeout(REQUEST_LIMIT_S):
                    problem = await kinds[name](generator.choice(self._known))
            except TimeoutError:
                problem = f"not finished within {REQUEST_LIMIT_S:.0f} s"
            except (OSError, BenchServeError, KeyError) as error:
                problem = f"{type(error).__name__}: {error}"
            is_told = bool(OUTAGE.search(problem))
            self._report.note(name, "told" if is_told else "lost" if problem else "completed")
            if problem and not is_told:
                self._report.complain(f"{name}: {problem}")
            await asyncio.sleep(BETWEEN_S * (20 if problem else 1))

    async def back_s(self, fault: str, began_s: float) -> float:
        """Return the seconds until requests fail because of a fault, and succeed again."""
        has_failed = False
        while time.monotonic() - began_s < BACK_LIMIT_S:
            try:
                problem = await self._http_unary(self._known[0])
            except (OSError, BenchServeError, KeyError) as error:
                problem = str(error)
            has_failed = has_failed or bool(problem)
            if has_failed and not problem:
                return time.monotonic() - began_s
            await asyncio.sleep(0.2)
        self._report.complain(f"{fault}: the engine does not answer within {BACK_LIMIT_S:.0f} s")
        return BACK_LIMIT_S

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()
        for channel in self._channels:
            await channel.close()

    def _fields(self) -> dict[str, Any]:
        """Return fields that make a request like no other, without effect on its response: one that was running at two
        ends of the engine would be refused."""
        return {"temperature": 0, "stop": [f"\x00{next(self._numbers)}"]}

    async def _http_stream(self, known: KnownPrompt) -> str:
        fields = {**self._fields(), "ignore_eos": True}
        backend = OpenAIBackend(self._client, "/v1/completions", "", fields)
        response = await backend.send(BenchRequest(known.prompt, known.max_tokens))
        return response.error or _difference(response.text, known.text)

    async def _grpc_stream(self, known: KnownPrompt) -> str:
        backend = GrpcBackend(self._channels, "", {**self._fields(), "ignore_eos": True}, {}, {})
        response = await backend.send(BenchRequest(known.prompt, known.max_tokens))
        return response.error or _difference(response.text, known.text)

    async def _http_unary(self, known: KnownPrompt) -> str:
        found = await self._post("/v1/completions", {**known.completion(), **self._fields()})
        return found if isinstance(found, str) else _difference(found["choices"][0]["text"], known.text)

    async def _http_chat(self, known: KnownPrompt) -> str:
        found = await self._post("/v1/chat/completions", {**known.chat_completion(), **self._fields()})
        return found if isinstance(found, str) else _difference(found["choices"][0]["message"]["content"], known.chat)

    async def _http_grammar(self, known: KnownPrompt) -> str:
        body = {"prompt": known.prompt, "max_tokens": 8, "structured_outputs": {"regex": "[0-9]{3}"}, **self._fields()}
        found = await self._post("/v1/completions", body)
        if isinstance(found, str):
            return found
        text = found["choices"][0]["text"]
        return "" if re.fullmatch("[0-9]{3}", text) else f"expected three digits, got {text!r}"

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON of a response, or the error as text."""
        response = await self._client.request("POST", path, body)
        if response.status != 200:
            return f"status {response.status}: {response.body[:500].decode('utf-8', 'replace')}"
        return response.json()


def _difference(text: str, expected: str) -> str:
    return "" if text == expected else f"expected {expected!r}, got {text!r}"
