"""Servers that are told to end: what runs may go on, for so long (failure list 20)."""

import contextlib
import os
import signal
import time
from pathlib import Path

from jaxserve.client import AdminClient
from tests.faults.conftest import faulty_environment
from tests.faults.kinds import FAILED, WHOLE, assert_takes_no_requests, in_flight
from tests.faults.steps import closed_gate, slow_steps
from tests.faults.talk import assert_serves
from tests.server_process import running_server


def test_sigterm_lets_requests_end_and_takes_no_more(tmp_path: Path) -> None:
    """Failure list 20: NOT_SERVING first, whole answers on both surfaces, exit status 0."""
    with running_server("--shutdown-timeout", "600", environment=faulty_environment(tmp_path)) as server:
        with contextlib.ExitStack() as stack:
            gate = stack.enter_context(closed_gate(server, tmp_path))
            ends = stack.enter_context(in_flight(server, 24))
            gate.let_through(4)
            server.process.send_signal(signal.SIGTERM)
            assert_takes_no_requests(server, "shutting down")
            gate.let_through(4)
            assert server.process.poll() is None
            gate.open()
            assert ends() == WHOLE
        assert server.wait() == 0


def test_requests_that_a_grace_is_too_short_for_are_cut(tmp_path: Path) -> None:
    """Failure list 20: they say so, and the exit status is 0 all the same."""
    with running_server("--shutdown-timeout", "1", environment=faulty_environment(tmp_path)) as server:
        with slow_steps(tmp_path, 0.1), in_flight(server, 200) as ends:
            server.process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            assert ends() == FAILED
            assert server.wait() == 0
            assert time.monotonic() - began_s >= 1


def test_a_second_sigterm_is_immediate(tmp_path: Path) -> None:
    """Failure list 20: whatever the grace is."""
    with running_server("--shutdown-timeout", "600", environment=faulty_environment(tmp_path)) as server:
        with slow_steps(tmp_path, 0.1), in_flight(server, 200) as ends:
            server.process.send_signal(signal.SIGTERM)
            assert_takes_no_requests(server, "shutting down")
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            assert ends() == FAILED
            assert server.wait() == 0


def test_a_second_sigterm_is_immediate_though_the_engine_hangs(tmp_path: Path) -> None:
    """Failure list 20: whether requests run when it comes, or the server waits for the engine alone."""
    flags = ("--shutdown-timeout", "600", "--watchdog-timeout", "0")
    with running_server(*flags, environment=faulty_environment(tmp_path)) as server:
        engine_pid = server.engine_pid
        with slow_steps(tmp_path, 0.1), in_flight(server, 200) as ends:
            os.kill(engine_pid, signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            assert_takes_no_requests(server, "shutting down")
            server.process.send_signal(signal.SIGINT)
            assert ends() == FAILED
            assert server.wait(5.0) == 0
        assert not Path(f"/proc/{engine_pid}").exists()
    with running_server(*flags) as server:
        engine_pid = server.engine_pid
        os.kill(engine_pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1.5)  # it has nothing to drain, and waits for the engine
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(5.0) == 0
        assert not Path(f"/proc/{engine_pid}").exists()


def test_sigterm_behind_a_drain_cuts_nothing(tmp_path: Path) -> None:
    """Failure list 20: a hook drains, then the orchestrator sends its signal."""
    with running_server("--shutdown-timeout", "0", environment=faulty_environment(tmp_path)) as server:
        with closed_gate(server, tmp_path) as gate, in_flight(server, 24) as ends:
            gate.let_through(4)
            with AdminClient(server.admin) as admin:
                admin.drain(timeout_s=600.0)
            server.process.send_signal(signal.SIGTERM)
            assert_takes_no_requests(server, "shutting down")
            gate.let_through(4)
            gate.open()
            assert ends() == WHOLE
        assert server.wait() == 0


def test_a_drain_by_the_admin_service() -> None:
    """Failure list 20 by another door."""
    with running_server() as server:
        assert_serves(server)
        with AdminClient(server.admin) as admin:
            admin.drain(timeout_s=5.0)
        assert server.wait() == 0
