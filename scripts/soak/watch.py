"""Observes a server from outside: its processes in /proc, and its metrics."""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from jaxserve.bench.serve.http import HttpClient
from scripts.server_child import RunningServer, children_of
from scripts.soak.report import ZERO, Sample

_LINE = re.compile(r"^jaxserve:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_NAMES = {*ZERO, "compiles_after_ready_total", "requests_refused_total", "steps_total", "num_preemptions_total"}
ReadValues = Callable[[RunningServer, HttpClient], Awaitable[dict[str, float]]]
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ESTABLISHED = re.compile(rb"^ *\d+: \S+ \S+ 01(?: +\S+){5} +(\d+)", re.MULTILINE)
"""Finds in ``/proc/net/tcp`` the inodes of connections that both sides keep."""


def process_values(prefix: str, pid: int) -> dict[str, float]:
    """Return memory, descriptors and threads of a process.

    Raises:
        FileNotFoundError: The process has exited.
    """
    return {
        f"{prefix}_rss_bytes": _rss_bytes(pid),
        f"{prefix}_fds": float(len(os.listdir(f"/proc/{pid}/fd"))),
        f"{prefix}_threads": float(len(os.listdir(f"/proc/{pid}/task"))),
    }


def unconnected_descriptors(pid: int) -> int:
    """Return how many descriptors a process has besides those of established TCP connections.

    With thousands of connections that come and go, the total says nothing about a leak. A connection that the other
    side has closed is not established any more, and counts until this process closes it too. What is opened or closed
    while this function looks does not count.

    Raises:
        FileNotFoundError: The process has exited.
    """
    before = _descriptors(pid)
    established = set[str]()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            table = Path(f"/proc/{pid}/net/{name}").read_bytes()
            established.update(f"socket:[{int(inode)}]" for inode in _ESTABLISHED.findall(table))
    after = _descriptors(pid)
    return sum(target not in established for number, target in after.items() if before.get(number) == target)


def _descriptors(pid: int) -> dict[str, str]:
    """Return the descriptors of a process, and what each refers to."""
    folder, found = f"/proc/{pid}/fd", dict[str, str]()
    for number in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            found[number] = os.readlink(f"{folder}/{number}")
    return found


def _rss_bytes(pid: int) -> float:
    return float(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES)


def children_values(pid: int) -> dict[str, float]:
    """Return the number and memory of a process's children."""
    count, rss_bytes = 0, 0.0
    for child in children_of(pid):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            rss_bytes += _rss_bytes(child)
            count += 1
    return {"children": float(count), "children_rss_bytes": rss_bytes}


class ProcessMemory(NamedTuple):
    """Resident memory of a process.

    Attributes:
        command: The end of its command line.
        rss_bytes: Its memory.
    """

    command: str
    rss_bytes: float


def tree_memory(pid: int) -> list[ProcessMemory]:
    """Return the memory of a process and of all processes below it.

    A child that has not yet replaced its parent's program is left out: it still has the parent's memory, counted once.
    """
    found, waiting = list[ProcessMemory](), [(pid, b"")]
    while waiting:
        one, parent_command = waiting.pop()
        with contextlib.suppress(OSError):  # it has just ended
            command = Path(f"/proc/{one}/cmdline").read_bytes()
            if command == parent_command:
                continue
            words = command.replace(b"\0", b" ").decode(errors="replace")
            found.append(ProcessMemory(words.strip()[-40:], _rss_bytes(one)))
            waiting += ((child, command) for child in children_of(one))
    return found


async def metric_values(client: HttpClient) -> dict[str, float]:
    """Return the numbers of ``/metrics`` that are observed."""
    response = await client.request("GET", "/metrics")
    return {name: float(value) for name, value in _LINE.findall(response.body.decode()) if name in _NAMES}


async def server_values(server: RunningServer, client: HttpClient) -> dict[str, float]:
    """Return all observed numbers."""
    found = await metric_values(client)
    front, engine = process_values("front", server.process.pid), process_values("engine", server.engine_pid)
    return {**front, **engine, **children_values(server.engine_pid), **found}


async def watch(server: RunningServer, samples: list[Sample], interval_s: float) -> None:
    """Take samples until it is cancelled; the front end's descriptors are those besides established connections."""
    client = HttpClient(server.http, server.headers)
    start_s = time.monotonic()
    try:
        while True:
            values = await server_values(server, client)
            values["front_fds"] = float(await asyncio.to_thread(unconnected_descriptors, server.process.pid))
            samples.append(Sample(time.monotonic() - start_s, values))
            await asyncio.sleep(interval_s)
    finally:
        await client.close()


async def wait_until_quiet(
    server: RunningServer, limit_s: float, settle_s: float = 0.0, read: ReadValues = server_values
) -> dict[str, float]:
    """Return the state of the server once it is idle, or at the time limit.

    Args:
        server: The server.
        limit_s: How long to wait at most.
        settle_s: How long it must have been quiet: idle connections are closed meanwhile.
        read: Returns the observed numbers.
    """
    deadline_s = time.monotonic() + limit_s
    quiet_since_s: float | None = None
    while True:
        client = HttpClient(server.http, {**server.headers, "Connection": "close"})
        values = await read(server, client)
        await client.close()
        now_s = time.monotonic()
        is_quiet = not any(values[name] for name in ZERO)
        quiet_since_s = (quiet_since_s or now_s) if is_quiet else None
        if now_s > deadline_s or (quiet_since_s is not None and now_s - quiet_since_s >= settle_s):
            return values
        await asyncio.sleep(0.2)
