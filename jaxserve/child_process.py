"""Child processes that run jobs which may hang, crash or take too much memory: each job has a time limit."""

import concurrent.futures
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

READY = "ready"
"""The line with which a child of a ``ProcessPool`` says that it takes jobs."""
_START_LIMIT_S = 60.0


class LineProcess:
    """A Python process that answers each line with a line. If an answer is late, the process is killed.

    Args:
        arguments: Arguments of the interpreter: a script, or ``-m`` and a module.
        is_quiet: Whether to drop what the process writes to standard error.
    """

    def __init__(self, arguments: Sequence[str], *, is_quiet: bool = False):
        self._process = subprocess.Popen(
            [sys.executable, "-P", *arguments],  # -P: the script's folder is not searched for modules
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_quiet else None,
            env=child_environment(),
        )

    def ask(self, line: str, limit_s: float) -> str | None:
        """Return the answer to a line, both without newline; None if the process has ended or was too late.

        Args:
            line: The line.
            limit_s: Seconds that the answer may take.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if answer.endswith(b"\n"):
            return answer[:-1].decode()
        self._process.kill()
        self._process.wait()
        return None

    def is_alive(self) -> bool:
        """Return whether the process can take another line."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process, from any thread; a line in it gets no answer."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and close its pipes; not while another thread waits for an answer."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class ProcessPool:
    """Child processes that answer JSON lines: each runs one job at a time, and is used again.

    Args:
        arguments: Arguments of the interpreter, as for ``LineProcess``.
        setup: The first line that each process gets; it answers ``READY``.
        max_idle: Processes kept for later jobs.
        starts_ahead: Whether to start processes before there are jobs for them.
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
        self._setup = json.dumps(dict(setup))
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

    def run(self, job: str, limit_s: float) -> Any:
        """Return the answer to a job; None if it took more time or memory than allowed, or the pool was closed.

        Args:
            job: A JSON object.
            limit_s: Seconds that the answer may take.

        Raises:
            RuntimeError: The pool is closed, or no process could be started.
        """
        process = self._take()
        try:
            answer = process.ask(job, limit_s)
            return None if answer is None else json.loads(answer)
        finally:
            self._give_back(process)

    def kill(self) -> None:
        """Kill all processes; running jobs fail. Does not wait."""
        with self._lock:
            self._is_closed = True
            for process in self._all:
                process.kill()

    def close(self) -> None:
        """End all processes, once no thread is in ``run`` any more."""
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
            logger.exception("a child process did not start; the next job tries again")
            return
        self._give_back(process)

    def _start(self) -> LineProcess:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool of child processes is closed")
            process = LineProcess(self._arguments, is_quiet=self._is_quiet)
            self._all.append(process)
        if process.ask(self._setup, _START_LIMIT_S) == READY:
            return process
        with self._lock:
            self._all.remove(process)
        process.close()
        raise RuntimeError(f"a child process did not start: {self._arguments[-1]}")


def child_environment() -> dict[str, str]:
    """Return this process's environment, in which a child finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
