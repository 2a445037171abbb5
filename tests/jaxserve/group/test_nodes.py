"""Processes of a group that are started one by one, as on several hosts: they meet, or say why not."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.group.settings import jax_has_mtls
from scripts.server_child import REPOSITORY
from tests.certificates import Authority
from tests.free_ports import free_ports
from tests.group_server import assert_gone, family, kill, post, secret_flags
from tests.server_process import PROGRAMS_CACHE, SMALL_ENGINE, running_server

pytestmark = pytest.mark.slow
BODY = {"prompt": "12+30=", "temperature": 0.0, "max_tokens": 8}
ENGINE = ("--tensor-parallel-size", "2", "--compilation-cache-dir", str(PROGRAMS_CACHE), *SMALL_ENGINE)


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, ...]:
    """The flags of both processes that say where they meet."""
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_ports()))
    return ("--nnodes", "2", *address, *secret_flags(tmp_path))


@contextlib.contextmanager
def started(log: Path, *flags: str, path: str = "") -> Iterator["subprocess.Popen[bytes]"]:
    """``jaxserve serve demo`` with these flags while the block runs; ``path`` has modules of its own."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", "jaxserve", "serve", "demo", "--port", "0", *flags]
        environment = {**os.environ, "PYTHONPATH": path}
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output, env=environment)
    try:
        yield process
    finally:
        for pid in family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
        process.wait()


def test_processes_started_one_by_one(place: tuple[str, ...], tmp_path: Path) -> None:
    """They answer; a follower whose child is killed is started again with the engine; all end with status 0."""
    flags = (*place, *ENGINE, "--restart-engine")
    with started(tmp_path / "log", *flags, "--node-rank", "1", "--headless") as follower:
        with running_server(*flags, "--node-rank", "0") as server:
            assert post(server, "/v1/completions", BODY)[1]["choices"][0]["text"] == "42"
            child = family(follower.pid)[1]
            kill(child)
            while post(server, "/v1/completions", BODY)[0] != 200:
                assert server.process.poll() is None and follower.poll() is None
                time.sleep(0.2)
            assert_gone([child], within_s=1)
            processes = [*family(server.process.pid), *family(follower.pid)]
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0 and follower.wait(20) == 0
            assert_gone(processes, within_s=5)


def test_processes_with_certificates(place: tuple[str, ...], tmp_path: Path) -> None:
    """They answer as two without; JAX's own connections have certificates too where it knows them."""
    authority, ranks = Authority(tmp_path / "authority"), []
    for name in ("leader", "follower"):
        pair = authority.sign(name)
        files = ("--group-certfile", pair.certificate, "--group-keyfile", pair.key)
        ranks.append((*place, *ENGINE, *map(str, files), "--group-ca-certs", str(authority.pair.certificate)))
    with started(tmp_path / "log", *ranks[1], "--node-rank", "1", "--headless") as follower:
        with running_server(*ranks[0], "--node-rank", "0") as server:
            assert post(server, "/v1/completions", BODY)[1]["choices"][0]["text"] == "42"
            is_old = "JAX's own connections are not encrypted" in server.log.read_text()
            assert is_old == (not jax_has_mtls())
        assert follower.wait(60) == 0


def test_a_killed_process_takes_along_what_it_started(place: tuple[str, ...], tmp_path: Path) -> None:
    """Another one can then have its rank."""
    logs, role = [tmp_path / "log1", tmp_path / "log2"], ("--node-rank", "1", "--headless")
    flags = (*place, *ENGINE, "--restart-engine")
    with started(logs[0], *flags, *role) as follower, running_server(*flags, "--node-rank", "0") as server:
        processes = family(follower.pid)
        assert len(processes) > 1
        kill(follower.pid)
        assert_gone(processes, within_s=5)
        with started(logs[1], *flags, *role) as another:
            while (answer := post(server, "/v1/completions", BODY))[0] != 200:
                assert server.process.poll() is None and another.poll() is None
                time.sleep(0.2)
            assert answer[1]["choices"][0]["text"] == "42"
            server.process.send_signal(signal.SIGTERM)
            assert (server.wait(), another.wait(20)) == (0, 0)
    assert "the process that started this one has ended" in logs[0].read_text(), logs[0].read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--seed", "4"], "differs from rank 0 (host "),
        (["--max-num-seqs", "3"], "in setting max_num_seqs: 3 instead of 4"),
        (["--dtype", "float32"], "in setting dtype: 'float32' instead of 'auto'"),
        (["--layout", "split_logits"], "in setting layout: "),
        (["--data-parallel-size", "2"], "in setting data_parallel_size: 2 instead of 1"),
    ],
)
def test_processes_that_differ(place: tuple[str, ...], changes: list[str], said: str, tmp_path: Path) -> None:
    """Both say so, and end with status 2."""
    logs = [tmp_path / "log0", tmp_path / "log1"]
    with started(logs[0], *place, *ENGINE, "--node-rank", "0") as first:
        with started(logs[1], *place, *ENGINE, "--node-rank", "1", "--headless", *changes) as second:
            assert [first.wait(120), second.wait(120)] == [2, 2]
    for log in logs:
        assert said in log.read_text() and "Traceback" not in log.read_text(), log.read_text()


def test_a_mesh_that_does_not_divide(place: tuple[str, ...], tmp_path: Path) -> None:
    logs = [tmp_path / "log0", tmp_path / "log1"]
    flags = (*place, *SMALL_ENGINE)
    with started(logs[0], *flags, "--node-rank", "0") as first:
        with started(logs[1], *flags, "--node-rank", "1", "--headless") as second:
            assert [first.wait(120), second.wait(120)] == [2, 2]
    for log in logs:
        assert "2 processes cannot share a mesh of 1 devices equally" in log.read_text(), log.read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_processor_that_only_one_process_can_import(rank: int, place: tuple[str, ...], tmp_path: Path) -> None:
    """It is named, with the process that cannot, before anything is loaded."""
    (tmp_path / "only_here.py").write_text("from tests.faults.nan_processor import NAN_FROM as FOUND\n")
    logs = [tmp_path / "log0", tmp_path / "log1"]
    paths = ["" if rank == missing else str(tmp_path) for missing in (0, 1)]
    flags = (*place, *ENGINE, "--logits-processors", "only_here:FOUND")
    with started(logs[0], *flags, "--node-rank", "0", path=paths[0]) as first:
        with started(logs[1], *flags, "--node-rank", "1", "--headless", path=paths[1]) as second:
            assert [first.wait(120), second.wait(120)] == [2, 2]
    for log in logs:
        assert "only_here" in log.read_text() and "is ready" not in log.read_text(), log.read_text()
    assert rank == 0 or "rank 1 (host " in logs[0].read_text(), logs[0].read_text()


def test_a_process_that_comes_too_late(place: tuple[str, ...], tmp_path: Path) -> None:
    """Process 0 has ended by then, and has named it; it says where it could not join."""
    logs, flags = [tmp_path / "log0", tmp_path / "log1"], (*place, *ENGINE, "--join-timeout", "3")
    with started(logs[0], *flags, "--node-rank", "0") as first:
        assert first.wait(120) == 2
    with started(logs[1], *flags, "--node-rank", "1", "--headless") as second:
        assert second.wait(120) == 2
    assert "processes 1 of 2 did not join at " in logs[0].read_text(), logs[0].read_text()
    assert "rank 1 (host " in logs[1].read_text() and " cannot join the group at " in logs[1].read_text()


def test_a_process_that_comes_to_a_running_group(place: tuple[str, ...], tmp_path: Path) -> None:
    """Its rank is taken: it cannot join, and the group goes on."""
    flags, logs = (*place, *ENGINE), [tmp_path / "log1", tmp_path / "log2"]
    with started(logs[0], *flags, "--node-rank", "1", "--headless"):
        with running_server(*flags, "--node-rank", "0") as server:
            late = ("--node-rank", "1", "--headless", "--join-timeout", "3")
            with started(logs[1], *flags, *late) as another:
                assert another.wait(120) == 2
            assert " cannot join the group at " in logs[1].read_text(), logs[1].read_text()
            assert post(server, "/v1/completions", BODY)[1]["choices"][0]["text"] == "42"
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0


def test_a_process_that_does_not_come(place: tuple[str, ...], tmp_path: Path) -> None:
    log = tmp_path / "log"
    for role in (["--node-rank", "0"], ["--node-rank", "1", "--headless"]):
        with started(log, *place, *ENGINE, *role, "--join-timeout", "2") as process:
            assert process.wait(60) == 2
        assert "within join_timeout=2 s" in log.read_text() and "Traceback" not in log.read_text(), log.read_text()
