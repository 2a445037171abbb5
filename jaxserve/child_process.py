"""Child processes that answer one line after the other, each within its time."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence


class LineProcess:
    """A Python process that answers lines. Ends, and is of no more use, with a line that it is late with.

    Args:
        arguments: Of the interpreter: a script, or ``-m`` and a module.
        is_quiet: Whether what it writes to standard error is dropped.
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
        """The answer to a line, without the line's end; None where the process has ended, by itself or for being late.

        Args:
            line: Without its end.
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
        """Whether it can take another line."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it at once, from any thread; a line in it gets no answer."""
        self._process.kill()

    def close(self) -> None:
        """Ends it and gives its pipes back; not while another thread asks it something."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def child_environment() -> dict[str, str]:
    """This process' environment, with which a child finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
