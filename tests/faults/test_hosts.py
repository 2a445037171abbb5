"""A group over two hosts, which are network namespaces, and over a slow link."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from tests.free_ports import free_ports
from tests.group_server import (
    answers,
    assert_gone,
    assert_same,
    expected_answers,
    family,
    grpc_answers,
    post,
    secret_flags,
    text_of,
)
from tests.launched_server import ENGINE, started, when_ready
from tests.slow_relay import slow_relay

pytestmark = pytest.mark.slow
FLAGS = ("--tensor-parallel-size", "4", "--dtype", "float32", "--allowed-hosts", "*", *ENGINE)
NETWORK = f"10.213.{os.getpid() % 254}"
"""Another one than that of a run that was killed, whose hosts are left."""
_COUNT = itertools.count(1)
PORT = 29500
DELAY_S = 0.05
LAST_WORDS_S = 90.0


@pytest.fixture
def secret(tmp_path: Path) -> tuple[str, str]:
    """The flag that names the group's secret."""
    return secret_flags(tmp_path)


class Host:
    """A network namespace with one address, a hosts file, and a name of its own in the processes that it runs."""

    def __init__(self, number: int, bridge: str):
        place = f"{os.getpid()}-{next(_COUNT)}"  # never one of before, whose link may still be going away
        self.name, self.outer, inner = f"jsh{place}", f"jso{place}", "eth0"
        self.address = f"{NETWORK}.{number}"
        ip("netns", "add", self.name)
        ip("link", "add", self.outer, "type", "veth", "peer", "name", inner, "netns", self.name)
        ip("link", "set", self.outer, "master", bridge, "up")
        for link in ("lo", inner):
            ip("-n", self.name, "link", "set", link, "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", inner)
        self.folder = Path("/etc/netns") / self.name  # bound over /etc by ip netns exec
        self.folder.mkdir(parents=True)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")

    @property
    def words(self) -> tuple[str, ...]:
        """The command that runs another one on this host."""
        named = ("unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh")
        return ("ip", "netns", "exec", self.name, *named)

    def close(self) -> None:
        """Take it down."""
        ip("netns", "del", self.name)
        shutil.rmtree(self.folder)


def ip(*words: str) -> str:
    """Run the command ip."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts on a bridge, which has an address of this machine too."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    bridge = f"jsbr{os.getpid()}"
    try:
        ip("link", "add", bridge, "type", "bridge")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine has no bridges: {error.stderr.strip()}")
    made = list[Host]()
    try:
        ip("addr", "add", f"{NETWORK}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number in (1, 2):
            made.append(Host(number, bridge))
        yield made
    finally:
        for host in made:
            host.close()
        ip("link", "del", bridge)


def expected(num_devices: int = 4, dtype: str = "float32") -> list[Any]:
    """The answers of one process."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    with LLM("demo", tensor_parallel_size=num_devices, dtype=dtype, **settings) as llm:
        return expected_answers(llm)


def test_two_hosts_and_a_link_that_goes_down(hosts: list[Host], secret: tuple[str, str], tmp_path: Path) -> None:
    """They answer as one process, and listen at one address; when the link is cut, both sides end and say why."""
    first, second = hosts
    place = ("--nnodes", "2", "--master-addr", first.address, "--master-port", str(PORT), "--insecure", *secret)
    logs = [tmp_path / "log0", tmp_path / "log1"]
    with contextlib.ExitStack() as stack:
        role = ("--node-rank", "1", "--headless")
        follower = stack.enter_context(started(second.words, logs[1], *FLAGS, *place, *role))
        role = ("--node-rank", "0", "--host", first.address)
        leader = stack.enter_context(started(first.words, logs[0], *FLAGS, *place, *role))
        server = when_ready(leader, logs[0])
        assert f"rank 1 (host {second.name}, " in logs[0].read_text()
        sockets = ip("netns", "exec", first.name, "cat", "/proc/net/tcp", "/proc/net/tcp6")
        listening = {words[1] for words in map(str.split, sockets.splitlines()) if words[3] == "0A"}
        of_group = [each for each in listening if each.endswith((f":{PORT:04X}", f":{PORT + 1:04X}"))]
        assert of_group, "JAX's coordinator listens"
        assert all(int(each.partition(":")[0][-8:], 16) for each in of_group), "at one address, mapped to IPv6 or not"
        of_one_process = expected()
        assert_same(answers(server), of_one_process)
        assert_same(grpc_answers(server), of_one_process)
        found: list[Any] = []
        body = {"prompt": "12+30=", "temperature": 0.0, "max_tokens": 200, "ignore_eos": True}

        def ask() -> None:
            while (answer := post(server, "/v1/completions", body))[0] == 200:
                pass
            found.append(answer)

        client = threading.Thread(target=ask)
        client.start()
        processes = [*family(leader.pid), *family(follower.pid)]
        ip("link", "set", second.outer, "down")
        assert (leader.wait(LAST_WORDS_S), follower.wait(LAST_WORDS_S)) == (70, 70)
        client.join()
        assert_gone(processes, within_s=5)
    assert found[0][0] == 503 and "rank 1 of its processes ended, failed or is late" in found[0][1]["error"]["message"]
    assert f"the group ends: rank 1 (host {second.name}, " in logs[0].read_text(), logs[0].read_text()
    assert "its machine cannot be reached" in logs[0].read_text(), logs[0].read_text()
    assert "the group ends: process 0 has sent nothing for " in logs[1].read_text(), logs[1].read_text()


def test_a_replica_on_each_host_and_a_link_that_goes_down(
    hosts: list[Host], secret: tuple[str, str], tmp_path: Path
) -> None:
    """They answer as one process; when the link is cut, the other host's group ends, and this one's goes on."""
    first, second = hosts
    place = ("--nnodes", "2", "--master-addr", first.address, "--master-port", str(PORT), "--insecure", *secret)
    flags = ("--data-parallel-size", "2", "--allowed-hosts", "*", *ENGINE, *place)
    logs = [tmp_path / "log0", tmp_path / "log1"]
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(started(second.words, logs[1], *flags, "--node-rank", "1", "--headless"))
        role = ("--node-rank", "0", "--host", first.address)
        front_end = stack.enter_context(started(first.words, logs[0], *flags, *role))
        server = when_ready(front_end, logs[0])
        assert f"rank 1 (host {second.name}, " in logs[0].read_text()
        found, of_one_engine = answers(server), expected(num_devices=1, dtype="auto")
        assert_same(found, of_one_engine)
        assert_same(grpc_answers(server), of_one_engine)
        up = [f'jaxserve:group_up{{model_name="demo",engine="{index}"}} 1' for index in range(2)]
        assert [line in text_of(server, "/metrics") for line in up] == [True, True]
        processes = family(node.pid)
        ip("link", "set", second.outer, "down")
        assert node.wait(LAST_WORDS_S) == 70
        assert_gone(processes, within_s=5)
        until_s = time.monotonic() + LAST_WORDS_S
        while (states := [line in text_of(server, "/metrics") for line in up]) != [True, False]:
            assert time.monotonic() < until_s, states
            time.sleep(0.2)
        assert answers(server) == found
        front_end.send_signal(signal.SIGTERM)
        assert front_end.wait(LAST_WORDS_S) == 0
    assert "the front end has ended, or cannot be reached" in logs[1].read_text(), logs[1].read_text()


def test_a_slow_link_is_no_fault(secret: tuple[str, str], tmp_path: Path) -> None:
    port, relay = free_ports(), free_ports()
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", *secret)
    logs = [tmp_path / "log0", tmp_path / "log1"]
    with contextlib.ExitStack() as stack:
        for offset in (0, 1):  # JAX's coordinator has the next port
            stack.enter_context(slow_relay(relay + offset, port + offset, DELAY_S))
        role = ("--master-port", str(relay), "--node-rank", "1", "--headless")
        follower = stack.enter_context(started((), logs[1], *FLAGS, *place, *role))
        role = ("--master-port", str(port), "--node-rank", "0")
        leader = stack.enter_context(started((), logs[0], *FLAGS, *place, *role))
        server = when_ready(leader, logs[0])
        began_s = time.monotonic()
        found = answers(server)
        assert time.monotonic() - began_s > DELAY_S  # every step waits for the link
        assert_same(found, expected())
        leader.send_signal(signal.SIGTERM)
        assert (leader.wait(LAST_WORDS_S), follower.wait(LAST_WORDS_S)) == (0, 0)
    assert "the group ends" not in logs[0].read_text() + logs[1].read_text()
