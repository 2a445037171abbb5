"""Clocks that stop or jump, and processes that stand still: nothing ends or waits that should not."""

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from scripts.server_child import RunningServer
from tests.faults.conftest import faulty_environment
from tests.faults.steps import slow_steps
from tests.faults.talk import LONG, health, wait_until
from tests.hooks import injected
from tests.server_process import running_server

pytestmark = pytest.mark.slow

DAY_S = 86_400
WATCHDOG_S = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The switches of the server."""
    return tmp_path_factory.mktemp("clocks")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """A server with keys, one of which expires in an hour, and a short watchdog."""
    keys, expires = folder / "keys.yaml", datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    other = "{name: other, key: other, scopes: [metrics]}"
    keys.write_text(f"[{{name: guest, key: guest, expires: '{expires.isoformat()}'}}, {other}]")
    flags = ("--auth-file", str(keys), "--watchdog-timeout", str(WATCHDOG_S), "--stall-timeout", "30")
    with running_server(*flags, environment=faulty_environment(folder)) as found:
        yield found


@contextlib.contextmanager
def guest(server: RunningServer) -> Iterator[httpx2.Client]:
    """A client with the key that expires."""
    headers = {"authorization": "Bearer guest"}
    with httpx2.Client(base_url=server.http, timeout=120, headers=headers) as client:
        yield client


@contextlib.contextmanager
def streamed(client: httpx2.Client, **body: Any) -> Iterator[Iterator[str]]:
    """Lines of a stream that goes on."""
    whole = {**LONG, "prompt": "1+1=", "stream": True, **body}
    with client.stream("POST", "/v1/completions", json=whole) as answer:
        assert answer.status_code == 200, answer.read()
        yield (line for line in answer.iter_lines() if line)


@pytest.mark.parametrize("clock", ["stopped", str(DAY_S), str(-DAY_S)])
def test_a_wrong_time_of_day_ends_and_delays_nothing(server: RunningServer, folder: Path, clock: str) -> None:
    """Requests in flight go on, new ones are taken, no key expires, and no age is negative."""
    switch = folder / injected.CLOCK
    try:
        with guest(server) as client, slow_steps(folder, 0.02), streamed(client, max_tokens=60, timeout=60) as lines:
            assert next(lines).startswith("data: {")
            switch.write_text(clock)
            assert "[DONE]" in "".join(lines)
            began_s = time.monotonic()
            answer = client.post("/v1/completions", json={"prompt": "12+30=", "temperature": 0, "timeout": 60})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"].startswith("42")
            assert abs(answer.json()["created"] - time.time()) > DAY_S / 2 or clock == "stopped", "no fault was there"
            report = httpx2.get(server.http + "/status.json", headers={"authorization": "Bearer other"}).json()
            assert 0 <= report["uptime_s"] < DAY_S / 2 + time.monotonic() - began_s
    finally:
        switch.unlink(missing_ok=True)


def test_processes_that_stood_still_go_on(server: RunningServer, folder: Path) -> None:
    """Like a machine that was paused for longer than the watchdog's time, in the middle of a step."""
    pids = (server.process.pid, server.engine_pid)
    with guest(server) as client, slow_steps(folder, 0.5), streamed(client, max_tokens=8) as lines:
        assert next(lines).startswith("data: {")
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(2 * WATCHDOG_S)
        finally:
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)
        assert "[DONE]" in "".join(lines)
        assert client.get("/health").status_code == 200
    assert server.engine_pid == pids[1]


def test_an_engine_whose_threads_cannot_run_is_killed_after_its_stacks(tmp_path: Path) -> None:
    """A step that never gives Python back: only C can tell where it is."""
    with running_server("--watchdog-timeout", str(WATCHDOG_S), environment=faulty_environment(tmp_path)) as found:
        wait_until(lambda: health(found) == 1, "it serves")
        (tmp_path / injected.STEP_HOLDS_LOCK).touch()
        answer = httpx2.post(found.http + "/v1/completions", json={"prompt": "1+1="}, timeout=120)
        assert answer.status_code == 503
        found.wait()
        log = found.log.read_text()
    assert "the engine process sends nothing; it is killed" in log
    assert "in faulty" in log, "no stack of the hung step"
