"""The log of a server: its forms, what a client's text cannot do to it, and a reader that does not read."""

import asyncio
import errno
import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.log_output import (
    LineQueue,
    QueueHandler,
    begin_log_fields,
    installed_handler,
    json_line,
    note_log_fields,
    queued_log,
    stacks_of_threads,
    text_line,
)

logger = logging.getLogger("jaxserve.test")


DROPPED = re.compile(r"WARNING dropped (\d+) lines of the log: their reader is too slow, or the disk was full\n")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe."""
    read, written = os.pipe()
    yield read, written
    for descriptor in (read, written):
        os.close(descriptor)


def record(message: str, *arguments: Any, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("jaxserve.test", logging.WARNING, "file", 1, message, arguments, more.get("exc_info"))
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


def read_lines(descriptor: int, count: int) -> list[str]:
    """The first lines in a pipe."""
    found = b""
    while found.count(b"\n") < count:
        found += os.read(descriptor, 1 << 16)
    return found.decode().splitlines()


def test_a_line_of_json() -> None:
    async def request() -> dict[str, Any]:
        begin_log_fields()

        async def inner() -> None:
            note_log_fields(key="team", request_id="cmpl-1", trace_id=None)

        await asyncio.create_task(inner())
        return json.loads(json_line(record("a %s\n", "b\x1b[2J"), "server"))

    assert asyncio.run(request()) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "WARNING",
        "process": "server",
        "logger": "jaxserve.test",
        "message": "a b\x1b[2J\n",
        "key": "team",
        "request_id": "cmpl-1",
    }
    assert "key" not in json.loads(json_line(record("later"), "server"))
    assert "\n" not in json_line(record("two\nlines \u2028\ud800"), "server")


def test_a_line_of_text_cannot_be_forged() -> None:
    forged = "x\n2023-11-14T22:13:20.250Z ERROR all lost\r\x1b[2J\x9b"
    lines = text_line(record("prompt %s", forged), "server").split("\n")
    assert lines == [
        "2023-11-14T22:13:20.250Z WARNING prompt x",
        "  2023-11-14T22:13:20.250Z ERROR all lost\\u000d\\u001b[2J\\u009b",
    ]


def test_tracebacks_are_in_both_forms() -> None:
    try:
        raise KeyError("lost")
    except KeyError as error:
        failed = record("it failed", exc_info=(KeyError, error, error.__traceback__))
    assert json.loads(json_line(failed, "engine"))["traceback"].endswith("KeyError: 'lost'")
    assert text_line(failed, "engine").endswith("\n  KeyError: 'lost'")


def test_lines_that_nobody_reads_are_dropped_and_counted(pipe: tuple[int, int]) -> None:
    read, written = pipe
    queue = LineQueue(written, max_bytes=100_000)
    handler = QueueHandler("text", "server", queue)
    for number in range(3000):
        handler.emit(record("%d %s", number, "x" * 100))
    assert queue.num_dropped > 1000
    found = ""
    # The line about dropped ones waits for room, so that others may come before it.
    while "WARNING the last" not in found or sum(map(int, DROPPED.findall(found))) < queue.num_dropped:
        found += os.read(read, 1 << 20).decode()
        handler.emit(record("the last"))
    assert found.startswith("2023-11-14T22:13:20.250Z WARNING 0 x")
    assert sum(map(int, DROPPED.findall(found))) == queue.num_dropped
    queue.close()


def test_a_line_that_is_longer_than_the_queue_is_written(pipe: tuple[int, int]) -> None:
    queue = LineQueue(pipe[1], max_bytes=10)
    queue.put("a" * 100)
    assert read_lines(pipe[0], 1) == ["a" * 100]
    queue.close()


def test_a_reader_that_has_exited_ends_nothing() -> None:
    read, written = os.pipe()
    os.close(read)
    queue = LineQueue(written)
    queue.put("a")
    queue.close()
    assert queue.num_dropped == 1
    os.close(written)


def test_lines_of_a_child_process_are_passed_on_in_the_same_form(pipe: tuple[int, int]) -> None:
    read, written = os.pipe()
    handler = QueueHandler("json", "server", LineQueue(pipe[1]))
    handler.relay(read, "engine")
    own = json_line(record("own"), "engine")
    os.write(written, f"{own}\nE0000 from C\nloading 1%\rloading 2%\n".encode())
    os.close(written)
    lines = read_lines(pipe[0], 3)
    assert lines[0] == own
    assert [json.loads(line)["message"] for line in lines[1:]] == ["E0000 from C", "loading 2%"]
    assert {json.loads(line)["process"] for line in lines} == {"engine"}
    handler.close()


def test_all_libraries_and_warnings_use_it(capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:]
    with queued_log("json") as handler:
        assert installed_handler() is handler
        logging.getLogger("uvicorn.error").error("of uvicorn")
        logging.getLogger("jax._src").error("of JAX")
        logging.getLogger("grpc._cython").error("of gRPC")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn("of Python", stacklevel=1)
    assert logging.getLogger().handlers == before
    assert installed_handler() is None
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["logger"] for line in lines] == ["uvicorn.error", "jax._src", "grpc._cython", "py.warnings"]
    assert "of Python" in lines[3]["message"]


def test_a_process_that_ends_at_once_has_written_its_log() -> None:
    program = """
import logging, sys
from jaxserve.log_output import end_process, queued_log
with queued_log("text"):
    print("printed")
    for number in range(5000):
        logging.getLogger("jaxserve").error("line %d", number)
    end_process(70)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (70, "printed\n")
    assert [line.split()[-1] for line in ended.stderr.splitlines()] == [str(number) for number in range(5000)]


def test_stacks_name_threads_and_what_they_are_at() -> None:
    ends = threading.Event()

    def wait_for_the_end() -> None:
        ends.wait()

    waiting = threading.Thread(target=wait_for_the_end, name="one that waits")
    waiting.start()
    found = stacks_of_threads()
    ends.set()
    waiting.join()
    assert found.startswith("stacks of all threads:\n") and "MainThread:\n" in found
    assert ", in wait_for_the_end\n" in found.partition("one that waits:\n")[2]
    line = json.loads(json_line(record("%s", found), "rank 1"))
    assert line["message"] == found


def test_a_line_that_a_full_disk_has_torn_ends_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    written, room = bytearray(), [4]

    def write(descriptor: int, data: bytes) -> int:
        assert descriptor == 99
        taken = bytes(data)[: room[0]]
        room[0] -= len(taken)
        written.extend(taken)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(taken)

    monkeypatch.setattr(os, "write", write)
    queue = LineQueue(99)
    queue.put("abcdef")
    queue.put("lost")
    queue.close()
    assert (bytes(written), queue.num_dropped, queue.take_unreported()) == (b"abcd", 2, 2)
    room[0] = 100
    queue._write(b"whole\n")
    queue._write(b"another\n")
    assert bytes(written) == b"abcd\nwhole\nanother\n"
