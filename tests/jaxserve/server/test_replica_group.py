"""The processes of a group besides its engine: they start with it, and none outlives it."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jaxserve.api.errors import EngineDeadError
from jaxserve.group.replicas import ReplicaGroups
from jaxserve.server import replica_group
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.replica_group import ReplicaGroup, local_group
from jaxserve.server.settings import ServerConfig
from tests.group_server import assert_gone


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], ReplicaGroup]:
    """Makes a group of three processes without an engine: each of the others runs a program instead, with its rank."""

    def make(program: str) -> ReplicaGroup:
        def arguments(port: int, count: int, rank: int, secret_fd: int, command: Sequence[str]) -> list[str]:
            assert count == 3 and command[:2] == ["serve", "demo"] and "--seed=4" in command
            return ["-S", "-c", program, str(rank), str(port), str(secret_fd), str(tmp_path)]

        monkeypatch.setattr(replica_group, "entry_arguments", arguments)
        monkeypatch.setattr(replica_group, "_PATIENCE_S", 0.2)
        groups = ReplicaGroups(3, ("serve", "demo"), 20.0, 30.0)
        return local_group(1, {"seed": 4}, [{}, {"PART": "1"}, {"PART": "2"}], ServerConfig(), groups)

    return make


def engine(monkeypatch: pytest.MonkeyPatch, starts: bool) -> None:
    """Let the engine process be none, which is ready at once or never."""

    async def start(client: EngineClient) -> None:
        while not starts:
            await asyncio.sleep(0.01)

    async def kill(client: EngineClient) -> None:
        pass

    monkeypatch.setattr(EngineClient, "start", start)
    monkeypatch.setattr(EngineClient, "kill", kill)


def test_a_process_that_ends_before_it_has_joined_is_named(
    group: Callable[[str], ReplicaGroup], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine(monkeypatch, starts=False)
    made = group("import sys, time; time.sleep(9) if sys.argv[1] == '1' else sys.exit(3)")
    with caplog.at_level(logging.ERROR, "jaxserve"), pytest.raises(EngineDeadError) as caught:
        asyncio.run(made.start())
    assert caught.match(r"group 1 did not start: rank 2 \(process \d+\) ended with status 3")
    assert any("group 1: rank 2" in record.getMessage() for record in caplog.records)


def test_the_others_join_with_the_same_secret_and_end_with_the_engine(
    group: Callable[[str], ReplicaGroup], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine(monkeypatch, starts=True)
    program = (
        "import os, sys, time; rank, port, fd, folder = sys.argv[1:]; secret = os.read(int(fd), 32).hex(); "
        "file = open(folder + '/new' + rank, 'w'); print(port, secret, os.environ['PART'], os.getpid(), file=file); "
        "file.close(); os.rename(folder + '/new' + rank, folder + '/' + rank); time.sleep(30)"
    )

    async def twice() -> list[list[str]]:
        made, found = group(program), list[list[str]]()
        for _ in range(2):
            await made.start()
            place = made.client.place
            assert place is not None and (place.count, place.rank, place.step_timeout) == (3, 0, 30.0)
            while not all((tmp_path / rank).exists() for rank in "12"):
                await asyncio.sleep(0.01)
            said = [(tmp_path / rank).read_text().split() for rank in "12"]
            assert [each[:3] for each in said] == [[str(place.port), place.secret.hex(), part] for part in "12"]
            await made.wait_others()
            assert_gone([int(each[3]) for each in said], within_s=0.0)
            found.append([each[1] for each in said])
            for rank in "12":
                (tmp_path / rank).unlink()
        return found

    first, second = asyncio.run(twice())
    assert not {*first} & {*second}, "a group that starts again has another secret"
