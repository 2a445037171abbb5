"""Runs jobs that may hang, crash or need too much memory in child processes; each job has a time limit."""

import concurrent.futures
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

READY = "ready"
"""The line that a child of a ``ProcessPool`` writes when it is ready for jobs."""
EXIT_FAILED = 70
"""Exit status of a process of an engine after a failure: EX_SOFTWARE."""
EXIT_BAD_START = 2
"""Exit status of one that could not start."""
NICENESS = 5
"""How far below its parent a child runs: an engine and its connections go before others' templates and grammars."""
_START_LIMIT_S = 60.0
_KEPT = frozenset(("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"))
_KEPT_PREFIXES = ("PYTHON", "LC_", "MALLOC_")
_SECRET_ENDS = ("_API_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
_SECRET_PREFIXES = ("OTEL_", "AWS_")
_DOWNLOAD_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""An engine may need one to download its model."""


def end_of(status: int | None) -> str:
    """Return how a process has ended, from its exit status as ``subprocess`` has it, as the rest of a sentence."""
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def shell_status(status: int) -> int:
    """Return an exit status, as ``subprocess`` has it, in the form of shells, which have no negative ones."""
    return status if status >= 0 else 128 - status


class LineProcess:
    """A Python process that responds to each line with one line. If a response is late, the process is killed.

    It runs at a lower priority than this one.

    Args:
        arguments: Arguments of the interpreter: a script, or ``-m`` and a module.
        is_quiet: Whether to discard the process's standard error.
    """

    def __init__(self, arguments: Sequence[str], *, is_quiet: bool = False):
        self._process = subprocess.Popen(
            [sys.executable, "-P", *arguments],  # -P: the script's folder is not searched for modules
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_quiet else None,
            env=_clean_environment(),
        )
        with contextlib.suppress(OSError):  # it has ended
            priority = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
            os.setpriority(os.PRIO_PROCESS, self._process.pid, priority)

    def ask(self, line: bytes, limit_s: float) -> bytes | None:
        """Send a line and return the response, both without newline; None if the process has exited or timed out.

        Args:
            line: The line.
            limit_s: Seconds until the process is killed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
            response = self._process.stdout.readline()
        except BrokenPipeError:
            response = b""
        finally:
            timer.cancel()
        if response.endswith(b"\n"):
            return response[:-1]
        self._process.kill()
        self._process.wait()
        return None

    def is_alive(self) -> bool:
        """Return whether the process can take another line."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process, from any thread; a pending line gets no response."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and close its pipes; call it only when no other thread waits for a response."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class ProcessPool:
    """Child processes that respond to JSON lines; each runs one job at a time and is reused.

    Args:
        arguments: Arguments of the interpreter, as for ``LineProcess``.
        setup: The first line sent to each process; it responds with ``READY``.
        max_idle: Number of idle processes to keep for later jobs.
        starts_ahead: Whether to start processes before the first job.
        is_quiet: As for ``LineProcess``.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        setup: Mapping[str, Any],
        *,
        max_idle: int = 2,
        starts_ahead: bool = False,
        is_quiet: bool = False,
    ):
        self._arguments = arguments
        self._setup = json.dumps(dict(setup)).encode()
        self._max_idle = max_idle
        self._starts_ahead = starts_ahead
        self._is_quiet = is_quiet
        self._starter = concurrent.futures.ThreadPoolExecutor(1, "jaxserve-child")
        self._idle: list[LineProcess] = []
        self._all: list[LineProcess] = []
        self._is_closed = False
        self._lock = threading.Lock()  # of the three above
        if starts_ahead:
            for _ in range(max_idle):
                self._starter.submit(self._add_idle)

    def run(self, job: bytes, limit_s: float) -> Any:
        """Return the response to a job; None if it exceeded its time or memory, or the pool was closed.

        Args:
            job: A JSON object, in UTF-8.
            limit_s: Seconds until the job is killed.

        Raises:
            RuntimeError: The pool is closed, or no process could be started.
        """
        process = self._take()
        try:
            response = process.ask(job, limit_s)
            return None if response is None else json.loads(response)
        finally:
            self._give_back(process)

    def kill(self) -> None:
        """Kill all processes without waiting; running jobs fail."""
        with self._lock:
            self._is_closed = True
            for process in self._all:
                process.kill()

    def close(self) -> None:
        """Stop all processes; call it only when no thread is in ``run``."""
        self.kill()
        self._starter.shutdown(cancel_futures=True)
        for process in self._all:
            process.close()

    def _take(self) -> LineProcess:
        with self._lock:
            while self._idle:
                found = self._idle.pop()
                if found.is_alive():
                    return found
        return self._start()

    def _give_back(self, process: LineProcess) -> None:
        with self._lock:
            if process.is_alive() and len(self._idle) < self._max_idle:
                self._idle.append(process)
                return
            if self._starts_ahead and not self._is_closed and not self._idle:
                self._starter.submit(self._add_idle)
            self._all.remove(process)
        process.close()

    def _add_idle(self) -> None:
        try:
            process = self._start()
        except (OSError, RuntimeError):
            if not self._is_closed:
                logger.exception("a child process did not start; the next job will retry")
            return
        self._give_back(process)

    def _start(self) -> LineProcess:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool of child processes is closed")
            process = LineProcess(self._arguments, is_quiet=self._is_quiet)
            self._all.append(process)
        if process.ask(self._setup, _START_LIMIT_S) == READY.encode():
            return process
        with self._lock:
            self._all.remove(process)
        process.close()
        raise RuntimeError(f"a child process did not start: {self._arguments[-1]}; see its standard error")


def child_environment() -> dict[str, str]:
    """Return an environment in which a child process finds the same modules, without the keys of a server's clients."""
    kept = {name: value for name, value in os.environ.items() if not _is_secret(name)}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _clean_environment() -> dict[str, str]:
    """Return the environment of a process that runs others' templates and grammars: nothing but what Python needs."""
    given = child_environment()
    return {name: value for name, value in given.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}


def _is_secret(name: str) -> bool:
    """Return whether a variable may hold a secret that no child needs."""
    return name not in _DOWNLOAD_TOKENS and (name.endswith(_SECRET_ENDS) or name.startswith(_SECRET_PREFIXES))
