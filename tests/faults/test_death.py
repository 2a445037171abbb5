"""What ends an engine or a server, and what those who wait are told (failure list 13, 16, 19 to 21, 26)."""

import concurrent.futures
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.client import AdminClient
from jaxserve.server.main import EXIT_ENGINE_DEAD
from scripts.server_child import RunningServer
from tests.faults.conftest import faulty_environment
from tests.faults.talk import LONG, assert_serves, post, stream, text
from tests.server_process import running_server

LOOPBACK = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1, as /proc/net writes them."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def is_alive(process_id: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except FileNotFoundError:
        return False


def assert_ended(process_id: int, limit_s: float = 20.0) -> None:
    """Waits for a process to end."""
    until_s = time.monotonic() + limit_s
    while is_alive(process_id):
        assert time.monotonic() < until_s, f"process {process_id} still runs"
        time.sleep(0.05)


def health(server: RunningServer, service: str = "jaxserve.v1.GenerationService") -> int:
    """What gRPC's health service says."""
    with grpc.insecure_channel(server.grpc) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return stub.Check(request, timeout=10).status


def test_a_killed_engine_fails_all_at_once_and_ends_the_server() -> None:
    """Failure list 19: HTTP stream and unary, gRPC health, exit status."""
    with running_server() as server:
        assert health(server) == SERVING
        assert httpx2.get(server.http + "/health").status_code == 200
        with concurrent.futures.ThreadPoolExecutor(1) as pool, stream(server, prompt="1+1=", **LONG) as events:
            next(events)
            unary = pool.submit(post, server, prompt="1+1=", **LONG)
            time.sleep(0.2)
            os.kill(server.engine_pid, signal.SIGKILL)
            began = time.monotonic()
            last = list(events)[-1]
            assert last["error"]["code"] == 503
            assert unary.result().status_code == 503
            assert time.monotonic() - began < 10
            assert httpx2.get(server.http + "/health").status_code == 503
        assert server.wait() == EXIT_ENGINE_DEAD
        assert "engine process ended" in server.log.read_text()


def test_an_engine_is_started_again_where_that_was_asked_for() -> None:
    """Failure list 19 with ``--restart-engine``."""
    with running_server("--restart-engine") as server:
        first = server.engine_pid
        os.kill(first, signal.SIGKILL)
        assert_ended(first)
        time.sleep(1)  # until the front end has noticed
        until_s = time.monotonic() + 120
        while httpx2.get(server.http + "/health", timeout=10).status_code != 200:
            assert time.monotonic() < until_s
            time.sleep(0.2)
        assert server.engine_pid != first
        assert_serves(server)
        assert health(server) == SERVING


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


def test_sigterm_lets_requests_end_and_takes_no_more() -> None:
    """Failure list 20: NOT_SERVING first, exit status 0."""
    with running_server("--shutdown-timeout", "60") as server:
        with stream(server, prompt="1+1=", **LONG) as events:
            next(events)
            server.process.send_signal(signal.SIGTERM)
            until_s = time.monotonic() + 10
            while httpx2.get(server.http + "/health").status_code == 200:
                assert time.monotonic() < until_s
            refused = post(server, prompt="1+1=")
            assert refused.status_code == 503
            assert "Retry-After" in refused.headers
            finishes = [event["choices"][0].get("finish_reason") for event in events if event.get("choices")]
            assert finishes[-1] == "length"
        assert server.wait() == 0


def test_a_second_sigterm_is_immediate_and_a_grace_ends() -> None:
    """Failure list 20: requests that are cut say so."""
    with running_server(
        "--shutdown-timeout", "600", "--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20)
    ) as server:
        with stream(server, prompt="1+1=", ignore_eos=True, max_tokens=480, n=4, temperature=1) as events:
            next(events)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            rest = list(events)
        assert server.wait(30) == 0
        assert rest[-1].get("error") or rest[-1]["choices"][0]["finish_reason"] == "abort"


def test_sigterm_behind_a_drain_cuts_nothing() -> None:
    """Failure list 20: a hook drains, then the orchestrator sends its signal."""
    with running_server() as server:
        with stream(server, prompt="1+1=", **LONG) as events:
            next(events)
            with AdminClient(server.admin) as admin:
                admin.drain(timeout_s=60.0)
            server.process.send_signal(signal.SIGTERM)
            finishes = [event["choices"][0].get("finish_reason") for event in events if event.get("choices")]
        assert finishes[-1] == "length"
        assert server.wait(30) == 0


def test_a_drain_by_the_admin_service() -> None:
    """Failure list 20 by another door."""
    with running_server() as server:
        assert_serves(server)
        with AdminClient(server.admin) as admin:
            admin.drain(timeout_s=5.0)
        assert server.wait(30) == 0


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
    repository = Path(__file__).resolve().parent.parent.parent
    command = [
        "grep",
        "-rnE",
        r"time\.time\(\)|datetime\.now|utcnow",
        "jaxserve/server",
        "jaxserve/engine",
        "jaxserve/client",
    ]
    found = subprocess.run([*command, "--include=*.py"], cwd=repository, capture_output=True, text=True).stdout
    allowed = ("created", "started", "start_time")
    assert [line for line in found.splitlines() if not any(word in line for word in allowed)] == []


def test_texts_are_right_before_and_after_everything(server: RunningServer) -> None:
    assert text(server, "reverse moon:") == " noom"
