"""A group whose processes are the tasks of a SLURM step, on a cluster of this machine alone."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve import LLM
from scripts.server_child import REPOSITORY
from tests.group_server import (
    answers,
    assert_gone,
    assert_same,
    expected_answers,
    family,
    grpc_answers,
    kill,
    post,
    secret_flags,
)
from tests.jaxserve.group.test_data_nodes import is_engine, until_up
from tests.launched_server import ENGINE, started, when_ready

pytestmark = pytest.mark.slow
SCRIPT = REPOSITORY / "scripts" / "slurm_node.sh"
FLAGS = ("--launcher", "slurm", "--tensor-parallel-size", "4", "--dtype", "float32", *ENGINE)
SRUN = ("srun", "--unbuffered", "--kill-on-bad-exit=1", "-n", "2")
LAST_WORDS_S = 60.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of SLURM's commands while the cluster runs."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("SLURM is installed and started by root on Debian")
    folder = tmp_path_factory.mktemp("slurm")
    found = subprocess.run(["bash", str(SCRIPT), "start", str(folder)], capture_output=True, text=True)
    if found.returncode and shutil.which("srun") is None:
        pytest.skip(f"SLURM cannot be installed: {found.stderr[-300:]}")
    assert found.returncode == 0, found.stderr
    yield {"SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run(["bash", str(SCRIPT), "stop", str(folder)], check=True)


@pytest.fixture
def secret(tmp_path: Path) -> tuple[str, str]:
    """The flag that names the group's secret."""
    return secret_flags(tmp_path)


def jobs(slurm: dict[str, str]) -> list[str]:
    """The ids of the jobs that SLURM has."""
    command = ["squeue", "-h", "-o", "%i"]
    return subprocess.run(command, env={**os.environ, **slurm}, capture_output=True, text=True).stdout.split()


def test_two_tasks_answer_as_one_process(slurm: dict[str, str], secret: tuple[str, str], tmp_path: Path) -> None:
    """SIGTERM to the step drains, and ends both with status 0."""
    log = tmp_path / "log"
    with started(SRUN, log, *FLAGS, *secret, environment=slurm) as process:
        server = when_ready(process, log)
        assert "all 2 processes have joined" in log.read_text()
        found, over_grpc = answers(server), grpc_answers(server)
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "dtype": "float32"}
        with LLM("demo", tensor_parallel_size=4, **settings) as llm:
            expected = expected_answers(llm)
        assert_same(found, expected)
        assert_same(over_grpc, expected)
        (job,) = jobs(slurm)
        subprocess.run(["scancel", "--signal=TERM", job], env={**os.environ, **slurm}, check=True)
        assert process.wait(LAST_WORDS_S) == 0, log.read_text()


def test_a_killed_task_ends_the_step(slurm: dict[str, str], secret: tuple[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(SRUN, log, *FLAGS, *secret, environment=slurm) as process:
        server = when_ready(process, log)
        follower = next(line for line in log.read_text().splitlines() if "have joined" in line).rpartition("process ")[
            2
        ]
        os.kill(int(follower.rstrip(")")), 9)
        while post(server, "/v1/completions", {"prompt": "12+30=", "max_tokens": 8})[0] == 200:
            time.sleep(0.05)
        assert process.wait(LAST_WORDS_S) != 0
        assert "the group ends: rank 1 (host " in log.read_text(), log.read_text()
    while jobs(slurm):
        time.sleep(0.2)


def test_a_killed_engine_leaves_the_other_group(slurm: dict[str, str], secret: tuple[str, str], tmp_path: Path) -> None:
    """Its task starts it again; where the task itself is killed, and SLURM leaves the step, the other group goes on."""
    log = tmp_path / "log"
    words = ("srun", "--unbuffered", "--kill-on-bad-exit=0", "-n", "2")
    flags = ("--launcher", "slurm", "--data-parallel-size", "2", "--restart-engine", *ENGINE, *secret)
    with started(words, log, *flags, environment=slurm) as process:
        server = when_ready(process, log)
        found, over_grpc = answers(server), grpc_answers(server)
        (node,) = map(int, re.findall(r"rank 1 \(host \S+, process (\d+)\) has joined", log.read_text()))
        task = int(Path(f"/proc/{node}/stat").read_text().rpartition(")")[2].split()[1])
        kill(next(filter(is_engine, family(task))))
        until_up(server, (1, 0))
        until_up(server, (1, 1))
        processes = family(task)
        assert any(map(is_engine, processes))
        kill(task)
        until_up(server, (1, 0))
        assert_gone(processes, within_s=10.0)
        assert answers(server) == found
        assert "group 0: the engine process" not in log.read_text()
        (job,) = jobs(slurm)
        subprocess.run(["scancel", "--signal=TERM", job], env={**os.environ, **slurm}, check=True)
        assert process.wait(LAST_WORDS_S) == 128 + signal.SIGKILL, log.read_text()
    while jobs(slurm):
        time.sleep(0.2)
    with LLM("demo", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256) as llm:
        expected = expected_answers(llm)
    assert_same(found, expected)
    assert_same(over_grpc, expected)


def test_a_batch_script_is_no_task(slurm: dict[str, str], secret: tuple[str, str], tmp_path: Path) -> None:
    """There the variables of the job are set, and those of the step are not."""
    log, script = tmp_path / "log", tmp_path / "script"
    script.write_text(f"#!/bin/sh\nexec {shutil.which('python3')} -c 'import os; print(sorted(os.environ))'\n")
    command = ["sbatch", "--wait", "-o", str(log), str(script)]
    subprocess.run(command, env={**os.environ, **slurm}, check=True, timeout=LAST_WORDS_S, capture_output=True)
    assert "'SLURM_JOB_ID'" in log.read_text() and "'SLURM_STEP_NUM_TASKS'" not in log.read_text()
