"""A real server for scripts: ``jaxserve serve`` in a process of its own, on free ports of this machine."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
_READY = re.compile(r"jaxserve ready: http=(\S+) grpc=(\S+) admin=(\S+)")


@dataclasses.dataclass(frozen=True)
class ServerAddress:
    """Where a server listens, and its processes.

    Attributes:
        http: Base URL, without ``/v1``.
        grpc: Target of the gRPC listener.
        admin: Target of the admin listener.
        front_pid: Process of the front end.
        engine_pid: Process of the engine.
    """

    http: str
    grpc: str
    admin: str
    front_pid: int
    engine_pid: int


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings under their Python names as flags of the command line."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


@contextlib.contextmanager
def running_server(model: str, flags: Sequence[str], log: Path, limit_s: float = 600.0) -> Iterator[ServerAddress]:
    """A server while the block runs; what it writes goes to ``log``.

    Raises:
        RuntimeError: It did not start, or did not end by itself when told to.
    """
    command = [sys.executable, "-m", "jaxserve", "serve", model, "--port", "0", "--grpc-port", "0", "--admin-port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        found = _wait_until_ready(process, log, limit_s)
        yield ServerAddress(found[1], found[2], found[3], process.pid, engine_pid(process.pid))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RuntimeError(f"the server did not end within 90 s of SIGTERM; see {log}") from None


def engine_pid(front_pid: int) -> int:
    """The engine's process: the front end's child that runs it."""
    for child in Path(f"/proc/{front_pid}/task/{front_pid}/children").read_text().split():
        if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise RuntimeError(f"process {front_pid} has no engine process")


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path, limit_s: float) -> "re.Match[str]":
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        found = _READY.search(log.read_text(errors="replace"))
        if found:
            return found
        if process.poll() is not None:
            break
        time.sleep(0.1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
    raise RuntimeError(f"the server did not start (status {process.poll()}):\n{tail}")
