"""`jaxserve/PARAMETERS.md` says what the fields say now."""

import dataclasses

from jaxserve.cli_arguments import field_docs
from scripts.make_parameter_docs import PAGE, SECTIONS, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "stale: run python scripts/make_parameter_docs.py"


def test_every_field_has_its_line() -> None:
    lines = page().splitlines()
    for cls, _ in SECTIONS:
        for field in dataclasses.fields(cls):
            assert field_docs(cls)[field.name], f"{cls.__name__}.{field.name} has no text"
            assert any(line.startswith(f"| `{field.name}` | `") for line in lines)


def test_cells_are_intact() -> None:
    """A bar within a cell would make one more than the heading has."""
    num_bars, is_inside = 0, False
    for line in page().splitlines():
        found = line.replace(r"\|", "").count("|") if line.startswith("|") else 0
        if found:
            num_bars = num_bars if is_inside else found
            assert found == num_bars >= 4, line
        is_inside = bool(found)


def test_a_line() -> None:
    assert "| `beam_width` | `int` | required | Sequences kept at each step and returned, 1 to 16384. |" in page()
    assert r"| `seed` | `int \| None` | `None` | 0 to 2**63 - 1 for a reproducible request" in page()
