"""The log of a server's processes: lines of text or JSON, written by a thread so that a slow reader delays nothing.

Lines wait in a queue of limited size. If it is full, because the pipe has no reader, lines are dropped and counted.
"""

import collections
import contextlib
import datetime
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal, NoReturn

LogFormat = Literal["text", "json"]

MAX_QUEUE_BYTES = 4 << 20
"""Lines that wait to be written; beyond these, they are dropped and counted."""
_MAX_RELAYED = 1 << 16  # characters of a child's line
_LINE_BYTES = 128
"""What a line takes besides its characters."""
_CLOSE_S = 1.0
_STDERR = 2
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_FIELDS: ContextVar[dict[str, str] | None] = ContextVar("log fields", default=None)


def begin_log_fields() -> None:
    """Begin a request: from now on this task, and those that it starts, have fields of their own in each line."""
    _FIELDS.set({})


def note_log_fields(**fields: str | None) -> None:
    """Add fields, such as ``request_id``, to the lines of the request that began last; None adds nothing."""
    current = _FIELDS.get()
    if current is not None:
        current.update({name: value for name, value in fields.items() if value is not None})


class LineQueue:
    """Writes lines to a file descriptor from a thread of its own.

    Args:
        descriptor: Where to write.
        max_bytes: Size of the lines that may wait.
    """

    def __init__(self, descriptor: int = _STDERR, max_bytes: int = MAX_QUEUE_BYTES):
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._lines: collections.deque[bytes] = collections.deque()
        self._num_bytes = 0
        self.num_dropped = 0
        """Lines that were dropped so far."""
        self.num_unreported = 0
        """Those of them that ``take_unreported`` has not returned."""
        self._is_closed = False
        self._is_torn = False  # the last thing written is a part of a line
        self._changed = threading.Condition()  # guards all of these
        self._thread = threading.Thread(target=self._run, name="jaxserve-log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queue a line without its newline, or drop it; never blocks."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if self._lines and self._num_bytes + len(data) + _LINE_BYTES > self._max_bytes:
                self.num_dropped += 1
                self.num_unreported += 1
                return
            self._lines.append(data)
            self._num_bytes += len(data) + _LINE_BYTES
            self._changed.notify()

    def take_unreported(self) -> int:
        """Return how many lines were dropped since the last call; 0 while there is hardly room for a line about it."""
        with self._changed:
            if self._num_bytes > self._max_bytes // 2:
                return 0
            found, self.num_unreported = self.num_unreported, 0
        return found

    def close(self, limit_s: float = _CLOSE_S) -> None:
        """Write what waits, for a limited time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                if not self._lines:
                    return
                data = self._lines[0]
            self._write(data)
            with self._changed:  # it counts as waiting until it is written
                self._lines.popleft()
                self._num_bytes -= len(data) + _LINE_BYTES

    def _write(self, data: bytes) -> None:
        rest = memoryview(b"\n" + data if self._is_torn else data)
        num_bytes = len(rest)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:  # the reader has exited, or the disk is full
            self._is_torn |= len(rest) < num_bytes
            with self._changed:
                self.num_dropped += 1
                self.num_unreported += 1
        else:
            self._is_torn = False


class QueueHandler(logging.Handler):
    """Formats records in the threads that log, and queues them.

    Args:
        log_format: ``text`` or ``json``.
        process: Which process it is, in JSON.
        lines: The queue.
        has_prefix: Whether lines of text begin with that.
    """

    def __init__(self, log_format: LogFormat, process: str, lines: LineQueue, has_prefix: bool = False):
        super().__init__()
        self._prefix = _prefix(log_format, process, has_prefix)
        self._log_format: LogFormat = log_format
        self._form = json_line if log_format == "json" else text_line
        self._process = process
        self.lines = lines
        self._relays: list[threading.Thread] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record."""
        try:
            if self.lines.num_unreported:
                self._report()
            self.lines.put(self._prefix + self._form(record, self._process))
        except Exception:  # a record whose arguments do not fit its message
            self.handleError(record)

    def _report(self) -> None:
        num_dropped = self.lines.take_unreported()
        if num_dropped:
            text = f"dropped {num_dropped} lines of the log: their reader is too slow, or the disk was full"
            record = logging.makeLogRecord({"levelno": logging.WARNING, "levelname": "WARNING", "msg": text})
            self.lines.put(self._prefix + self._form(record, self._process))

    def close(self) -> None:
        """Write what waits, for a limited time."""
        for relay in self._relays:
            relay.join(_CLOSE_S)
        self.lines.close()
        super().close()

    def relay(self, descriptor: int, process: str, has_prefix: bool = False) -> None:
        """Pass on the lines of a child process, which has this log's format; others are wrapped in it.

        Args:
            descriptor: Where to read them; it is closed at their end.
            process: Which process it is.
            has_prefix: Whether lines of text begin with that.
        """
        arguments = (descriptor, process, _prefix(self._log_format, process, has_prefix))
        thread = threading.Thread(target=self._relay, args=arguments, name="jaxserve-relay", daemon=True)
        self._relays = [*(relay for relay in self._relays if relay.is_alive()), thread]
        thread.start()

    def _relay(self, descriptor: int, process: str, prefix: str) -> None:
        with open(descriptor, encoding="utf-8", errors="backslashreplace", newline="\n") as lines:
            while line := lines.readline(_MAX_RELAYED):
                text = line.rstrip("\r\n").rpartition("\r")[2]  # of a progress bar its last state
                if self._log_format == "json" and not text.startswith('{"time": '):
                    record = logging.makeLogRecord({"levelname": "INFO", "name": "stderr", "msg": text})
                    text = json_line(record, process)
                self.lines.put(prefix + text)


def _prefix(log_format: LogFormat, process: str, has_prefix: bool) -> str:
    return f"[{process}] " if has_prefix and log_format == "text" else ""


def installed_handler() -> QueueHandler | None:
    """Return the handler that ``queued_log`` has installed; None outside of it."""
    return next((one for one in logging.getLogger().handlers if isinstance(one, QueueHandler)), None)


def end_process(status: int) -> NoReturn:
    """End this process once what it has logged and printed is written, for a limited time.

    Nothing of what Python does at exit is done, which may wait for threads or for other processes.
    """
    handler = installed_handler()
    if handler is not None:
        handler.lines.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader has exited, or the disk is full
            stream.flush()
    os._exit(status)


def stacks_of_threads() -> str:
    """Return what all Python threads of this process are at, for one message: two processes that log to the same place
    would otherwise tear each other's lines."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = [
        f"{names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    ]
    return "stacks of all threads:\n" + "".join(found).rstrip()


@contextlib.contextmanager
def relayed(process: str, has_prefix: bool = False) -> Iterator[int]:
    """Yield the descriptor that a child process started in the block writes its log to.

    It is this process's standard error, or a pipe where the log goes through a queue: that passes the child's lines on
    from the end of the block, unless this ends with an error.

    Args:
        process: See ``QueueHandler.relay``.
        has_prefix: Likewise.
    """
    handler = installed_handler()
    if handler is None:
        yield _STDERR
        return
    read, written = os.pipe()
    try:
        yield written
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(written)
    handler.relay(read, process, has_prefix)


@contextlib.contextmanager
def queued_log(log_format: LogFormat, process: str = "server", has_prefix: bool = False) -> Iterator[QueueHandler]:
    """Log to standard error through a queue while the block runs, all libraries and Python's warnings too.

    Args:
        log_format: ``text`` or ``json``.
        process: Which process it is.
        has_prefix: Whether lines of text begin with that.
    """
    root = logging.getLogger()
    before = root.handlers[:]
    sys.stderr.flush()
    handler = QueueHandler(log_format, process, LineQueue(), has_prefix)
    root.handlers[:] = [handler]
    logging.captureWarnings(True)
    try:
        yield handler
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = before
        handler.close()


def text_line(record: logging.LogRecord, _: str) -> str:
    """Return a record as text; further lines of a message are indented, so that no client can forge a line."""
    fields = "".join(f" {name}={_escaped(value)}" for name, value in (_FIELDS.get() or {}).items())
    text = _escaped(f"{record.getMessage()}{fields}{_traceback(record)}").replace("\n", "\n  ")
    return f"{_time(record)} {record.levelname} {text}"


def json_line(record: logging.LogRecord, process: str) -> str:
    """Return a record as one JSON object."""
    found: dict[str, Any] = {
        "time": _time(record),
        "level": record.levelname,
        "process": process,
        "logger": record.name,
        "message": record.getMessage(),
        **(_FIELDS.get() or {}),
    }
    error = _traceback(record)
    return json.dumps({**found, "traceback": error.strip()} if error else found)


def _time(record: logging.LogRecord) -> str:
    at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"


def _traceback(record: logging.LogRecord) -> str:
    if not record.exc_info:
        return ""
    return "\n" + logging.Formatter().formatException(record.exc_info)


def _escaped(text: str) -> str:
    """Return a text without control characters but tabs and newlines."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
