"""A group whose processes actors of a Ray cluster start, on this machine alone."""

import contextlib
import importlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.api.errors import ConfigError
from jaxserve.group import ray_cluster
from jaxserve.group.settings import GroupConfig
from tests.free_ports import free_ports
from tests.group_server import answers, assert_gone, assert_same, expected_answers, family, kill, post, text_of
from tests.launched_server import ENGINE, started, when_ready

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")
FLAGS = ("--distributed-executor-backend", "ray", "--nnodes", "2", "--tensor-parallel-size", "2", *ENGINE)
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
    with log.open("wb") as output:
        head = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)
    try:
        until_s = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            assert head.poll() is None and time.monotonic() < until_s, log.read_text()
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
        rank = re.search(rb"--node-rank=(\d)", Path(f"/proc/{pid}/cmdline").read_bytes())
        if rank is not None:
            found[int(rank[1])] = pid
    return [found[rank] for rank in sorted(found)]


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
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[9] in inodes and words[2] != "00000000:0000":
            found.add(socket.inet_ntoa(bytes.fromhex(words[2].partition(":")[0])[::-1]))
    return found


@needs_ray
@pytest.mark.slow
def test_two_actors_answer_as_one_process(cluster: tuple[int, dict[str, str]], tmp_path: Path) -> None:
    """Nothing but this machine is dialled; SIGTERM drains; no process, actor or placement group is left."""
    head, environment = cluster
    log = tmp_path / "log"
    with started((), log, *FLAGS, environment=environment) as process:
        server = when_ready(process, log)
        found = answers(server)
        assert {*dialled([*family(process.pid), *family(head)])} <= {"127.0.0.1"}
        assert all(b"OMP_NUM_THREADS=1\0" not in Path(f"/proc/{pid}/environ").read_bytes() for pid in members(head))
        processes = [pid for each in members(head) for pid in family(each)]
        assert len(members(head)) == 2
        with LLM("demo", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, tensor_parallel_size=2) as llm:
            assert_same(found, expected_answers(llm))
        process.send_signal(signal.SIGTERM)
        assert process.wait(LAST_WORDS_S) == 0, log.read_text()
        assert_gone(processes, within_s=10)


@needs_ray
@pytest.mark.slow
def test_each_actor_is_a_group(cluster: tuple[int, dict[str, str]], tmp_path: Path) -> None:
    """With replicas, process 0 serves for both groups; SIGTERM drains, and leaves nothing."""
    head, environment = cluster
    log = tmp_path / "log"
    flags = ("--distributed-executor-backend", "ray", "--nnodes", "2", "--data-parallel-size", "2", *ENGINE)
    with started((), log, *flags, environment=environment) as process:
        server = when_ready(process, log)
        found = answers(server)
        assert text_of(server, "/metrics").count("jaxserve:group_up{") == 2
        processes = [pid for each in members(head) for pid in family(each)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LAST_WORDS_S) == 0, log.read_text()
        assert_gone(processes, within_s=10)
    with LLM("demo", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256) as llm:
        assert_same(found, expected_answers(llm))


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
