"""Nodes that join a front end over real connections, without engines: what each is told, and how each ends."""

import asyncio
import contextlib
import dataclasses
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jaxserve.api.config import SERVING_DEFAULTS, EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.frames import HEADER
from jaxserve.group.connection import PeerConnection, join_leader
from jaxserve.group.leader import Leader
from jaxserve.group.messages import Beat, End
from jaxserve.group.replicas import ReplicaGroups
from jaxserve.group.settings import GroupPlace
from jaxserve.server import node as node_module
from jaxserve.server.engine_process.spawn import SpawnedEngine
from jaxserve.server.node import run_node
from jaxserve.server.node_group import NodeProcesses
from jaxserve.server.nodes import Nodes
from jaxserve.server.wire import MAX_TO_ENGINE_BYTES, Start, pack, unpack
from tests.certificates import Authority
from tests.free_ports import free_ports

ARGUMENTS = {"data_parallel_size": 2, "tensor_parallel_size": 2}
LIMIT_S = 20.0
ENGINE = """
import socket, struct, sys
link = socket.socket(fileno=int(sys.argv[1]))
stream = link.makefile("rb")
header = stream.read(4)
if header:
    link.sendall(header + stream.read(struct.unpack(">I", header)[0]))
    sys.exit(int(stream.read(1) or b"9"))
"""
"""Sends its first message back, and ends with the status that it then gets."""
DIFFERS = r"rank 1 \(host .*\) differs from rank 0 \(host .*\) in setting data_parallel_size: {} instead of {}"
LINKS: dict[int, PeerConnection] = {}
"""The connection of the node on each thread."""


class Joining:
    """A node on a thread of this process: its exit status, or the error with which it ended."""

    def __init__(self, place: GroupPlace, each: int, arguments: Mapping[str, Any]):
        self.result: Any = None
        self.followed: list[tuple[Mapping[str, Any], GroupPlace]] = []
        self._given = (arguments, place, ReplicaGroups(each, (), LIMIT_S, LIMIT_S), "text", self._follow)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _follow(self, arguments: Mapping[str, Any], place: GroupPlace) -> NoReturn:
        self.followed.append((arguments, place))
        raise LookupError("it follows")

    def _run(self) -> None:
        try:
            self.result = run_node(*self._given)
        except (ConfigError, LookupError) as error:
            self.result = str(error)
        link = LINKS.pop(threading.get_ident(), None)
        if link is not None:  # as the end of a process would
            link.close()

    async def ended(self) -> Any:
        """Wait for its end; return its result."""
        await asyncio.to_thread(self._thread.join, LIMIT_S)
        return self.result


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> GroupPlace:
    """Where the nodes join; their engine processes are none, and their followers end at once."""

    def joined(place: GroupPlace) -> PeerConnection:
        LINKS[threading.get_ident()] = link = join_leader(place)
        return link

    monkeypatch.setattr(node_module, "join_leader", joined)
    monkeypatch.setattr(node_module, "_end_with", lambda link: None)
    monkeypatch.setattr(node_module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(node_module, "engine_command", lambda fd, *_: [sys.executable, "-S", "-c", ENGINE, str(fd)])
    return GroupPlace("127.0.0.1", free_ports(), 4, 0, b"s" * 32, LIMIT_S, LIMIT_S)


@contextlib.contextmanager
def opened(place: GroupPlace) -> Iterator[Nodes]:
    """The nodes of a front end."""
    nodes = Nodes(place, ARGUMENTS)
    nodes.open()
    try:
        yield nodes
    finally:
        nodes.close()


def join(place: GroupPlace, rank: int, **changes: Any) -> Joining:
    """A node with this rank, of groups of two."""
    mine = place.in_group(place.address, place.port, place.count, rank, place.secret)
    return Joining(mine, 2, {**ARGUMENTS, "model": f"model of {rank}", **changes})


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test in an event loop, with a time limit."""
    asyncio.run(asyncio.wait_for(test(), LIMIT_S))


async def exchanged(engine: SpawnedEngine, status: int) -> Start:
    """What an engine process has got as its first message; it ends with a status."""
    engine.writer.write(pack(Start({"model": "theirs"}, 7.0, None, 5.0), MAX_TO_ENGINE_BYTES))
    (length,) = HEADER.unpack(await engine.reader.readexactly(HEADER.size))
    start = unpack(await engine.reader.readexactly(length))
    engine.writer.write(str(status).encode())
    assert await engine.reader.read() == b""
    assert await engine.process.wait() == status
    engine.writer.close()
    return start


def check_group(place: GroupPlace) -> None:
    """A group of two whose engine process is on the third node."""

    async def test() -> None:
        with opened(place) as nodes:
            leader, follower = join(place, 2), join(place, 3)
            processes = NodeProcesses("group 1", (2, 3), nodes)
            assert await processes.start() is None
            start = await exchanged(await processes.spawn(), 3)
            assert start.engine_arguments["model"] == "model of 2", "files are where that node has them"
            assert start.engine_arguments["data_parallel_size"] == 1 and start.engine_arguments["seed"] == 1
            assert (start.watchdog_timeout, start.startup_timeout) == (7.0, 5.0)
            own = start.group
            assert own is not None and (own.count, own.rank) == (2, 0) and own.secret != place.secret
            await processes.end(LIMIT_S)
            assert await leader.ended() == 3 and await follower.ended() == "it follows"
            arguments, theirs = follower.followed[0]
            assert theirs == own.in_group(own.address, own.port, 2, 1, own.secret)
            assert {**arguments, "model": ""} == {**start.engine_arguments, "model": ""}

    run(test)


def test_nodes_of_a_group_meet(place: GroupPlace) -> None:
    check_group(place)


@pytest.mark.slow
def test_nodes_of_a_group_meet_over_tls(place: GroupPlace, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.sign("all")
    files = (str(pair.certificate), str(pair.key), str(authority.pair.certificate))
    check_group(GroupPlace(place.address, place.port, 4, 0, place.secret, LIMIT_S, LIMIT_S, *files))


def test_the_group_of_the_front_end_has_its_engine_process_here(place: GroupPlace) -> None:
    async def test() -> None:
        with opened(place) as nodes:
            follower = join(place, 1)
            processes = NodeProcesses("group 0", (0, 1), nodes)
            own = await processes.start()
            assert own is not None and (own.address, own.count, own.rank) == ("127.0.0.1", 2, 0)
            (end,) = processes.ends
            assert (await end).startswith("rank 1 (host ") and await follower.ended() == "it follows"
            assert follower.followed[0][1] == own.in_group(own.address, own.port, 2, 1, own.secret)
            await processes.end(LIMIT_S)

    run(test)


def test_a_lone_process_of_a_group(place: GroupPlace) -> None:
    async def test() -> None:
        with opened(place) as nodes:
            alone = NodeProcesses("group 0", (0,), nodes)
            assert await alone.start() is None and not alone.ends
            given = place.in_group(place.address, place.port, 4, 3, place.secret)
            node = Joining(given, 1, {**ARGUMENTS, "data_parallel_size": 4})
            assert "in setting data_parallel_size: 4 instead of 2" in await node.ended()
            given = place.in_group(place.address, place.port, 4, 1, place.secret)
            node = Joining(given, 1, ARGUMENTS)
            processes = NodeProcesses("group 1", (1,), nodes)
            assert await processes.start() is None
            engine = await processes.spawn()
            assert engine.clock_ahead_s == 0.0, "it has the same clock"
            engine.process.kill()
            assert await engine.process.wait() == -9 and await node.ended() == 70
            engine.writer.close()
            await processes.end(LIMIT_S)

    run(test)


def test_nodes_that_are_not_taken(place: GroupPlace, caplog: pytest.LogCaptureFixture) -> None:
    """Each is told why; those that wait are dismissed with the reason for which the others fail."""

    async def test() -> None:
        with opened(place) as nodes, caplog.at_level(logging.INFO, "jaxserve"):
            waiting = join(place, 2)
            while "rank 2 (host " not in caplog.text or "has joined" not in caplog.text:
                await asyncio.sleep(0.01)
            assert "node_rank=2 is taken by process " in await join(place, 2).ended()
            other = place.in_group(place.address, place.port, 3, 1, place.secret)
            assert "it expects 3 processes, and there are 4 (nnodes)" in await Joining(other, 2, ARGUMENTS).ended()
            taking = asyncio.create_task(nodes.take((1, 2)))
            problem = r"rank 1 \(host .*\) differs from rank 0 \(host .*\) in setting seed: 5 instead of 0"
            assert await join(place, 1, seed=5).ended()
            with pytest.raises(ConfigError, match=problem):
                await taking
            taking = asyncio.create_task(nodes.take((1, 2)))
            assert "max_num_seqs" in await join(place, 1, max_num_seqs=0).ended()
            with pytest.raises(ConfigError, match=r"rank 1 \(host .*\): .*max_num_seqs"):
                await taking
            nodes.close("something is wrong")
            assert await waiting.ended() == "process 0 dismisses this node: something is wrong"

    run(test)


def test_a_process_of_one_group_among_nodes(place: GroupPlace) -> None:
    """It and the front end are told the setting that only one side has, and both values."""

    async def test() -> None:
        with opened(place) as nodes:
            taking = asyncio.create_task(nodes.take((1,)))
            link = await asyncio.to_thread(join_leader, place.in_group(place.address, place.port, 4, 1, place.secret))
            link.send(Beat())
            with pytest.raises(ConfigError, match=DIFFERS.format(1, 2)):
                await taking
            told = await asyncio.to_thread(link.receive)
            assert isinstance(told, End) and re.search(DIFFERS.format(1, 2), told.reason)
            link.close()

    run(test)


def test_a_node_among_the_processes_of_one_group(place: GroupPlace) -> None:
    async def test() -> None:
        leader = Leader(dataclasses.replace(place, count=2), lambda error: None)
        node = Joining(place.in_group(place.address, place.port, 2, 1, place.secret), 1, ARGUMENTS)
        await asyncio.to_thread(leader.join)
        config = EngineConfig.from_arguments(**{"model": "demo", **SERVING_DEFAULTS, "tensor_parallel_size": 2})
        with pytest.raises(ConfigError, match=DIFFERS.format(2, 1)):
            await asyncio.to_thread(leader.agree, config)
        assert re.search("process 0 dismisses this node: " + DIFFERS.format(2, 1), await node.ended())

    run(test)


def test_a_node_that_does_not_come(place: GroupPlace) -> None:
    async def test() -> None:
        short = GroupPlace(place.address, place.port, 4, 0, place.secret, 0.1, LIMIT_S)
        with opened(short) as nodes:
            begin_s = time.monotonic()
            with pytest.raises(
                ConfigError, match=r"nodes 2, 3 of 4 did not join at 127.0.0.1:\d+ within join_timeout=0.1"
            ):
                await nodes.take((2, 3))
            assert time.monotonic() >= begin_s + 0.1

    run(test)


def test_a_waiting_node_whose_front_end_ends(place: GroupPlace, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        with opened(place) as nodes, caplog.at_level(logging.INFO, "jaxserve"):
            first = join(place, 1)
            (node,) = await nodes.take((1,))
            node.kill()
            assert await first.ended() == 70 and "process 0 has ended" in caplog.text
            assert "rank 1 (host " in await node.end()
            second = join(place, 1)
            await nodes.take((1,))
            nodes.close()
            del second

    run(test)
