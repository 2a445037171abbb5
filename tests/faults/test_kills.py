"""``kill -9`` of a server's helpers, and of an engine that starts: the next request, or the next start, is whole."""

import os
import signal
import time
from pathlib import Path

import pytest

from scripts.server_child import RunningServer, children_of
from tests.faults.conftest import faulty_environment
from tests.faults.talk import assert_serves, post, wait_until
from tests.faults.test_death import starting_server
from tests.hooks import injected
from tests.server_process import running_server

CHAT = {"messages": [{"role": "user", "content": "What is 12+30?"}], "temperature": 0, "max_tokens": 8}
CHOICE = {"prompt": "1+1=", "structured_outputs": {"regex": "[ab]+c"}, "max_tokens": 8}


def helpers(pid: int) -> set[int]:
    """Children of a process other than an engine."""
    return {child for child in children_of(pid) if b"engine_process" not in Path(f"/proc/{child}/cmdline").read_bytes()}


def kill_all(pids: set[int]) -> None:
    """Kill processes, which their parents have not noticed yet."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_killed_helpers_are_replaced(server: RunningServer) -> None:
    """Processes that render templates, and those that try grammars: at most what they worked on fails."""
    front_end, engine = server.process.pid, server.engine_pid
    before = post(server, "/v1/chat/completions", **CHAT)
    structured = post(server, **CHOICE)
    assert (before.status_code, structured.status_code) == (200, 200), structured.text
    assert helpers(front_end), "no process renders"
    for _ in range(2):
        killed = helpers(front_end) | helpers(engine)
        kill_all(killed)
        for path, body, expected in (("/v1/chat/completions", CHAT, before), ("/v1/completions", CHOICE, structured)):
            answers = [post(server, path, **body)]
            while answers[-1].status_code != 200 and len(answers) <= len(killed):
                assert "error" in answers[-1].json()  # it was given to a process before its end was noticed
                answers.append(post(server, path, **body))
            answer = answers[-1]
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0] | {"text": ""} == expected.json()["choices"][0] | {"text": ""}
    assert (server.process.pid, server.engine_pid) == (front_end, engine)


@pytest.mark.slow
def test_a_start_after_one_that_was_killed_while_it_compiled(tmp_path: Path) -> None:
    """What the killed engine left in the folder of programs is whole, or replaced."""
    programs, log = tmp_path / "programs", tmp_path / "log"
    with starting_server(tmp_path, "--uds", str(tmp_path / "http"), "--compilation-cache-dir", str(programs)) as killed:
        (tmp_path / injected.START_HANGS).unlink()
        limit = time.monotonic() + 300
        while not any(programs.glob("**/*-cache")) and time.monotonic() < limit:
            time.sleep(0.001)
        os.kill(killed.engine_pid, signal.SIGKILL)
        assert killed.wait() != 0
    assert log.read_text().count("Traceback") == 0
    for _ in range(2):
        with running_server(
            "--compilation-cache-dir", str(programs), environment=faulty_environment(tmp_path)
        ) as server:
            assert_serves(server)
            wait_until(lambda: "Traceback" not in server.log.read_text(), "nothing has failed")
