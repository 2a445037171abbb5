"""What processes of a group learn from the environment that a launcher gives them."""

import os
import subprocess
import sys
from typing import Any

import pytest

from jaxserve.api.errors import ConfigError
from jaxserve.cli import main
from jaxserve.group.launchers import first_host
from jaxserve.group.settings import GroupConfig

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "a[07-09],b",
    "SLURM_STEP_NUM_NODES": "3",
}
POD = {"LWS_LEADER_ADDRESS": "group-0.group.space", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0"}


def settings(launcher: str, environment: dict[str, str], **given: Any) -> GroupConfig:
    """The settings of a process that a launcher has started."""
    given = {"launcher": launcher, "group_secret_file": "secret", **given}
    return GroupConfig.from_arguments(given, is_insecure=True, environment=environment)


def test_a_task_of_a_slurm_step() -> None:
    found = settings("slurm", STEP)
    assert (found.nnodes, found.node_rank, found.master_addr, found.headless) == (3, 2, "a07", True)
    assert not settings("slurm", {**STEP, "SLURM_PROCID": "0"}).headless
    assert settings("slurm", {**STEP, "SLURM_STEP_NUM_NODES": "1"}).master_addr == "127.0.0.1"
    assert settings("slurm", {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}).is_alone
    assert settings("slurm", STEP, master_port=4321).master_port == 4321


def test_the_ports_of_a_job_s_steps_differ() -> None:
    steps = [{**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in (77, 78) for step in range(100)]
    ports = [settings("slurm", step).master_port or 0 for step in steps]
    assert len({*ports}) == 200 and all(10_000 <= port < 20_000 and port % 2 == 0 for port in ports)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("vm", "vm"), ("a,b", "a"), ("a[1,3-5],b", "a1"), ("a[007-120]", "a007"), ("r[01-02]n[3,7]-ib,x", "r01n3-ib")],
)
def test_the_first_of_slurm_s_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_pod_of_a_leader_worker_set() -> None:
    found = settings("lws", POD)
    assert (found.nnodes, found.node_rank, found.headless) == (2, 0, False)
    assert (found.master_addr, found.master_port) == ("group-0.group.space", 29500)
    assert settings("lws", {**POD, "LWS_WORKER_INDEX": "1"}).headless


@pytest.mark.parametrize(
    ("launcher", "environment", "given", "message"),
    [
        ("slurm", {}, {}, "launcher=slurm: SLURM_JOB_ID is not set: start the processes with srun"),
        ("slurm", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, {}, "SLURM_STEP_ID is not set"),
        ("slurm", {**STEP, "SLURM_PROCID": "x"}, {}, "launcher=slurm: SLURM_PROCID: expected a number, got 'x'"),
        ("slurm", {**STEP, "SLURM_PROCID": "3"}, {}, "node_rank: expected 0 to 2 for nnodes=3, got 3"),
        ("slurm", STEP, {"nnodes": 3}, "nnodes: launcher=slurm sets it"),
        ("slurm", STEP, {"headless": True}, "headless: launcher=slurm sets it"),
        ("slurm", STEP, {"group_secret_file": None}, "nnodes=3 requires group_secret_file"),
        ("lws", STEP, {}, "launcher=lws: LWS_LEADER_ADDRESS is not set: this is no pod of a LeaderWorkerSet"),
        ("lws", POD, {"master_addr": "a"}, "master_addr: launcher=lws sets it"),
    ],
)
def test_launchers_that_are_not_there(
    launcher: str, environment: dict[str, str], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(launcher, environment, **given)


def test_a_process_that_ends_with_the_one_that_started_it() -> None:
    reading, writing = os.pipe()
    program = "import sys, time; from jaxserve.group.launch import end_with; end_with(int(sys.argv[1])); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(reading)], pass_fds=(reading,), stderr=subprocess.PIPE
    ) as process:
        os.close(reading)
        os.close(writing)
        assert process.wait(50) == 70 and process.stderr is not None
        assert b"the process that started this one has ended" in process.stderr.read()


def test_a_descriptor_of_a_parent_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--nnodes=2", "--node-rank=1", "--headless", "--master-addr=127.0.0.1", "--master-port=9"]
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "demo", *place, "--group-secret-file=secret", "--parent-fd=9999"])
    assert "parent_fd: cannot read descriptor 9999: Bad file descriptor" in capsys.readouterr().err


def test_serve_outside_srun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in STEP:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "demo", "--launcher", "slurm"])
    assert "start the processes with srun" in capsys.readouterr().err
