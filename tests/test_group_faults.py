"""The script that repeats faults of groups: its rows are tests, and it goes on where it was stopped."""

import json
import re
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from scripts import group_faults
from scripts.server_child import REPOSITORY
from tests.hooks import injected


@pytest.mark.parametrize("row", group_faults.ROWS)
def test_rows_are_tests(row: str) -> None:
    file, _, name = group_faults.ROWS[row].partition("::")
    function, _, case = name.rstrip("]").partition("[")
    text = (REPOSITORY / file).read_text()
    assert f"\ndef {function}(" in text
    assert not case or f"injected.{case.upper().replace('-', '_')}: [" in text


def test_every_switch_of_a_follower_has_a_row() -> None:
    switches = {value for name, value in vars(injected).items() if name.startswith("FOLLOWER_")}
    assert switches == {each for test in group_faults.ROWS.values() for each in re.findall(r"\[(follower-\w+)\]", test)}


def test_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, ran = tmp_path / "runs.jsonl", list[list[str]]()

    def run_together(rows: list[str], jobs: int) -> dict[str, dict[str, str]]:
        ran.append(rows)
        assert jobs == 2
        return {row: {"outcome": "failed" if row == "stopped" else "passed"} for row in rows}

    monkeypatch.setattr(group_faults, "run_together", run_together)
    output.write_text(json.dumps({"row": "killed", "number": 0, "outcome": "passed"}) + "\n")
    command = ["group_faults.py", "--row=killed", "--row=stopped", "--times=2", "--jobs=2", f"--output={output}"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit, match="1"):
            group_faults.main()
    assert ran == [["stopped"], ["killed", "stopped"]]
    assert "killed: 2 passed\nstopped: 2 failed\n" in capsys.readouterr().out


def test_outcomes_are_those_of_the_report() -> None:
    report = """<testsuite>
        <testcase classname="tests.a" name="test_one" time="1.5"/>
        <testcase classname="tests.a" name="test_two[x]" time="1"/>
        <testcase classname="tests.a" name="test_two[y]" time="2"><failure>no</failure></testcase>
        <testcase classname="tests.b" name="test_three" time="0"><skipped/></testcase>
        <testcase classname="tests.b" name="test_four" time="0"><error>never began</error></testcase>
    </testsuite>"""
    cases = list(xml.etree.ElementTree.fromstring(report).iter("testcase"))
    found = {test: group_faults.outcome_of(test, cases) for test in ("tests/a.py::test_one", "tests/a.py::test_two")}
    assert found["tests/a.py::test_one"] == {"outcome": "passed", "seconds": 1.5}
    assert found["tests/a.py::test_two"] == {"outcome": "failed", "seconds": 3.0, "output": "no"}
    assert group_faults.outcome_of("tests/a.py::test_two[x]", cases)["outcome"] == "passed"
    outcomes = [
        group_faults.outcome_of(f"tests/b.py::{name}", cases)["outcome"] for name in ("test_three", "test_four")
    ]
    assert outcomes == ["skipped", "failed"]
    assert group_faults.outcome_of("tests/b.py::test_five", cases)["outcome"] == "failed", "it never ran"
