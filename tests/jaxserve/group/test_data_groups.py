"""Two groups behind one front end: the answers of one engine, and the death of one of them."""

import argparse
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, RequestError, RequestOutput, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.cli import main
from jaxserve.client import AdminClient, Client
from jaxserve.group.replicas import mesh_sizes
from jaxserve.server.command import add_arguments, serve_arguments
from jaxserve.server.engine_groups import group_arguments
from jaxserve.server.replica_group import own_flags
from scripts.server_child import RunningServer
from tests.faults.test_monitoring import alerts, assert_served, panels
from tests.group_server import (
    answers,
    assert_gone,
    assert_same,
    expected_answers,
    family,
    kill,
    post,
    running_group,
    text_of,
)
from tests.server_process import PROGRAMS_CACHE

FLAGS = ("--data-parallel-size", "2", "--dtype", "float32")
LONG = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}


def engines(server: RunningServer) -> list[int]:
    """Process ids of the engines."""
    found = family(server.process.pid)
    return [pid for pid in found if b"jaxserve.server.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def ask_both(server: RunningServer) -> list[Any]:
    """Statuses and messages of four clients of long requests, so that both groups have some."""
    found: list[Any] = []

    def ask(number: int) -> None:
        while True:
            status, response = post(server, "/v1/completions", {**LONG, "prompt": f"{number}+30="})
            if status != 200 or len(engines(server)) < 2:
                found.append((status, response.get("error", {}).get("message", "")))
                return

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for client in clients:
        client.start()
    while text_of(server, "/metrics").count("jaxserve:num_requests_running{") < 2:
        time.sleep(0.05)
    kill(engines(server)[1])
    for client in clients:
        client.join()
    return found


@pytest.mark.slow
def test_two_groups_answer_as_one_engine_and_one_outlives_the_other() -> None:
    with running_group(*FLAGS) as server:
        found = answers(server)
        assert len(engines(server)) == 2
        for engine in ("0", "1"):
            (line,) = [
                line
                for line in text_of(server, "/metrics").splitlines()
                if line.startswith("jaxserve:steps_total{") and f'engine="{engine}"' in line
            ]
            assert float(line.split()[-1]) > 0
        for status, message in ask_both(server):
            assert status == 200 or (status == 503 and "was killed by SIGKILL" in message), message
        assert len(engines(server)) == 1
        assert [
            f'jaxserve:group_up{{model_name="demo",engine="{index}"}} {is_up}' in text_of(server, "/metrics")
            for index, is_up in ((0, 1), (1, 0))
        ] == [True, True]
        assert answers(server) == found
        assert_served(server, [*alerts(), *panels()])
        kill(engines(server)[0])
        assert server.wait() == 70
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"}
    with LLM("demo", compilation_cache_dir=str(PROGRAMS_CACHE), **settings) as llm:
        assert_same(found, expected_answers(llm))


@pytest.mark.slow
def test_a_group_is_started_again() -> None:
    with running_group(*FLAGS, "--restart-engine") as server:
        first = engines(server)
        kill(first[0])
        while (
            len(now := engines(server)) < 2 or "group 0: the engine process was started" not in server.log.read_text()
        ):
            assert post(server, "/v1/completions", {"prompt": "12+30=", "max_tokens": 2})[0] in (200, 503)
        assert first[1] in now and first[0] not in now


@pytest.mark.slow
def test_operators_reach_both_groups() -> None:
    """Abort, the prefix cache, a move that is refused, and a drain."""
    prompt = "count 1 2 3 4 5 6 7 8 9 10 11 12:"

    def begin() -> list[Iterator[RequestOutput]]:
        """Two long requests, the second of which goes to the group that has none; their first tokens are here."""
        streams = [client.stream(prompt, SamplingParams(**LONG)) for _ in range(2)]
        return [itertools.chain([next(stream)], stream) for stream in streams]

    def num_cached() -> list[int]:
        """Tokens of the prompt that the prefix cache of each group had."""
        return [max(output.num_cached_tokens or 0 for output in stream) for stream in begin()]

    with running_group(*FLAGS) as server, AdminClient(server.admin) as admin, Client(server.grpc) as client:
        num_cached()
        assert min(num_cached()) > 0
        admin.reset_prefix_cache()
        assert num_cached() == [0, 0]
        streams = begin()
        load = admin.load()
        assert load.num_running == 2 and [(each.is_up, each.num_running) for each in load.groups] == [(True, 1)] * 2
        firsts = [next(stream) for stream in streams]
        names = [first.request_id for first in firsts]
        assert {*admin.abort([*names, "nobody's"])} == {*names}
        for stream in streams:
            *_, last = stream
            assert last.outputs[0].finish_reason == "abort"
        with pytest.raises(RequestError, match="has 1 replicas, .* as 2 groups of processes, which neither merge nor"):
            admin.reshard("tensor=2")
        streams = begin()
        admin.drain(timeout_s=60.0)
        assert post(server, "/v1/completions", {"prompt": "12+30="})[0] == 503
        for stream in streams:
            assert sum(len(output.outputs[0].token_ids) for output in stream) == LONG["max_tokens"]
        assert server.wait() == 0


@pytest.mark.slow
def test_groups_of_two_processes_each() -> None:
    """They give what one process gives; a dead process ends its group alone, which is made again as a whole."""
    flags = (*FLAGS, "--tensor-parallel-size", "2", "--restart-engine")
    with running_group(*flags, nproc=4) as server:
        found = answers(server)
        first = {group: members(server, group) for group in (0, 1)}
        assert all(len(pids) == 2 for pids in first.values())
        assert len({port_of(pids[1]) for pids in first.values()}) == 2, "each group is a JAX job of its own"
        kill_one(server, 1, rank=1)
        log = server.log.read_text()
        assert f"group 1: rank 1 (process {first[1][1]}) was killed by SIGKILL" in log
        assert "group 1: the engine process ended: rank 1 of its processes ended" in log
        kill_one(server, 0, rank=0)
        assert "group 0: the engine process ended: it was killed by SIGKILL" in server.log.read_text()
        assert answers(server) == found
        everyone = family(server.process.pid)
        kill(server.process.pid, signal.SIGTERM)
        assert server.wait() == 0
        assert_gone(everyone, within_s=5.0)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"}
    with LLM("demo", compilation_cache_dir=str(PROGRAMS_CACHE), tensor_parallel_size=2, **settings) as llm:
        assert_same(found, expected_answers(llm))


@pytest.mark.slow
def test_groups_of_two_processes_move_while_they_serve() -> None:
    """From tensor parallelism to stages and back, one after the other: requests in both go on with their tokens."""
    prompts = [f"{number}+30=" for number in range(4)]

    def ask(number: int, found: dict[int, Any]) -> None:
        found[number] = post(server, "/v1/completions", {**LONG, "prompt": prompts[number]})

    with running_group(*FLAGS, "--tensor-parallel-size", "2", nproc=4) as server, AdminClient(server.admin) as admin:
        expected = dict[int, Any]()
        for number in range(4):
            ask(number, expected)
        for mesh in ("data=2,stage=2", "data=2,tensor=2"):
            found = dict[int, Any]()
            clients = [threading.Thread(target=ask, args=(number, found)) for number in range(4)]
            for client in clients:
                client.start()
            while text_of(server, "/metrics").count("jaxserve:num_requests_running{") < 2:
                time.sleep(0.05)
            report = admin.reshard(mesh)
            for client in clients:
                client.join()
            assert ",".join(f"{axis.name}={axis.size}" for axis in report.to_mesh).startswith(
                mesh.partition(",tensor")[0]
            )
            assert report.num_programs > 0 and report.pause_s > 0 and report.weight_bytes > 0
            for number in range(4):
                assert found[number][1]["choices"] == expected[number][1]["choices"], mesh
        log = server.log.read_text()
        assert "Traceback" not in log and log.count("is ready with") == 2


def kill_one(server: RunningServer, group: int, rank: int) -> None:
    """Kill a process of a group: only its group ends, and is made again with other processes and ports."""
    old, other = members(server, group), members(server, 1 - group)
    port = port_of(old[1])
    kill(old[rank])
    while f"group {group}: the engine process was started again" not in server.log.read_text():
        status, response = post(server, "/v1/completions", {"prompt": "12+30=", "max_tokens": 2})
        assert status in (200, 503), response
    assert_gone(old, within_s=0.0)
    new = members(server, group)
    assert len(new) == 2 and not {*new} & {*old} and port_of(new[1]) != port
    assert members(server, 1 - group) == other


def members(server: RunningServer, group: int) -> list[int]:
    """Process ids of a group of two, in the order of ranks. Its seed tells it from the other one."""
    follower = [pid for pid in family(server.process.pid) if f"--seed={group}\0".encode() in command_of(pid)]
    engine = [pid for pid in engines(server) if variable(pid, "CUDA_VISIBLE_DEVICES") == str(2 * group)]
    return [*engine, *follower]


def port_of(follower: int) -> str:
    """The port at which a follower has found process 0."""
    return re.findall(rb"--master-port=(\d+)", command_of(follower))[0].decode()


def command_of(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def variable(pid: int, name: str) -> str:
    """A variable of a process's environment at its start."""
    parts = [each.partition("=") for each in Path(f"/proc/{pid}/environ").read_text().split("\0")]
    return {found: value for found, _, value in parts}[name]


def test_each_group_has_its_own_devices_and_seed() -> None:
    found = group_arguments({"mesh": "data=2,tensor=2", "seed": 3}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert [[each["CUDA_VISIBLE_DEVICES"] for each in all_] for _, all_ in found] == [["4,5"], ["6,7"]]
    assert [(each["data_parallel_size"], each["tensor_parallel_size"], each["seed"]) for each, _ in found] == [
        (1, 2, 3),
        (1, 2, 4),
    ]
    found = group_arguments({"data_parallel_size": 2}, {})
    assert [[each["CUDA_VISIBLE_DEVICES"] for each in all_] for _, all_ in found] == [["0"], ["1"]]
    with pytest.raises(ConfigError, match="need 2 GPUs, but CUDA_VISIBLE_DEVICES names 1"):
        group_arguments({"data_parallel_size": 2}, {"CUDA_VISIBLE_DEVICES": "0"})


def test_the_processes_of_a_group_share_its_devices() -> None:
    arguments = {"data_parallel_size": 2, "tensor_parallel_size": 4}
    found = group_arguments(arguments, {}, num_processes=2)
    assert [[each["CUDA_VISIBLE_DEVICES"] for each in all_] for _, all_ in found] == [["0,1", "2,3"], ["4,5", "6,7"]]
    with pytest.raises(
        ConfigError, match="processes_per_group=3: they cannot share the 4 devices .* use one of 1, 2, 4"
    ):
        group_arguments(arguments, {}, num_processes=3)


def test_the_command_of_a_follower_is_that_of_its_group_alone() -> None:
    (_, _), (own, _) = group_arguments({"mesh": "data=2,stage=2", "seed": 3}, {})
    command = ["serve", "demo", "--mesh", "data=2,stage=2", "--seed", "3", "--processes-per-group=2", *own_flags(own)]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments, _, group = serve_arguments(parser.parse_args(command[1:]))
    same = {"mesh": "data=1,stage=2,tensor=1,expert=1", "seed": 4, "data_parallel_size": 1, "model": "demo"}
    assert arguments == same and group.replicas(command, arguments) is None
    assert EngineConfig.from_arguments(**own, model="demo").mesh == EngineConfig.from_arguments(**arguments).mesh


@pytest.mark.parametrize(
    ("flags", "nproc", "message"),
    [
        ("-dp 2", 3, "nproc=3: each of the 2 replicas .* its 1 device equally; use one of 2, or 1 process for all"),
        ("--data-parallel-size=2 -tp 2", 3, "its 2 devices equally; use one of 2, 4, or 1 process for all"),
        ("--mesh data=3,stage=2,tensor=2", 9, "nproc=9: each of the 3 replicas .* use one of 3, 6, 12, or 1 process"),
        ("-dp 4", 2, "nproc=2: each of the 4 replicas .* use one of 4, or 1 process for all"),
    ],
)
def test_numbers_of_processes_that_do_not_fit_the_replicas(
    flags: str, nproc: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--nproc", str(nproc), "serve", "no such model", *flags.split()])
    assert re.search(message, capsys.readouterr().err)


def test_numbers_of_processes_that_fit_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(_: str, command: Sequence[str]) -> None:
        raise LookupError(command[-1])

    monkeypatch.setattr(os, "execv", execute)
    for nproc, flags, each in ((2, "-dp 2", 1), (4, "-dp 2 -tp 2", 2), (12, "--mesh data=3,stage=2,tensor=4", 4)):
        with pytest.raises(LookupError, match=f"--processes-per-group={each}"):
            main(["launch", "--nproc", str(nproc), "serve", "demo", *flags.split()])
    assert mesh_sizes(["-dp", "x"]) is None and mesh_sizes(["-dp", "0"]) is None  # serve says what is wrong
