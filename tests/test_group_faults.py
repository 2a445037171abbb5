"""The script that repeats faults of groups: its rows are tests, and it goes on where it was stopped."""

import json
import re
import sys
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
    output, ran = tmp_path / "runs.jsonl", list[str]()

    def run_once(test: str) -> dict[str, str]:
        ran.append(test)
        return {"outcome": "failed" if test.endswith("test_a_stopped_follower") else "passed"}

    monkeypatch.setattr(group_faults, "run_once", run_once)
    output.write_text(json.dumps({"row": "killed", "number": 0, "outcome": "passed"}) + "\n")
    command = ["group_faults.py", "--row", "killed", "--row", "stopped", "--times", "2", "--output", str(output)]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit, match="1"):
            group_faults.main()
    assert [test.rpartition("_a_")[2] for test in ran] == ["stopped_follower", "killed_follower", "stopped_follower"]
    assert "killed: 2 passed\nstopped: 2 failed\n" in capsys.readouterr().out
