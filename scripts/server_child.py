"""A real server for scripts and tests: ``jaxserve serve`` in a separate process, on free ports of this machine."""

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
from types import MappingProxyType
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
_FORK_S = 5.0  # until a child that was forked has its own command line
_READY = re.compile(r"jaxserve ready: http=(\S+) grpc=(\S+) admin=(\S+)")


@dataclasses.dataclass
class RunningServer:
    """A running server.

    Attributes:
        process: The front end, or what launched it.
        http: Base URL, without ``/v1``.
        grpc: Target of the gRPC listener.
        admin: Target of the admin listener.
        log: File with its output.
        headers: Sent with each HTTP request to it, such as a key.
    """

    process: "subprocess.Popen[bytes]"
    http: str
    grpc: str
    admin: str
    log: Path
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    @property
    def engine_pid(self) -> int:
        """Process id of the engine, a child of the front end, which may just have been forked."""
        until = time.monotonic() + _FORK_S
        while (found := _engine_of(self.process.pid)) is None:
            if time.monotonic() > until:
                raise RuntimeError(f"process {self.process.pid} has no engine process")
            time.sleep(0.01)
        return found

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for the front end and return its exit status."""
        return self.process.wait(timeout_s)


def _engine_of(pid: int) -> int | None:
    for child in children_of(pid):
        with contextlib.suppress(OSError):  # it has ended
            if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


def children_of(pid: int) -> Iterator[int]:
    """Return the processes that any thread of a process has started; raises OSError if it has ended."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            yield from map(int, (task / "children").read_text().split())


def family(pid: int) -> list[int]:
    """A process and all that it and its children have started."""
    found = [pid]
    with contextlib.suppress(OSError):
        for child in children_of(pid):
            found += family(child)
    return found


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return settings with Python names as command-line flags."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


@contextlib.contextmanager
def running_server(
    model: str,
    flags: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    start_limit_s: float = 600.0,
    end_limit_s: float = 90.0,
    launcher: Sequence[str] = (),
) -> Iterator[RunningServer]:
    """Run a server while the block runs; stop it with SIGTERM, and with SIGKILL after the limit.

    Args:
        model: Directory, or ``demo``.
        flags: Of ``jaxserve serve``.
        log: File for what it writes.
        environment: Added to this process' own.
        start_limit_s: Seconds until it must be ready.
        end_limit_s: Seconds until it must have exited.
        launcher: Words of the command before ``serve``.

    Raises:
        RuntimeError: It did not start.
    """
    command = [sys.executable, "-m", "jaxserve", *launcher, "serve", model, "--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _when_ready(process, log, start_limit_s)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(end_limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _when_ready(process: "subprocess.Popen[bytes]", log: Path, limit_s: float) -> RunningServer:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        found = _READY.search(log.read_text(errors="replace"))
        if found:
            return RunningServer(process, found[1], found[2], found[3], log)
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start (status {process.poll()}):\n{log.read_text(errors='replace')}")
