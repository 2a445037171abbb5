"""Known holes of dependencies: neither what is installed nor the oldest version that may be has one of them."""

import datetime
import importlib.metadata
import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.make_sbom import make_sbom

REPOSITORY = Path(__file__).resolve().parent.parent
LIST: dict[str, Any] = json.loads((REPOSITORY / "scripts" / "advisories.json").read_text())


def floors(*extras: str) -> dict[str, Version]:
    """The lowest version of each dependency that pyproject.toml accepts, those of some extras included."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = itertools.chain(*(project["optional-dependencies"][extra] for extra in extras))
    found = map(Requirement, (*project["dependencies"], *optional))
    return {
        canonicalize_name(one.name): Version(bound.version)
        for one in found
        for bound in one.specifier
        if bound.operator in (">=", "==")
    }


@pytest.mark.parametrize("advisory", LIST["advisories"], ids=lambda advisory: advisory["id"])
def test_no_version_has_a_known_hole(advisory: dict[str, str]) -> None:
    package, fixed = advisory["package"], Version(advisory["fixed"])
    assert floors("otel", "ray")[package] >= fixed, f"raise the floor of {package} in pyproject.toml: {advisory}"
    try:
        installed = Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        assert package not in floors()
        pytest.skip(f"{package} is of an extra that is not installed")
    assert installed >= fixed, advisory


def test_the_list_is_dated_and_in_order() -> None:
    assert datetime.date.fromisoformat(LIST["date"]) >= datetime.date(2026, 11, 28)
    keys = [(one["package"], Version(one["fixed"]), one["id"]) for one in LIST["advisories"]]
    assert keys == sorted(keys)


def test_the_bill_of_materials_has_every_dependency() -> None:
    sbom = make_sbom()
    names = {component["name"] for component in sbom["components"]}
    assert set(floors()) <= names
    assert "pytest" not in names
    references = {component["bom-ref"] for component in sbom["components"]} | {sbom["metadata"]["component"]["bom-ref"]}
    for entry in sbom["dependencies"]:
        assert {entry["ref"], *entry["dependsOn"]} <= references
    assert {one["name"] for one in make_sbom(["otel"])["components"]} > names
