"""`jaxserve/PARAMETERS.md` says what the fields say now."""

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from jaxserve.cli_arguments import field_docs


@pytest.fixture(scope="module")
def script(repository: Path) -> ModuleType:
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location("make_parameter_docs", repository / "scripts/make_parameter_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script: ModuleType) -> None:
    assert script.PAGE.read_text() == script.page(), "stale: run python scripts/make_parameter_docs.py"


def test_every_field_has_its_line(script: ModuleType) -> None:
    lines = script.page().splitlines()
    for cls, _ in script.SECTIONS:
        for field in dataclasses.fields(cls):
            assert field_docs(cls)[field.name], f"{cls.__name__}.{field.name} has no text"
            assert any(line.startswith(f"| `{field.name}` | `") for line in lines)


def test_cells_are_intact(script: ModuleType) -> None:
    """A bar within a cell would make a fifth one."""
    for line in script.page().splitlines():
        if line.startswith("|"):
            assert line.replace(r"\|", "").count("|") == 5, line


def test_a_line(script: ModuleType) -> None:
    assert (
        "| `beam_width` | `int` | required | Sequences kept at each step and returned, 1 to 16384. |" in script.page()
    )
    assert r"| `seed` | `int \| None` | `None` | 0 to 2**63 - 1 for a reproducible request" in script.page()
