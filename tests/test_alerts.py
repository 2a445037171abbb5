"""Alert rules for Prometheus: each is raised by what it is for; manifests are valid for Kubernetes."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
DEPLOY = REPOSITORY / "scripts" / "deploy"
RULES = DEPLOY / "alerts.yaml"
TESTS = Path(__file__).with_name("alerts_test.yaml")
"""For ``promtool test rules``."""


def alerts() -> list[dict[str, Any]]:
    """All rules."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_every_alert_has_a_test_and_says_what_it_is_about() -> None:
    tested = TESTS.read_text()
    assert len(alerts()) >= 10
    for rule in alerts():
        assert f'alertname="{rule["alert"]}"' in tested
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].endswith(".")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_alerts_are_raised_by_what_they_are_for(tmp_path: Path) -> None:
    for path in (RULES, TESTS):
        shutil.copy(path, tmp_path / path.name)
    for command in (["check", "rules", RULES.name], ["test", "rules", TESTS.name]):
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
def test_manifests_are_those_of_kubernetes(version: str) -> None:
    manifests = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert {manifest["kind"] for manifest in manifests} == {"Deployment", "Service", "PodDisruptionBudget"}
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    manifests[0]["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifests[0], version, strict=True)
