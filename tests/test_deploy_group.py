"""The files in ``scripts/deploy`` for engines over several pods or nodes fit the resource and the server."""

import argparse
import copy
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jaxserve.server import command
from scripts.server_child import REPOSITORY

DEPLOY = REPOSITORY / "scripts" / "deploy"
_ENGINE_END_S = 12  # until the engine process is ended by force


def manifests() -> dict[str, Any]:
    """The manifests by kind."""
    found = yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text())
    return {manifest["kind"]: manifest for manifest in found}


def template() -> dict[str, Any]:
    return manifests()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]


def check(manifest: dict[str, Any]) -> None:
    """Check it against the schema, which knows no other fields than the manifest has."""
    schema = yaml.safe_load((DEPLOY / "leaderworkerset_schema.yaml").read_text())
    jsonschema.Draft202012Validator(schema).validate({"spec": manifest["spec"]})


def test_it_is_a_leader_worker_set() -> None:
    manifest = manifests()["LeaderWorkerSet"]
    assert manifest["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    check(manifest)
    assert template()["restartPolicy"] == "RecreateGroupOnPodRestart"
    for change in ({"size": "two"}, {"restartPolicy": "Never"}, {"pods": 2}):
        wrong = copy.deepcopy(manifest)
        wrong["spec"]["leaderWorkerTemplate"] |= change
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


@pytest.mark.parametrize("index", [0, 1])
def test_flags_are_those_of_the_server(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones serve in the leader, and follow in the other pod."""
    (tmp_path / "keys.yaml").write_text("[{name: a, key: b}]")
    size = template()["size"]
    for name, value in (("LEADER_ADDRESS", "a-0.a.b"), ("GROUP_SIZE", size), ("WORKER_INDEX", index)):
        monkeypatch.setenv(f"LWS_{name}", str(value))
    pod = template()["workerTemplate" if index else "leaderTemplate"]["spec"]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = [each.replace("/keys/", f"{tmp_path}/") for each in pod["containers"][0]["args"]]
    engine, config, group = command.serve_arguments(parser.parse_args(given))
    assert engine["tensor_parallel_size"] % size == 0
    assert (group.nnodes, group.node_rank, group.headless) == (size, index, bool(index))
    assert pod["terminationGracePeriodSeconds"] > config.drain_delay + config.shutdown_timeout + _ENGINE_END_S
    mounts = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    for path in (group.group_secret_file, group.group_certfile, group.group_keyfile, group.group_ca_certs):
        assert any(str(path).startswith(f"{mount}/") for mount in mounts)
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }


def test_only_the_leader_has_probes_and_is_reached() -> None:
    pods = {role: template()[f"{role}Template"] for role in ("leader", "worker")}
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= pods["leader"]["spec"]["containers"][0].keys()
    assert not [name for name in pods["worker"]["spec"]["containers"][0] if name.endswith("Probe") or name == "ports"]
    assert manifests()["Service"]["spec"]["selector"].items() <= pods["leader"]["metadata"]["labels"].items()
    assert not manifests()["Service"]["spec"]["selector"].items() <= pods["worker"]["metadata"]["labels"].items()


@pytest.mark.parametrize("script", ["scripts/deploy/slurm.sbatch", "scripts/slurm_node.sh"])
def test_scripts_are_bash(script: str) -> None:
    subprocess.run(["bash", "-n", str(REPOSITORY / script)], check=True)


@pytest.mark.parametrize(("status", "is_queued_again"), [(0, False), (2, False), (70, True)])
def test_a_batch_job_is_queued_again_after_a_failure(status: int, is_queued_again: bool, tmp_path: Path) -> None:
    """Its step gets the flags and a secret that nobody else can read, which is removed at the end."""
    for name, body in (
        ("srun", f'echo "$@" > {tmp_path}/asked; stat -c %a%s "${{@: -1}}" > {tmp_path}/secret; exit {status}'),
        ("scontrol", f'echo "$@" > {tmp_path}/again'),
    ):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JAXSERVE_SHARED": str(tmp_path), "SLURM_JOB_ID": "7"}
    ran = subprocess.run(
        ["bash", str(DEPLOY / "slurm.sbatch"), "demo", "--port", "1"], env=environment, capture_output=True, timeout=60
    )
    assert ran.returncode == status, ran.stderr
    asked = (tmp_path / "asked").read_text()
    assert "--kill-on-bad-exit=1" in asked and "jaxserve serve demo --port 1 --launcher slurm" in asked
    assert (tmp_path / "secret").read_text() == "60032\n"
    assert (tmp_path / "again").exists() == is_queued_again
    assert not re.findall(r"jaxserve-group\.\S+", " ".join(os.listdir(tmp_path)))


@pytest.mark.parametrize(
    ("flags", "kills"),
    [
        ("--mesh tensor=2", 1),
        ("--data-parallel-size 2", 0),
        ("--data-parallel-size=2 --restart-engine", 0),
        ("-dp 2", 0),
        ("--mesh data=2,tensor=2", 0),
    ],
)
def test_a_task_that_ends_ends_its_group_alone(flags: str, kills: int, tmp_path: Path) -> None:
    """The tasks of one group end together; those of several do not."""
    (tmp_path / "srun").write_text(f'#!/usr/bin/env bash\necho "$@" > {tmp_path}/asked\n')
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JAXSERVE_SHARED": str(tmp_path), "SLURM_JOB_ID": "7"}
    script = ["bash", str(DEPLOY / "slurm.sbatch"), "demo", *flags.split()]
    subprocess.run(script, env=environment, capture_output=True, timeout=60, check=True)
    assert f"--kill-on-bad-exit={kills} " in (tmp_path / "asked").read_text()
