"""What ends an engine or a server, and what those who wait are told (failure list 13, 16, 19, 21, 26)."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from scripts.server_child import REPOSITORY, RunningServer
from tests.faults.conftest import faulty_environment
from tests.faults.kinds import (
    FAILED,
    NOT_SERVING,
    SERVING,
    assert_grpc_takes_no_requests,
    assert_takes_no_requests,
    in_flight,
)
from tests.faults.steps import closed_gate
from tests.faults.talk import LONG, assert_serves, health, post, stream, text, wait_until
from tests.hooks import EXIT_ENGINE_DEAD, FOLDERS_WITH_TIMERS, injected
from tests.server_process import running_server

LOOPBACK = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1, as /proc/net writes them."""


def is_alive(process_id: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except FileNotFoundError:
        return False


def assert_ended(process_id: int, limit_s: float = 20.0) -> None:
    """Waits for a process to end."""
    wait_until(lambda: not is_alive(process_id), f"process {process_id} has ended", limit_s)


def test_a_killed_engine_fails_all_at_once_and_ends_the_server(tmp_path: Path) -> None:
    """Failure list 19: every kind of request, and the exit status."""
    with running_server(environment=faulty_environment(tmp_path)) as server:
        assert health(server) == SERVING
        assert httpx2.get(server.http + "/health").status_code == 200
        with closed_gate(server, tmp_path) as gate, in_flight(server, 200) as ends:
            gate.let_through(4)
            os.kill(server.engine_pid, signal.SIGKILL)
            began = time.monotonic()
            assert ends() == FAILED
            assert time.monotonic() - began < 10
        assert server.wait() == EXIT_ENGINE_DEAD
        assert "engine process ended" in server.log.read_text()


def test_an_engine_is_started_again_where_that_was_asked_for(tmp_path: Path) -> None:
    """Failure list 19 with ``--restart-engine``: until it is ready, requests are told to come back."""
    with running_server("--restart-engine", environment=faulty_environment(tmp_path)) as server:
        (tmp_path / injected.START_HANGS).touch()
        first = server.engine_pid
        os.kill(first, signal.SIGKILL)
        assert_ended(first)
        assert_takes_no_requests(server, "the engine ")  # has ended, or is starting
        (tmp_path / injected.START_HANGS).unlink()
        wait_until(lambda: httpx2.get(server.http + "/health", timeout=60).status_code == 200, "it is ready", 120)
        assert server.engine_pid != first
        assert_serves(server)
        assert health(server) == SERVING


@contextlib.contextmanager
def starting_server(folder: Path, *flags: str) -> Iterator[RunningServer]:
    """A server that listens, and whose engine does not get ready; with gRPC's address alone."""
    (folder / injected.START_HANGS).touch()
    command = [sys.executable, "-m", "jaxserve", "serve", "--grpc-port", "0", "--admin-port", "-1", *flags]
    environment = {**os.environ, **faulty_environment(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        pids = {str(process.pid)}
        wait_until(lambda: bool(listening_addresses(pids)), "it listens")
        (address,) = listening_addresses(pids)
        yield RunningServer(process, "", f"127.0.0.1:{address.rpartition(':')[2]}", "", folder / "log")
    finally:
        process.kill()
        process.wait()


def test_a_server_that_starts_takes_no_requests_yet(tmp_path: Path) -> None:
    """Failure list 19: its listeners are there before the engine is ready; told to end meanwhile, it ends."""
    path = tmp_path / "http"
    with starting_server(tmp_path, "--uds", str(path)) as server:
        assert_grpc_takes_no_requests(server, "the engine is starting")
        assert health(server) == NOT_SERVING
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://x", timeout=60) as client:
            assert client.get("/health").status_code == 503
            assert client.post("/v1/completions", json={"prompt": "1+1="}).status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize("flags", [(), ("--restart-engine",)], ids=["plain", "restart"])
def test_an_engine_that_is_killed_while_it_starts_is_no_wrong_setting(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Failure list 19: the exit status is that of a dead engine."""
    with starting_server(tmp_path, "--uds", str(tmp_path / "http"), *flags) as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        wait_until(lambda: bool(children.read_text()), "it starts the engine")
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.wait() == EXIT_ENGINE_DEAD
        log = server.log.read_text()
        assert "the engine process ended while it started: it was killed by SIGKILL" in log
        assert "Traceback" not in log


def test_a_failing_step_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    """Failure list 13: an error of the device is nobody's request's."""
    with running_server(environment=faulty_environment(tmp_path)) as server:
        assert_serves(server)
        (tmp_path / "step-fails").touch()
        assert post(server, prompt="1+1=").status_code == 503
        assert server.wait() == EXIT_ENGINE_DEAD
        assert "InjectedError" in server.log.read_text()


def test_a_hung_step_is_found_and_its_stacks_written_down(tmp_path: Path) -> None:
    """Failure list 16 and 21: the watchdog."""
    with running_server("--watchdog-timeout", "3", environment=faulty_environment(tmp_path)) as server:
        assert_serves(server)
        time.sleep(4)  # an idle server is no hung one
        assert_serves(server)
        (tmp_path / "step-hangs").touch()
        answer = post(server, prompt="1+1=")
        assert answer.status_code == 503
        assert server.wait() == EXIT_ENGINE_DEAD
        log = server.log.read_text()
        assert "in faulty" in log, "no stack of the hung step"


def test_a_stopped_engine_is_found(tmp_path: Path) -> None:
    """Failure list 16: a process that does not even run cannot watch itself."""
    with running_server("--watchdog-timeout", "3") as server:
        process_id = server.engine_pid
        os.kill(process_id, signal.SIGSTOP)
        assert post(server, prompt="1+1=").status_code == 503
        assert server.wait() == EXIT_ENGINE_DEAD
        assert_ended(process_id)


def test_an_engine_does_not_outlive_its_front_end() -> None:
    """Failure list 19, the other way."""
    with running_server() as server:
        process_id = server.engine_pid
        with stream(server, prompt="1+1=", **LONG) as events:
            next(events)
            server.process.kill()
            with pytest.raises(httpx2.HTTPError):
                list(events)
        server.wait()
        assert_ended(process_id)


def test_sockets_are_of_this_machine_alone() -> None:
    """What listens, and where: nothing but loopback, and nothing that nobody asked for."""
    with running_server() as server:
        pids = {str(server.process.pid), str(server.engine_pid)}
        listening = listening_addresses(pids)
        assert {address.rpartition(":")[2] for address in listening} == {
            address.rpartition(":")[2] for address in (server.http, server.grpc, server.admin)
        }
        assert all(address.startswith(LOOPBACK) for address in raw_addresses(pids))


def raw_addresses(process_ids: set[str]) -> list[str]:
    """Local addresses, as in /proc/net, of the processes' listening TCP sockets."""
    inodes: set[str] = set()
    for process_id in process_ids:
        for link in Path(f"/proc/{process_id}/fd").iterdir():
            try:
                target = os.readlink(link)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1])
    return found


def listening_addresses(process_ids: set[str]) -> list[str]:
    """The same with ports as numbers."""
    return [f"{one.rpartition(':')[0]}:{int(one.rpartition(':')[2], 16)}" for one in raw_addresses(process_ids)]


def test_a_clock_that_jumps_changes_no_timer() -> None:
    """Failure list 26: nothing that waits or times out reads the time of day."""
    command = ["grep", "-rnE", r"time\.time\(\)|datetime\.now|utcnow", *FOLDERS_WITH_TIMERS, "--include=*.py"]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout
    allowed = ("created", "started", "start_time", "arrival_time")  # reported, never waited for
    assert [line for line in found.splitlines() if not any(word in line for word in allowed)] == []


def test_texts_are_right_before_and_after_everything(server: RunningServer) -> None:
    assert text(server, "reverse moon:") == " noom"
