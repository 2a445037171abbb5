"""A server of several processes that something else than ``jaxserve launch`` starts."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from scripts.server_child import REPOSITORY, RunningServer, _when_ready
from tests.group_server import family, kill
from tests.server_process import PROGRAMS_CACHE, SMALL_ENGINE, START_LIMIT_S

ENGINE = ("--compilation-cache-dir", str(PROGRAMS_CACHE), "--shutdown-timeout", "20", *SMALL_ENGINE)
"""Flags of a small engine."""


@contextlib.contextmanager
def started(
    words: Sequence[str],
    log: Path,
    *flags: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    python: str = sys.executable,
) -> Iterator["subprocess.Popen[bytes]"]:
    """``jaxserve serve demo`` with these flags, after some words of a command, while the block runs."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, python, "-m", "jaxserve", "serve", "demo", "--port", "0", *flags],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(30)
        for pid in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        process.wait()


def when_ready(process: "subprocess.Popen[bytes]", log: Path) -> RunningServer:
    """The server, once the log has its addresses."""
    return _when_ready(process, log, START_LIMIT_S)
