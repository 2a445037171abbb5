"""Alert rules and the dashboard ask a real server for metrics that it has."""

import json
import re

import httpx2
import pytest
import yaml

from scripts.server_child import REPOSITORY, RunningServer
from tests.faults.talk import text


def alerts() -> list[str]:
    """Expressions of the alert rules."""
    rules = yaml.safe_load((REPOSITORY / "scripts" / "deploy" / "alerts.yaml").read_text())
    return [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def panels() -> list[str]:
    """Expressions of the Grafana dashboard."""
    board = json.loads((REPOSITORY / "scripts" / "grafana_dashboard.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("expressions", [alerts(), panels()], ids=["alerts", "dashboard"])
def test_every_metric_is_one_of_a_real_server(server: RunningServer, expressions: list[str]) -> None:
    assert text(server, "1+1=", max_tokens=2)
    assert_served(server, [expression for expression in expressions if "group_up" not in expression])


def assert_served(server: RunningServer, expressions: list[str]) -> None:
    """Every metric of some expressions is one of a server."""
    lines = httpx2.get(server.http + "/metrics", timeout=60).text.splitlines()
    declared = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    assert len(declared) > 50
    assert expressions
    for expression in expressions:
        asked = set(re.findall(r"(?:jaxserve:|process_)[a-z0-9_]+", expression))
        assert asked, expression
        missing = {name for name in asked if not {name, re.sub("_(bucket|sum|count)$", "", name)} & declared}
        assert not missing, expression
