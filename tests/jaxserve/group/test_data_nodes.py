"""Replicas as groups over nodes: each process is started by itself, as on several hosts, and one of them serves."""

import contextlib
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.cli import main
from scripts.server_child import RunningServer
from tests.free_ports import free_ports
from tests.group_server import (
    answers,
    assert_gone,
    assert_same,
    expected_answers,
    family,
    kill,
    post,
    secret_flags,
    text_of,
)
from tests.launched_server import started
from tests.server_process import PROGRAMS_CACHE, SMALL_ENGINE, START_LIMIT_S, running_server

ENGINE = ("--dtype", "float32", "--compilation-cache-dir", str(PROGRAMS_CACHE), *SMALL_ENGINE)
SETTINGS: dict[str, Any] = {
    **{"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"},
    "compilation_cache_dir": str(PROGRAMS_CACHE),
}
BODY = {"prompt": "12+30=", "temperature": 0.0, "max_tokens": 8}


@contextlib.contextmanager
def running_nodes(count: int, folder: Path, *flags: str) -> Iterator[tuple[RunningServer, list[Any], list[Path]]]:
    """A server and the processes of its other nodes, in the order of ranks, with their logs."""
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_ports()))
    all_flags = ("--nnodes", str(count), *address, *secret_flags(folder), *ENGINE, *flags)
    logs = [folder / f"log{rank}" for rank in range(1, count)]
    with contextlib.ExitStack() as nodes:
        others = [
            nodes.enter_context(started((), log, *all_flags, "--node-rank", str(rank), "--headless"))
            for rank, log in enumerate(logs, 1)
        ]
        with running_server(*all_flags, "--node-rank", "0") as server:
            yield server, others, logs


def groups_up(server: RunningServer) -> list[int]:
    """Whether each group is up, by the metrics."""
    return [int(each) for each in re.findall(r"jaxserve:group_up\{.*\} (\d)", text_of(server, "/metrics"))]


def both_answer(server: RunningServer) -> list[Any]:
    """Answers of a number of requests that reaches all groups; each has computed some of them."""
    found = answers(server)
    counts = re.findall(r'jaxserve:steps_total\{.*engine="(\d)".*\} (\S+)', text_of(server, "/metrics"))
    assert {engine for engine, number in counts if float(number) > 0} == {"0", "1"}
    return found


def until_up(server: RunningServer, up: Sequence[int]) -> None:
    """Wait until these groups are up; requests get an answer, or are told that the engine process has ended."""
    until_s = time.monotonic() + START_LIMIT_S
    while (found := groups_up(server)) != [*up]:
        assert server.process.poll() is None and time.monotonic() < until_s, found
        status, response = post(server, "/v1/completions", BODY)
        assert status in (200, 503), response


def is_engine(pid: int) -> bool:
    """Whether a process runs an engine."""
    return b"jaxserve.server.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def end_all(server: RunningServer, nodes: Sequence[Any]) -> None:
    """SIGTERM to the front end ends all with status 0, and leaves nothing."""
    everyone = [pid for process in (server.process, *nodes) for pid in family(process.pid)]
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert [node.wait(30) for node in nodes] == [0] * len(nodes)
    assert_gone(everyone, within_s=5.0)


@pytest.mark.slow
def test_each_node_is_a_group(tmp_path: Path) -> None:
    """They give what one process gives; a killed node ends its group alone, and the front end goes on."""
    with running_nodes(2, tmp_path, "--data-parallel-size", "2") as (server, (node,), (log,)):
        found = both_answer(server)
        processes = family(node.pid)
        kill(processes[1])  # the engine process of the node
        until_up(server, (1, 0))
        assert node.wait(30) == 128 + signal.SIGKILL
        assert "the engine process was killed by SIGKILL" in log.read_text()
        assert_gone(processes, within_s=5.0)
        assert answers(server) == found
        end_all(server, ())
    with LLM("demo", **SETTINGS) as llm:
        assert_same(found, expected_answers(llm))


@pytest.mark.slow
def test_groups_of_two_nodes_each(tmp_path: Path) -> None:
    """A process that ends takes its group along; its nodes come back, and it is made again as a whole."""
    flags = ("--data-parallel-size", "2", "--tensor-parallel-size", "2", "--restart-engine")
    with running_nodes(4, tmp_path, *flags) as (server, nodes, logs):
        found = both_answer(server)
        for rank in (1, 3, 2):  # a follower of either group, and the node that has the second engine process
            group = rank // 2
            victims = family(nodes[rank - 1].pid)[1:]
            kill(next((pid for pid in victims if is_engine(pid)), victims[0]))
            until_up(server, (group, 1 - group))
            until_up(server, (1, 1))
            assert_gone(victims, within_s=5.0)
            assert all(node.poll() is None for node in nodes)
        assert both_answer(server) == found
        assert all("Traceback" not in log.read_text() for log in (server.log, *logs))
        end_all(server, nodes)
    with LLM("demo", tensor_parallel_size=2, **SETTINGS) as llm:
        assert_same(found, expected_answers(llm))


@pytest.mark.slow
def test_the_end_of_the_front_end_ends_all_nodes(tmp_path: Path) -> None:
    flags = ("--data-parallel-size", "2", "--tensor-parallel-size", "2")
    with running_nodes(4, tmp_path, *flags) as (server, nodes, _):
        everyone = [pid for node in nodes for pid in family(node.pid)]
        kill(server.process.pid)
        first, *others = [node.wait(30) for node in nodes]
        assert others == [70, 70] and first in (0, 70), "the engine process beside the front end ends by itself"
        assert_gone(everyone, within_s=5.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("--seed", "4"), "in setting seed: 4 instead of 0"),
        (("--data-parallel-size", "1"), "data_parallel_size"),
        (("--max-num-seqs", "0"), "max_num_seqs"),
    ],
)
def test_a_node_that_differs(changes: tuple[str, ...], said: str, tmp_path: Path) -> None:
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_ports()))
    flags = ("--nnodes", "2", *address, *secret_flags(tmp_path), "--data-parallel-size", "2", *ENGINE)
    logs = [tmp_path / "log0", tmp_path / "log1"]
    with started((), logs[0], *flags, "--node-rank", "0") as first:
        with started((), logs[1], *flags, "--node-rank", "1", "--headless", *changes) as second:
            assert [first.wait(120), second.wait(120)] == [2, 2], logs[0].read_text() + logs[1].read_text()
    for log in logs:
        assert said in log.read_text() and "Traceback" not in log.read_text(), log.read_text()


@pytest.mark.parametrize(
    ("flags", "nnodes", "message"),
    [
        ("-dp 2", 3, "nnodes=3: each of the 2 replicas .* its 1 device equally; use one of 2, or 1 process for all"),
        ("--data-parallel-size=2 -tp 2", 3, "its 2 devices equally; use one of 2, 4, or 1 process for all"),
        ("--mesh data=3,stage=2,tensor=2", 9, "nnodes=9: each of the 3 replicas .* use one of 3, 6, 12, or 1 process"),
        ("-dp 4", 2, "nnodes=2: each of the 4 replicas .* use one of 4, or 1 process for all"),
    ],
)
@pytest.mark.parametrize("role", ["--node-rank 0", "--node-rank 1 --headless"])
def test_numbers_of_nodes_that_do_not_fit_the_replicas(
    flags: str, nnodes: int, message: str, role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--master-addr", "127.0.0.1", "--master-port", "9", *secret_flags(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "no such model", "--nnodes", str(nnodes), *place, *role.split(), *flags.split()])
    assert re.search(message, capsys.readouterr().err)
