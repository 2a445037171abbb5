"""Lets faults of a group's processes happen again and again: each row is a test, run a number of times.

    python scripts/group_faults.py --row killed --times 20 --output group_faults.jsonl
    python scripts/group_faults.py --times 5 --output group_faults.jsonl

Writes a JSON line for each run, and counts them at the end. A run that is already in the file is not repeated, so that
the script may be stopped and started again. Exits with status 1 if a run has failed.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

REPOSITORY = Path(__file__).resolve().parent.parent
_GROUP, _NODES = "tests/faults/test_group.py", "tests/jaxserve/group/test_nodes.py"
_MOVES = "tests/jaxserve/group/test_group_moves.py"
ROWS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "killed": f"{_GROUP}::test_a_killed_follower",
        "killed-in-a-move": f"{_GROUP}::test_a_follower_killed_while_the_group_moves",
        "exits": f"{_GROUP}::test_a_follower_that_fails[follower-exits]",
        "stopped": f"{_GROUP}::test_a_stopped_follower",
        "out-of-memory": f"{_GROUP}::test_a_follower_that_fails[follower-exhausts]",
        "collective-hangs": f"{_GROUP}::test_a_follower_that_fails[follower-stalls]",
        "hangs": f"{_GROUP}::test_a_follower_that_fails[follower-hangs]",
        "fails": f"{_GROUP}::test_a_follower_that_fails[follower-fails]",
        "misreads": f"{_GROUP}::test_a_follower_that_fails[follower-misreads]",
        "diverges": f"{_GROUP}::test_a_follower_that_fails[follower-diverges]",
        "rank-0-stopped": f"{_GROUP}::test_a_stopped_engine_of_rank_0",
        "rank-0-killed": f"{_GROUP}::test_a_killed_engine_of_rank_0",
        "launcher-killed": f"{_GROUP}::test_a_killed_launcher",
        "drained": f"{_GROUP}::test_a_signal_to_the_launcher_drains",
        "follower-signalled": f"{_GROUP}::test_a_signal_to_a_follower_is_left_to_rank_0",
        "restarted": f"{_GROUP}::test_a_group_that_is_started_again",
        "restarted-after-a-move": f"{_MOVES}::test_a_group_that_has_moved_starts_again_where_it_was",
        "link-down": "tests/faults/test_hosts.py::test_two_hosts_and_a_link_that_goes_down",
        "slow-link": "tests/faults/test_hosts.py::test_a_slow_link_is_no_fault",
        "one-by-one": f"{_NODES}::test_processes_started_one_by_one",
        "parent-killed": f"{_NODES}::test_a_killed_process_takes_along_what_it_started",
        "missing": f"{_NODES}::test_a_process_that_does_not_come",
        "late": f"{_NODES}::test_a_process_that_comes_too_late",
        "one-too-many": f"{_NODES}::test_a_process_that_comes_to_a_running_group",
        "differs": f"{_NODES}::test_processes_that_differ",
        "strangers": "tests/jaxserve/group/test_leader.py::test_only_processes_of_the_group_join",
        "port-in-use": "tests/jaxserve/group/test_leader.py::test_a_port_in_use",
        "certificates": "tests/jaxserve/group/test_secure_link.py::test_strangers_are_refused_by_name",
        "slurm-killed": "tests/jaxserve/group/test_slurm.py::test_a_killed_task_ends_the_step",
        "slurm-group-killed": "tests/jaxserve/group/test_slurm.py::test_a_killed_engine_leaves_the_other_group",
        "ray-killed": "tests/jaxserve/group/test_ray.py::test_a_gang_that_is_made_again",
        "ray-group-killed": "tests/jaxserve/group/test_ray.py::test_the_end_of_one_group_leaves_the_others",
    }
)
"""The test of each row."""


def main() -> None:
    """Read the command line, run what is missing, and print the counts."""
    parser = argparse.ArgumentParser(description="Lets faults of a group's processes happen again and again.")
    parser.add_argument("--row", action="append", choices=ROWS, help="which fault (default: all); may be repeated")
    parser.add_argument("--times", type=int, default=20, help="runs of each row (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="tests that run at a time (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="file for a JSON line of each run")
    options = parser.parse_args()
    rows: list[str] = options.row or list(ROWS)
    repeat(rows, options.times, options.output, options.jobs)
    found = [run for run in read_runs(options.output) if run["row"] in rows]
    for row in rows:
        counts = collections.Counter(run["outcome"] for run in found if run["row"] == row)
        print(f"{row}: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    sys.exit(int(any(run["outcome"] == "failed" for run in found)))


def repeat(rows: list[str], times: int, output: Path, jobs: int) -> None:
    """Run each row until the file has this many runs of it: in turns, and those of a turn in one pytest."""
    done = collections.Counter(run["row"] for run in read_runs(output))
    for number in range(times):
        missing = [row for row in rows if done[row] <= number]
        for row, found in run_together(missing, jobs).items() if missing else ():
            with output.open("a") as file:
                file.write(json.dumps({"row": row, "number": number, **found}) + "\n")


def read_runs(output: Path) -> list[dict[str, Any]]:
    """Return the runs in a file; none if there is no file."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def run_together(rows: Sequence[str], jobs: int) -> dict[str, dict[str, Any]]:
    """Run the tests of rows; return of each its outcome, the seconds it took, and for a failure what was printed."""
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"]
        command += ["-n", str(jobs), "--dist", "loadfile", f"--junitxml={report}"]
        ran = subprocess.run(
            [*command, *dict.fromkeys(ROWS[row] for row in rows)], cwd=REPOSITORY, capture_output=True, text=True
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {ran.returncode}:\n{ran.stdout[-4000:]}{ran.stderr[-4000:]}")
        cases = list(xml.etree.ElementTree.parse(report).getroot().iter("testcase"))
    return {row: {**outcome_of(ROWS[row], cases), "load": load} for row in rows}


def outcome_of(test: str, cases: Iterable[xml.etree.ElementTree.Element]) -> dict[str, Any]:
    """Return what pytest's report says of a test with all its parameters.

    Args:
        test: Its id.
        cases: The ``testcase`` elements of the report.
    """
    path, _, name = test.partition("::")
    module = path.removesuffix(".py").replace("/", ".")
    own = [
        case
        for case in cases
        if case.get("classname") == module and (case.get("name") == name or case.get("name", "").startswith(f"{name}["))
    ]
    problems = [problem for case in own for kind in ("failure", "error") for problem in case.iter(kind)]
    is_skipped = all(case.find("skipped") is not None for case in own)
    outcome = "failed" if problems or not own else "skipped" if is_skipped else "passed"
    found = {"outcome": outcome, "seconds": round(sum(float(case.get("time", 0)) for case in own), 1)}
    return found | ({"output": "".join(each.text or "" for each in problems)[-4000:]} if problems else {})


if __name__ == "__main__":
    main()
