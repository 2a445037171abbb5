"""The manifests in ``scripts/deploy`` name flags, paths and times that fit the server."""

import argparse
import re
from pathlib import Path
from typing import Any

import yaml

from jaxserve.server import command
from tests.jaxserve.server.http_fakes import make_server

DEPLOY = Path(__file__).resolve().parent.parent / "scripts" / "deploy"
_ENGINE_END_S = 12  # until the engine process is ended by force


def manifests() -> dict[str, Any]:
    """The manifests by kind."""
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    return {manifest["kind"]: manifest for manifest in found}


def container() -> dict[str, Any]:
    return manifests()["Deployment"]["spec"]["template"]["spec"]["containers"][0]


def test_flags_are_those_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("[{name: a, key: b}]")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = [each.replace("/keys/", f"{tmp_path}/") for each in container()["args"]]
    engine, config, _ = command.serve_arguments(parser.parse_args(arguments))
    assert engine["model"] == "demo"
    grace_s = manifests()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > config.drain_delay + config.shutdown_timeout + _ENGINE_END_S
    probe = container()["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= config.startup_timeout
    probe = container()["readinessProbe"]
    assert config.drain_delay > 2 * probe["periodSeconds"] * probe["failureThreshold"]


def test_probes_need_no_key_and_ports_are_those_of_the_server() -> None:
    server = make_server(api_key=["secret"])
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container()[name]["httpGet"]
        assert server.get(probe["path"]).status == 200
        assert probe["port"] == "http"
    assert ports == {"http": server.frontend.config.port, "grpc": server.frontend.config.listen_ports.grpc}


def test_the_container_runs_without_rights_and_writes_to_its_volumes_alone() -> None:
    context, pod = container()["securityContext"], manifests()["Deployment"]["spec"]["template"]["spec"]
    assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
    assert pod["securityContext"]["runAsNonRoot"] is True
    image = (DEPLOY / "Containerfile").read_text()
    (user,) = re.findall(r"^USER (\d+)$", image, re.MULTILINE)
    assert int(user) == pod["securityContext"]["runAsUser"]
    (cache,) = re.findall(r"XDG_CACHE_HOME=(\S+)", image)
    assert {mount["mountPath"] for mount in container()["volumeMounts"] if not mount.get("readOnly")} == {cache, "/tmp"}


def test_selectors_agree() -> None:
    labels = manifests()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifests()["Service"]["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert manifests()[kind]["spec"]["selector"]["matchLabels"] == labels
