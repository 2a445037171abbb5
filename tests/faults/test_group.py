"""An engine in two processes: whatever befalls one, all end soon and say whose fault it was, and none is left."""

import contextlib
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxserve.api.errors import JaxserveError
from jaxserve.client import AdminClient
from jaxserve.server.proto.jaxserve.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2
from scripts.server_child import RunningServer
from tests.faults.conftest import faulty_environment
from tests.faults.talk import wait_until
from tests.group_server import assert_gone, family, follower_pid, kill, post, running_group, text_of
from tests.hooks import injected

pytestmark = pytest.mark.slow
FLAGS = ("--tensor-parallel-size", "2", "--step-timeout", "5")
BODY = {"prompt": "12+30=", "temperature": 0.0, "max_tokens": 8}
STALLED_S = 15.0
"""The time limit of a step, and what its end may take: the stacks of all processes come first."""
SUSPENDED_S = 70.0
AFTERWARDS_S = 15.0
ENDED = "rank 1 of its processes ended, failed or is late"
SAID = {
    injected.FOLLOWER_FAILS: ["Traceback", "InjectedError", "the group ends: rank 1 (host "],
    injected.FOLLOWER_EXITS: ["ended with status 9", "the group ends: rank 1 (host ", "has ended"],
    injected.FOLLOWER_MISREADS: ["expected encoded step plans", "the group ends: rank 1 (host "],
    injected.FOLLOWER_DIVERGES: ["at step ", "plans or tokens differ from those of rank 0", " instead of "],
    injected.FOLLOWER_EXHAUSTS: ["MemoryError", "the group ends: rank 1 (host "],
    injected.FOLLOWER_STALLS: ["has not finished a step within step_timeout=5 s", "in faulty_collect"],
    injected.FOLLOWER_HANGS: ["has not finished a step within step_timeout=5 s", "in faulty_decode"],
}
"""What the log says of each fault that is switched on in a follower."""


def shared_files(pid: int) -> set[str]:
    """The files in shared memory that a process has mapped."""
    return set(re.findall(r"(?m) (/dev/shm/.*)$", Path(f"/proc/{pid}/maps").read_text()))


class Group:
    """A running group with switches for faults of its follower."""

    def __init__(self, server: RunningServer, switches: Path):
        self.server = server
        self.switches = switches
        self.processes = family(server.process.pid)
        self.shared_files = {file for pid in self.processes for file in shared_files(pid)}
        assert post(server, "/v1/completions", BODY)[1]["choices"][0]["text"] == "42"

    def ask(self, max_tokens: int = 200) -> Any:
        """Status and message of a request of many tokens."""
        status, response = post(self.server, "/v1/completions", {**BODY, "max_tokens": max_tokens, "ignore_eos": True})
        return status, response.get("error", {}).get("message", "")

    def ask_text(self) -> str:
        """Text of a request of many tokens."""
        status, response = post(self.server, "/v1/completions", {**BODY, "max_tokens": 200, "ignore_eos": True})
        assert status == 200, response
        return response["choices"][0]["text"]

    def ask_over_grpc(self, answers: list[Any]) -> None:
        """Ask again and again over gRPC; add the status and message of the first call that fails."""
        params = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        request = generation_pb2.GenerateRequest(text=BODY["prompt"], sampling_params=params)
        with grpc.insecure_channel(self.server.grpc) as channel:
            try:
                while True:
                    generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)
                answers.append((error.code(), error.details()))

    def ask_until_it_fails(self, answers: list[Any]) -> None:
        """Ask again and again; add the first answer that is no success, as one may end before a fault comes."""
        while (answer := self.ask())[0] == 200:
            pass
        answers.append(answer)

    @property
    def num_running(self) -> int:
        """Number of requests in steps."""
        return int(
            float(re.findall(r"(?m)^jaxserve:num_requests_running\S* (\S+)$", text_of(self.server, "/metrics"))[0])
        )

    def assert_ends(self, *said: str, within_s: float, status: int = 70) -> None:
        """All processes end, and the log says why."""
        assert_gone(self.processes[1:], within_s)
        assert self.server.wait() == status
        log = self.server.log.read_text()
        for text in said:
            assert text in log, log
        (port,) = re.findall(r"waiting for 1 processes at 127.0.0.1:(\d+)", log)
        assert not [file for file in self.shared_files if Path(file).exists()]
        for offset in (0, 1):  # the group's port and that of JAX's coordinator are free again
            socket.create_server(("127.0.0.1", int(port) + offset)).close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with running_group(*FLAGS, environment=faulty_environment(tmp_path)) as server:
        yield Group(server, tmp_path)


@pytest.fixture
def asking(group: Group) -> Iterator[list[Any]]:
    """The first failed answers over HTTP and gRPC of clients whose requests run, in slow steps, when a fault comes."""
    answers: list[Any] = []
    (group.switches / injected.PAUSE).write_text("0.03")
    asks = (group.ask_until_it_fails, group.ask_over_grpc)
    clients = [threading.Thread(target=ask, args=(answers,)) for ask in asks]
    for client in clients:
        client.start()
    while group.num_running < len(clients):
        time.sleep(0.05)
    yield answers
    for client in clients:
        client.join()
    assert {status for status, _ in answers} == {503, grpc.StatusCode.UNAVAILABLE}, answers
    assert len(answers) == 2 and all(ENDED in message for _, message in answers), answers


def test_a_killed_follower(group: Group, asking: list[Any]) -> None:
    kill(follower_pid(group.server))
    group.assert_ends("was killed by SIGKILL", "the group ends: rank 1 (host ", "has ended", within_s=5)


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_group_whose_machine_is_suspended(group: Group, is_busy: bool) -> None:
    """All its processes stop for longer than any limit, and go on where they were: nobody was slow."""
    expected, found = group.ask_text(), list[str]()
    client = threading.Thread(target=lambda: found.append(group.ask_text()))
    if is_busy:
        (group.switches / injected.PAUSE).write_text("0.03")
        client.start()
        while group.num_running < 1:
            time.sleep(0.05)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in group.processes:
            kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(SUSPENDED_S)
    if not is_busy:
        client.start()
    client.join()
    assert found == [expected]
    time.sleep(AFTERWARDS_S)  # for what would end the group only after a while
    assert group.ask_text() == expected and family(group.server.process.pid) == group.processes


def test_a_follower_killed_while_the_group_moves(group: Group, asking: list[Any]) -> None:
    """Whatever the move is at: compiling beside the steps, or moving weights."""

    def move() -> None:
        with AdminClient(group.server.admin) as admin, contextlib.suppress(JaxserveError):
            admin.reshard("stage=2")

    moving = threading.Thread(target=move)
    moving.start()
    kill(follower_pid(group.server))
    moving.join()
    group.assert_ends("was killed by SIGKILL", "the group ends: rank 1 (host ", within_s=5)


def test_a_stopped_follower(group: Group, asking: list[Any]) -> None:
    kill(follower_pid(group.server), signal.SIGSTOP)
    group.assert_ends("the group ends: rank 1 (host ", "does not answer: it is stopped", within_s=30)


@pytest.mark.parametrize("switch", SAID)
def test_a_follower_that_fails(group: Group, asking: list[Any], switch: str) -> None:
    (group.switches / switch).touch()
    group.assert_ends(*SAID[switch], within_s=5 + STALLED_S if "step_timeout" in SAID[switch][0] else 5)


def engine_pid(group: Group) -> int:
    """Process id of the engine of rank 0."""
    return next(pid for pid in group.processes if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_a_stopped_engine_of_rank_0(group: Group) -> None:
    """Its clients are told so, about when the follower gives up: either may be first."""
    answers: list[Any] = []
    (group.switches / injected.PAUSE).write_text("0.03")
    client = threading.Thread(target=group.ask_until_it_fails, args=(answers,))
    client.start()
    while not group.num_running:
        time.sleep(0.05)
    kill(engine_pid(group), signal.SIGSTOP)
    group.assert_ends("the group ends: process 0 has ", "it sent nothing for 15 s and was killed", within_s=40)
    client.join()
    assert answers[0][0] == 503 and "it sent nothing for 15 s and was killed" in answers[0][1], answers


def test_a_killed_engine_of_rank_0(group: Group) -> None:
    kill(engine_pid(group))
    group.assert_ends("it was killed by SIGKILL", "the group ends: process 0 has ended", within_s=10)


def test_a_killed_launcher(group: Group) -> None:
    kill(group.server.process.pid)
    assert_gone(group.processes[1:], within_s=15)


def test_a_signal_to_the_launcher_drains(group: Group) -> None:
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(group.ask(max_tokens=60)))
    client.start()
    while not group.num_running and not answers:
        time.sleep(0.01)
    group.server.process.send_signal(signal.SIGTERM)
    client.join()
    group.assert_ends(within_s=20, status=0)
    assert answers == [(200, "")]


def test_a_signal_to_a_follower_is_left_to_rank_0(group: Group) -> None:
    kill(follower_pid(group.server), signal.SIGTERM)
    assert group.ask()[0] == 200
    assert "this process ends when process 0 does" in group.server.log.read_text()


def answers_another_request(server: RunningServer) -> bool:
    """Whether a request is answered that was not running at an end before, after two of which it would be refused."""
    assert server.process.poll() is None
    return post(server, "/v1/completions", {**BODY, "seed": time.monotonic_ns() >> 10})[0] == 200


def kept_programs(folder: Path) -> dict[Path, int]:
    """The programs that processes have compiled and kept, and when each was written."""
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*-cache")}


def test_a_group_that_is_started_again(tmp_path: Path) -> None:
    """It compiles nothing then."""
    programs = tmp_path / "programs"
    flags = ("--restart-engine", "--compilation-cache-dir", str(programs))
    with running_group(*FLAGS, *flags, environment=faulty_environment(tmp_path)) as server:
        group = Group(server, tmp_path)
        compiled = kept_programs(programs)
        assert {file.parent.name for file in compiled} == {"process-0-of-2", "process-1-of-2"}
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            kill(follower_pid(server), number)
            wait_until(lambda: answers_another_request(server), "the group answers again", 120.0)
        processes = family(server.process.pid)
        assert group.ask()[0] == 200 and len(processes) == len(group.processes)
        assert kept_programs(programs) == compiled
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert_gone([*processes[1:], *group.processes[1:]], within_s=5)
