"""Standard output and standard error of the command: closed ones, full ones, and ones whose reader has exited."""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO

from jaxserve.api.errors import ConfigError, JaxserveError

STATUS_FAILED = 2
STATUS_BROKEN_PIPE = 141
"""What shells report for a process that SIGPIPE killed: 128 + 13. Python ignores the signal, as a server must."""
_NAMES = ("stdin", "stdout", "stderr")


@contextlib.contextmanager
def standard_streams(*, needs_output: bool) -> Iterator[None]:
    """Run a command in the block; exit without a traceback if it cannot write.

    If the reader of its output has exited, as that of ``jaxserve plan | head``, exit with ``STATUS_BROKEN_PIPE`` and
    without a message; otherwise with ``STATUS_FAILED`` and one line on standard error.

    Args:
        needs_output: Whether the command makes no sense with standard output closed.

    Raises:
        ConfigError: Standard output is closed.
    """
    is_closed = sys.stdout is None
    _open_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # where the terminal's encoding lacks a character
    if is_closed and needs_output:
        raise ConfigError("standard output is closed; redirect it to a file or /dev/null")
    try:
        yield
    except OSError as error:
        if not isinstance(error, JaxserveError):
            _exit_for(error)
        _flush(STATUS_FAILED)
        raise
    except BaseException as error:
        _flush(error.code if isinstance(error, SystemExit) else STATUS_FAILED)
        raise
    _flush(None)


def _open_closed() -> None:
    """Open the null device for standard streams that are closed, so that no other file takes their numbers."""
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # the lowest free number
            os.set_inheritable(getattr(sys, name).fileno(), True)


def _flush(status: str | int | None) -> None:
    """Write what is buffered; if that fails, exit, unless the command failed already."""
    error = _failure(sys.stdout)
    if error is not None and not status:
        _exit_for(error)
    for stream in (sys.stdout, sys.stderr):
        if _failure(stream) is not None:
            _silence(stream)


def _exit_for(error: OSError) -> None:
    """Exit because of an error of a file or a stream."""
    broken = [stream for stream in (sys.stdout, sys.stderr) if _failure(stream) is not None or _has_no_reader(stream)]
    for stream in broken:
        _silence(stream)
    if isinstance(error, BrokenPipeError) and broken:
        sys.exit(STATUS_BROKEN_PIPE)
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if error.filename is not None:
        what = f"{error.filename}: "
    else:
        what = "cannot write to standard output: " if sys.stdout in broken else "cannot write: " if is_full else ""
    with contextlib.suppress(OSError):
        print(f"jaxserve: {what}{error.strerror or error}", file=sys.stderr)
    sys.exit(STATUS_FAILED)


def _failure(stream: TextIO) -> OSError | None:
    """Return why a stream cannot write what it has buffered; None if it can. It keeps what could not be written."""
    try:
        stream.flush()
    except OSError as error:
        return error
    except ValueError:  # it was closed
        return None
    return None


def _has_no_reader(stream: TextIO) -> bool:
    """Return whether a stream is a pipe without a reader; one without a buffer fails only once."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return False


def _silence(stream: TextIO) -> None:
    """Let a stream write to the null device, so that the interpreter does not report its buffer at exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
