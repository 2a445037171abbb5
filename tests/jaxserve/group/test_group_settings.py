"""Settings of a group: what is refused before anything starts, and the command of each process."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.errors import ConfigError
from jaxserve.cli import main
from jaxserve.group.__main__ import serve_command
from jaxserve.group.settings import SECRET_BYTES, GroupConfig

TWO: dict[str, Any] = {
    "nnodes": 2,
    "node_rank": 1,
    "master_addr": "127.0.0.1",
    "master_port": 4321,
    "headless": True,
    "group_secret_file": "secret",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nnodes": 0, "node_rank": 0}, "nnodes: expected a number >= 1, got 0"),
        ({"node_rank": 2}, "node_rank: expected 0 to 1 for nnodes=2, got 2"),
        ({"node_rank": -1}, "node_rank: expected 0 to 1"),
        ({"master_addr": None}, "nnodes=2 requires master_addr: where process 0 listens"),
        ({"master_port": None}, "nnodes=2 requires master_port"),
        ({"master_port": 65535}, "master_port: expected a port from 1 to 65534"),
        ({"headless": False}, "node_rank=1: only process 0 serves HTTP and gRPC: set headless"),
        ({"node_rank": 0}, "node_rank=0: only process 0 serves HTTP and gRPC: headless is for the others"),
        ({"group_secret_file": None}, "nnodes=2 requires group_secret_file, .* chmod 600"),
        ({"master_addr": "10.0.0.1"}, "other machines can reach 10.0.0.1, .* set insecure if its network is isolated"),
        ({"join_timeout": 0.5}, "join_timeout: expected seconds from 1 to 86400, got 0.5"),
        ({"step_timeout": 1e9}, "step_timeout: expected seconds"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupConfig.from_arguments({**TWO, **changes}, is_insecure=False)


def test_settings_of_a_group_need_a_number_of_processes() -> None:
    assert GroupConfig.from_arguments({}, is_insecure=False).is_alone
    assert GroupConfig.from_arguments({"nnodes": 1, "node_rank": 0, "headless": False}, is_insecure=False).is_alone
    with pytest.raises(ConfigError, match="master_port is for an engine of several processes: set nnodes"):
        GroupConfig.from_arguments({"master_port": 4321}, is_insecure=False)
    with pytest.raises(ConfigError, match="headless is for an engine of several processes"):
        GroupConfig.from_arguments({"headless": True}, is_insecure=False)


def test_other_machines_may_be_trusted() -> None:
    config = GroupConfig.from_arguments({**TWO, "master_addr": "10.0.0.1"}, is_insecure=True)
    assert not config.is_alone


def test_the_secret_is_its_owner_s(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    config = GroupConfig.from_arguments({**TWO, "group_secret_file": str(path)}, is_insecure=False)
    with pytest.raises(ConfigError, match="group_secret_file: cannot read .*secret: No such file"):
        config.place(end=pytest.fail)
    path.write_bytes(os.urandom(SECRET_BYTES))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read .*secret: chmod 600"):
        config.place(end=pytest.fail)
    path.chmod(0o600)
    place = config.place(end=pytest.fail)
    assert (place.count, place.rank, place.port, place.coordinator_port) == (2, 1, 4321, 4322)
    assert place.secret == path.read_bytes() and place.secret.hex() not in repr(place)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="the group's secret has 5 bytes; expected at least 32"):
        config.place(end=pytest.fail)


def test_a_secret_comes_through_a_pipe_whose_end_is_noticed() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"s" * SECRET_BYTES)
    given = {**TWO, "group_secret_file": None, "group_secret_fd": reading}
    ended = threading.Event()
    place = GroupConfig.from_arguments(given, is_insecure=False).place(end=ended.set)
    assert place.secret == b"s" * SECRET_BYTES and not ended.is_set()
    os.close(writing)
    assert ended.wait(10)
    os.close(reading)


def test_the_one_entry_becomes_a_server_or_a_follower() -> None:
    given = ["--address", "127.0.0.1:99", "--count", "2", "--secret-fd", "7", "--rank"]
    flags = ["--nnodes=2", "--master-addr=127.0.0.1", "--master-port=99", "--group-secret-fd=7"]
    first, second = (serve_command([*given, rank, "serve", "demo", "--port", "0"]) for rank in "01")
    assert first[:4] == second[:4] == ["serve", "demo", "--port", "0"]
    assert {*first[4:]} == {*flags, "--node-rank=0"} and {*second[4:]} == {*flags, "--node-rank=1", "--headless"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0", "serve", "demo"], "nproc: expected a number >= 1, got 0"),
        (["--nproc", "2", "generate"], "jaxserve launch runs the command serve, got generate"),
        (["--nproc", "2"], "jaxserve launch runs the command serve, got none"),
        (["--nproc", "2", "serve", "demo", "--nnodes=2"], "--nnodes is for processes that are started one by one"),
    ],
)
def test_launch_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", *arguments])
    assert message in capsys.readouterr().err


def test_serve_refuses_a_group_without_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "demo", "--nnodes", "2", "--node-rank", "0"])
    assert "nnodes=2 requires master_addr" in capsys.readouterr().err
