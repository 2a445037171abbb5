"""What launchers tell each process in its environment: the number of processes, its rank, and where process 0 is."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from jaxserve.api.errors import ConfigError

LWS_PORT = 29500
"""Port of process 0 in a LeaderWorkerSet's pods, unless ``master_port`` is given."""
_FIRST_PORT, _NUM_PORTS = 10_000, 10_000
_PORTS_OF_STEP = 2  # the group's and that of JAX's coordinator
_JOB_STRIDE = 101  # so that the steps of a job, and jobs one after the other, do not meet
_LOOPBACK = "127.0.0.1"


def slurm_place(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that the step of a SLURM job gives: one process for each of its tasks.

    Only variables of the step count, which ``srun`` sets: those of the job are also in a batch script, which runs once.

    Raises:
        ConfigError: This is no task of a step.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise ConfigError(f"launcher=slurm: {missing[0]} is not set: start the processes with srun")
    job, step, count, rank = (_number("slurm", environment, name) for name in names[:4])
    is_one_node = environment.get("SLURM_STEP_NUM_NODES") == "1"
    return {
        "nnodes": count,
        "node_rank": rank,
        "master_addr": _LOOPBACK if is_one_node else first_host(environment["SLURM_STEP_NODELIST"]),
        "master_port": _FIRST_PORT + (job * _JOB_STRIDE + step) % (_NUM_PORTS // _PORTS_OF_STEP) * _PORTS_OF_STEP,
    }


def first_host(nodes: str) -> str:
    """Return the first of SLURM's list of nodes, such as ``rack[07-09,12]n1,login``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def lws_place(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that a LeaderWorkerSet gives its pods: one process in each.

    Raises:
        ConfigError: This is no pod of a LeaderWorkerSet.
    """
    names = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise ConfigError(f"launcher=lws: {missing[0]} is not set: this is no pod of a LeaderWorkerSet")
    return {
        "nnodes": _number("lws", environment, "LWS_GROUP_SIZE"),
        "node_rank": _number("lws", environment, "LWS_WORKER_INDEX"),
        "master_addr": environment["LWS_LEADER_ADDRESS"],
        "master_port": LWS_PORT,
    }


LAUNCHERS: Final[Mapping[str, Callable[[Mapping[str, str]], dict[str, Any]]]] = {"slurm": slurm_place, "lws": lws_place}
"""The settings that each launcher gives a process, from its environment."""


def launched_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a group with those that the launcher gives this process.

    Args:
        given: Settings by name, with ``launcher``.
        environment: The environment of this process.

    Raises:
        ConfigError: The launcher did not start this process, or ``given`` has what it says.
    """
    launcher = given["launcher"]
    found = LAUNCHERS[launcher](environment)
    twice = [name for name in ("nnodes", "node_rank", "master_addr", "headless") if given.get(name)]
    if twice:
        raise ConfigError(f"{twice[0]}: launcher={launcher} sets it")
    return {**found, "headless": found["node_rank"] > 0, **given}


def _number(launcher: str, environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not value.isdecimal():
        raise ConfigError(f"launcher={launcher}: {name}: expected a number, got {value!r}")
    return int(value)
