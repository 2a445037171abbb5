"""Real servers for tests: ``jaxserve serve`` in a process of its own, on free ports of this machine."""

import contextlib
import dataclasses
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

REPOSITORY = Path(__file__).resolve().parent.parent
START_LIMIT_S = 300.0
SMALL_ENGINE = (
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256"),
    *("--kv-cache-memory-bytes", str(8 << 20)),
)
"""Flags of an engine that starts soon."""
PROGRAMS_CACHE = Path(tempfile.gettempdir()) / f"jaxserve-test-programs-{os.getuid()}"


@dataclasses.dataclass
class RunningServer:
    """A server that runs.

    Attributes:
        process: The front end.
        http: Base URL, without ``/v1``.
        grpc: Target of the gRPC listener.
        admin: Target of the admin listener.
        log: File of what it writes to standard error.
    """

    process: "subprocess.Popen[str]"
    http: str
    grpc: str
    admin: str
    log: Path

    @property
    def engine_pid(self) -> int:
        """Process id of the engine: the front end's child that runs it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("the front end has no engine process")

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def running_server(
    *flags: str, model: str = "demo", environment: Mapping[str, str] = MappingProxyType({}), engine: bool = True
) -> Iterator[RunningServer]:
    """A server while the block runs; ended by SIGTERM, then by force.

    Args:
        *flags: Of ``jaxserve serve``.
        model: Directory, or ``demo``.
        environment: Added to this process' own.
        engine: Add the flags of ``SMALL_ENGINE``.
    """
    command = [sys.executable, "-m", "jaxserve", "serve", model, "--port", "0", "--grpc-port", "0", "--admin-port", "0"]
    command += [
        "--compilation-cache-dir",
        str(PROGRAMS_CACHE),
        "--shutdown-timeout",
        "5",
        *(SMALL_ENGINE if engine else ()),
    ]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            [*command, *flags],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield _when_ready(process, Path(log.name))
        finally:
            _end(process)


def _when_ready(process: "subprocess.Popen[str]", log: Path) -> RunningServer:
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while line := lines.get(timeout=START_LIMIT_S):
        found = re.search(r"jaxserve ready: http=(\S+) grpc=(\S+) admin=(\S+)", line)
        if found:
            return RunningServer(process, found[1], found[2], found[3], log)
    raise AssertionError(f"the server did not start (status {process.wait(10)}):\n{log.read_text()}")


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
