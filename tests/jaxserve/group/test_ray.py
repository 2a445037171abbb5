"""A group whose processes actors of a Ray cluster start, on this machine alone."""

import argparse
import contextlib
import importlib
import importlib.util
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.api.errors import ConfigError
from jaxserve.group import ray_cluster, settings
from jaxserve.group.settings import GroupConfig
from jaxserve.server import command
from tests.free_ports import free_ports
from tests.group_server import (
    answers,
    assert_gone,
    assert_same,
    expected_answers,
    family,
    grpc_answers,
    kill,
    post,
    text_of,
)
from tests.launched_server import ENGINE, started, when_ready

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")
ON_RAY = ("--distributed-executor-backend", "ray", "--nnodes", "2", *ENGINE)
FLAGS = (*ON_RAY, "--tensor-parallel-size", "4", "--dtype", "float32")
GROUPS = (*ON_RAY, "--data-parallel-size", "2")
BODY = {"prompt": "12+30=", "temperature": 0.0, "max_tokens": 8}
START_S = 600.0
LAST_WORDS_S = 90.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, str]]]:
    """The process of a cluster's head at 127.0.0.1, and the environment of its users."""
    port = free_ports()
    environment = {
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes the machine's own address in place of 127.0.0.1
    }
    folder = Path("/tmp") / f"ray-{os.getpid()}"  # Ray's sockets need a short path
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)]
    command += ["--node-ip-address", "127.0.0.1", "--include-dashboard=false", "--num-cpus", "4"]
    command += ["--object-store-memory", str(100 << 20), "--temp-dir", str(folder)]
    log = tmp_path_factory.mktemp("ray") / "log"

    def start() -> "subprocess.Popen[bytes]":
        with log.open("wb") as output:
            return subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)

    head = start()
    try:
        until_s = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < until_s, log.read_text()
            if head.poll() is not None:
                assert "The current node timed out during startup" in log.read_text(), log.read_text()
                head = start()  # Ray gives itself 30 seconds, which a busy machine exceeds
            time.sleep(0.2)
        yield head.pid, environment
    finally:
        processes = family(head.pid)
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(60)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        head.wait()
    assert_gone(processes, within_s=30)


def members(head: int) -> list[int]:
    """The processes of the group, in the order of their ranks: children of the cluster's actors."""
    found = dict[int, int]()
    for pid in family(head):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            if (rank := re.search(rb"--node-rank=(\d)", Path(f"/proc/{pid}/cmdline").read_bytes())) is not None:
                found[int(rank[1])] = pid
    return [found[rank] for rank in sorted(found)]


def address_of(digits: str) -> str:
    """An address in /proc/net, whose words of 4 bytes are in the order of this machine."""
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def dialled(pids: list[int]) -> set[str]:
    """The addresses to which processes are connected."""
    inodes = set[str]()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
            except OSError:  # closed just now
                continue
    found = set[str]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address = words[2].partition(":")[0]
            if words[9] in inodes and int(address, 16):
                found.add(address_of(address))
    return found


@needs_ray
@pytest.mark.slow
def test_two_actors_answer_as_one_process(cluster: tuple[int, dict[str, str]], tmp_path: Path) -> None:
    """Nothing but this machine is dialled; SIGTERM drains; no process, actor or placement group is left."""
    head, environment = cluster
    log = tmp_path / "log"
    with started((), log, *FLAGS, environment=environment) as process:
        server = when_ready(process, log)
        found, over_grpc = answers(server), grpc_answers(server)
        assert {*dialled([*family(process.pid), *family(head)])} <= {"127.0.0.1", "::1"}
        assert all(b"OMP_NUM_THREADS=1\0" not in Path(f"/proc/{pid}/environ").read_bytes() for pid in members(head))
        processes = [pid for each in members(head) for pid in family(each)]
        assert len(members(head)) == 2
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"}
        with LLM("demo", tensor_parallel_size=4, **settings) as llm:
            expected = expected_answers(llm)
        assert_same(found, expected)
        assert_same(over_grpc, expected)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LAST_WORDS_S) == 0, log.read_text()
        assert_gone(processes, within_s=10)


@needs_ray
@pytest.mark.slow
def test_each_actor_is_a_group(cluster: tuple[int, dict[str, str]], tmp_path: Path) -> None:
    """With replicas, process 0 serves for both groups; SIGTERM drains, and leaves nothing."""
    head, environment = cluster
    log = tmp_path / "log"
    with started((), log, *GROUPS, environment=environment) as process:
        server = when_ready(process, log)
        found, over_grpc = answers(server), grpc_answers(server)
        assert text_of(server, "/metrics").count("jaxserve:group_up{") == 2
        processes = [pid for each in members(head) for pid in family(each)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LAST_WORDS_S) == 0, log.read_text()
        assert_gone(processes, within_s=10)
    with LLM("demo", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256) as llm:
        expected = expected_answers(llm)
    assert_same(found, expected)
    assert_same(over_grpc, expected)


@needs_ray
@pytest.mark.slow
def test_a_gang_that_is_made_again(cluster: tuple[int, dict[str, str]], tmp_path: Path) -> None:
    """A killed follower ends all; all are started again, and answer. Without a restart, the status is 70."""
    head, environment = cluster
    for flag, is_last in (("--restart-engine", False), ("--no-restart-engine", True)):
        log = tmp_path / f"log{flag}"
        with started((), log, *FLAGS, flag, environment=environment) as process:
            when_ready(process, log)
            first = members(head)
            kill(first[1])
            if is_last:
                assert process.wait(LAST_WORDS_S) == 70, log.read_text()
                assert "the group ends: rank 1 (host " in log.read_text(), log.read_text()
                assert_gone(first, within_s=5)
                continue
            until_s = time.monotonic() + START_S
            while log.read_text().count("jaxserve ready") < 2:
                assert process.poll() is None and time.monotonic() < until_s, log.read_text()
                time.sleep(0.2)
            assert_gone(first, within_s=5)
            ready = re.findall(r"jaxserve ready: http=(\S+)", log.read_text())
            server = when_ready(process, log)
            server.http = ready[-1]
            assert post(server, "/v1/completions", BODY)[1]["choices"][0]["text"] == "42"


@needs_ray
@pytest.mark.slow
def test_a_cluster_without_room(cluster: tuple[int, dict[str, str]], tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("--distributed-executor-backend", "ray", "--nnodes", "5", "--join-timeout", "3")
    with started((), log, *flags, environment=cluster[1]) as process:
        assert process.wait(LAST_WORDS_S) == 2
    assert "the Ray cluster has no room for 5 processes" in log.read_text() and "Traceback" not in log.read_text()


@needs_ray
@pytest.mark.slow
def test_the_end_of_one_group_leaves_the_others(cluster: tuple[int, dict[str, str]], tmp_path: Path) -> None:
    """Its actor starts its process again; without a restart, the others serve until process 0 ends."""
    head, environment = cluster
    for flag, is_last in (("--restart-engine", False), ("--no-restart-engine", True)):
        log = tmp_path / f"log{flag}"
        with started((), log, *GROUPS, flag, environment=environment) as process:
            server = when_ready(process, log)
            first = members(head)
            for pid in family(first[1]):
                kill(pid)
            assert_gone(first[1:], within_s=5)
            until_s = time.monotonic() + START_S
            last_words = "group 1: the engine process ended" if is_last else "group 1: the engine process was started"
            while last_words not in log.read_text():
                assert process.poll() is None and time.monotonic() < until_s, log.read_text()
                assert post(server, "/v1/completions", BODY)[0] in (200, 503)
            assert post(server, "/v1/completions", BODY)[1]["choices"][0]["text"] == "42"
            assert members(head)[0] == first[0] and len(members(head)) == (1 if is_last else 2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LAST_WORDS_S) == 0, log.read_text()


class FakeRay:
    """A Ray whose cluster is at one address, or is not there."""

    def __init__(self, address: str | None):
        self._address = address

    def init(self, **_: Any) -> None:
        """Connect."""
        if self._address is None:
            raise ConnectionError("none")

    def nodes(self) -> list[dict[str, Any]]:
        """The one node."""
        return [{"NodeManagerAddress": self._address, "Alive": True}]

    def shutdown(self) -> None:
        """Disconnect."""

    def cluster_resources(self) -> dict[str, float]:
        """It has no GPU."""
        return {}

    def get(self, results: Any, timeout: float) -> Any:
        """Results, which are there."""
        return results

    exceptions = types.SimpleNamespace(RayError=LookupError)


def test_ray_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=r"requires the package ray >= 2.54: pip install 'jaxserve\[ray\]'"):
        ray_cluster._connected()
    monkeypatch.setattr(importlib, "import_module", lambda name: FakeRay(None))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="no Ray cluster at 10.0.0.1:6379: start one with ray start"):
        ray_cluster._connected()


def test_a_cluster_that_asks_for_no_token_is_for_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(importlib, "import_module", lambda name: FakeRay("10.0.0.1"))
    with pytest.raises(
        ConfigError, match="other machines can reach the Ray cluster at 10.0.0.1, and it asks them for no"
    ):
        ray_cluster._connected()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    ray_cluster._connected()
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(importlib, "import_module", lambda name: FakeRay("127.0.0.1"))
    ray_cluster._connected()


class FakeMethod:
    """A method of an actor, whose results are there at once."""

    def __init__(self, call: Callable[..., Any]):
        self.remote = call


class FakeActor:
    """An actor whose processes end as they are told.

    Attributes:
        started: The commands of its processes.

    Args:
        statuses: Of each process, what the polls of it give; the last one stays.
    """

    def __init__(self, *statuses: list[int | None]):
        self.started: list[list[str]] = []
        self._statuses = [list(each) for each in statuses]
        self.start = FakeMethod(lambda *given: self.started.append(json.loads(given[-1])))
        self.poll = FakeMethod(self._poll)
        self.send_signal = FakeMethod(lambda number: None)

    def _poll(self) -> str:
        statuses = self._statuses[len(self.started) - 1]
        return json.dumps([statuses.pop(0) if len(statuses) > 1 else statuses[0], []])


def ended_gang(monkeypatch: pytest.MonkeyPatch, flags: Sequence[str], restarts: bool, *actors: FakeActor) -> int:
    """The status of a gang of these actors."""
    fake: Any = FakeRay("127.0.0.1")
    monkeypatch.setattr(ray_cluster, "_connected", lambda: fake)
    monkeypatch.setattr(ray_cluster, "_POLL_S", 0.0)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = ["demo", "--nnodes", str(len(actors)), "--distributed-executor-backend", "ray", *flags]
    arguments, _, group = command.serve_arguments(parser.parse_args(given))
    launcher = ray_cluster.RayLauncher(["serve", *given], group, arguments, restarts, may_leave=False)
    return ray_cluster._Gang(fake, actors, launcher).run("127.0.0.1:1")


def test_processes_of_one_group_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for restarts in (False, True):  # all are made again by the launcher, which makes another gang
        actors = FakeActor([None, None, None, 70]), FakeActor([None, -9])
        assert ended_gang(monkeypatch, ["--tensor-parallel-size", "2"], restarts, *actors) == 70
        assert [[each[-1] for each in actor.started] for actor in actors] == [["--no-restart-engine"]] * 2


def test_processes_of_several_groups_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a restart, each is started again until process 0 ends; not one whose settings are wrong."""
    flags = ["--data-parallel-size", "3"]
    actors = FakeActor([None] * 6 + [0]), FakeActor([None, -9], [None, 70], [None, None, 0]), FakeActor([None, 2])
    assert ended_gang(monkeypatch, flags, True, *actors) == 0
    assert [len(actor.started) for actor in actors] == [1, 3, 1]
    assert [actor.started[0][-1] for actor in actors] == ["--restart-engine", *["--no-restart-engine"] * 2]
    actors = FakeActor([None] * 6 + [0]), FakeActor([None, -9]), FakeActor([None, 70])
    assert ended_gang(monkeypatch, flags, False, *actors) == 0
    assert [len(actor.started) for actor in actors] == [1, 1, 1]


class NodeActor:
    """An actor on a node."""

    def __init__(self, node: str):
        self.node = FakeMethod(lambda: node)
        self.keep_ports = FakeMethod(lambda address: 7)


@pytest.mark.parametrize("has_mtls", [False, True])
def test_processes_on_several_nodes(has_mtls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their connections are encrypted, or their network is isolated."""
    fake: Any = FakeRay("10.0.0.1")
    fake.nodes = lambda: [{"NodeID": name, "NodeManagerAddress": f"10.0.0.{name}"} for name in "12"]
    monkeypatch.setattr(ray_cluster, "_connected", lambda: fake)
    monkeypatch.setattr(settings, "jax_has_mtls", lambda: has_mtls)

    def place(nodes: str, may_leave: bool, **files: str) -> str:
        given = {"nnodes": 2, "distributed_executor_backend": "ray", **files}
        config = GroupConfig.from_arguments(given, is_insecure=may_leave)
        launcher = ray_cluster.RayLauncher(["serve", "demo"], config, {}, False, may_leave=may_leave)
        return launcher._place([NodeActor(node) for node in nodes])

    files = {f"group_{name}": "x" for name in ("certfile", "keyfile", "ca_certs")}
    assert place("11", False) == "127.0.0.1:7"
    assert place("21", True) == "10.0.0.2:7"
    with pytest.raises(ConfigError, match="on 2 nodes of the Ray cluster. .*: set group_certfile, .* or set insecure"):
        place("12", False)
    if has_mtls:
        assert place("12", False, **files) == "10.0.0.1:7"
    else:
        with pytest.raises(ConfigError, match="on 2 nodes of the Ray cluster. .* does not encrypt its own connections"):
            place("12", False, **files)


def test_settings_that_ray_sets() -> None:
    given = {"nnodes": 2, "distributed_executor_backend": "ray"}
    assert GroupConfig.from_arguments(given, is_insecure=False).is_on_ray
    assert GroupConfig.from_arguments({"distributed_executor_backend": "mp"}, is_insecure=False).is_alone
    for name, value in (("node_rank", 1), ("master_addr", "a"), ("headless", True), ("group_secret_file", "f")):
        with pytest.raises(ConfigError, match=f"{name} does not go with distributed_executor_backend=ray"):
            GroupConfig.from_arguments({**given, name: value}, is_insecure=False)


def test_devices_of_an_engine() -> None:
    assert ray_cluster.num_devices({}) == 1
    assert ray_cluster.num_devices({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}) == 8
    assert ray_cluster.num_devices({"mesh": "expert=2,tensor=3"}) == 6


def test_a_process_of_an_actor_leaves_ray_s_variables_behind() -> None:
    given = {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": "a", "PATH": "p"}
    assert ray_cluster._without_ray(given) == {"PATH": "p"}
    assert ray_cluster._without_ray({"OMP_NUM_THREADS": "4"}) == {"OMP_NUM_THREADS": "4"}
