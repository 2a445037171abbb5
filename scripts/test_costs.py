"""Print what the tests cost, by what they do and by file, and keep the table of each file's cost.

    bash scripts/check.sh --profile-costs costs.json       run the tests and measure
    python scripts/test_costs.py costs.json                the tables
    python scripts/test_costs.py costs.json --write        also write tests/file_costs.json, after a run of all tests

Seconds are those of the workers, of which two run beside each other. The first line says how long this machine takes
for a loop of five million additions, by which times of different machines compare.
"""

import argparse
import collections
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.suite import FILE_COSTS, file_of  # noqa: E402  (after the path that it lies on)

Costs = Mapping[str, Mapping[str, Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("costs", type=Path, help="the file that --profile-costs wrote")
    parser.add_argument("--top", type=int, default=40, help="number of files and tests in the tables")
    parser.add_argument("--write", action="store_true", help="write tests/file_costs.json")
    options = parser.parse_args(arguments)
    costs: Costs = json.loads(options.costs.read_text())
    print(f"5 million additions take {loop_seconds():.2f} s on this machine\n")
    print(kinds_table(costs))
    print(files_table(costs, options.top))
    print(tests_table(costs, options.top))
    if options.write:
        files = {path: round(spent, 1) for path, spent in sorted(by_file(costs).items())}
        FILE_COSTS.write_text(json.dumps(files, indent=1) + "\n")


def loop_seconds() -> float:
    """Return how long ``python -c`` takes for a loop of five million additions."""
    loop = "total = 0\nfor _ in range(5_000_000): total += 1"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", loop], check=True)
    return time.perf_counter() - began


def by_file(costs: Costs) -> collections.Counter[str]:
    """Return the seconds of each file."""
    seconds: collections.Counter[str] = collections.Counter()
    for test, cost in costs.items():
        seconds[file_of(test)] += cost["wall"]
    return seconds


def kinds_table(costs: Costs) -> str:
    """Return the table of what the time was spent on."""
    kinds: collections.Counter[str] = collections.Counter()
    for cost in costs.values():
        kinds.update(cost["kinds"])
    wall, cpu = (sum(cost[name] for cost in costs.values()) for name in ("wall", "cpu"))
    lines = [
        f"{len(costs)} tests, {wall:.0f} s, of which {cpu:.0f} s of CPU time of the workers and their processes",
        "",
    ]
    lines += ["| spent on | s | share |", "|---|---|---|"]
    lines += [f"| {kind} | {spent:.0f} | {spent / wall:.0%} |" for kind, spent in kinds.most_common()]
    return "\n".join([*lines, ""])


def files_table(costs: Costs, top: int) -> str:
    """Return the table of the dearest files, with what each spends most on."""
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    counts = collections.Counter(file_of(test) for test in costs)
    for test, cost in costs.items():
        kinds[file_of(test)].update(cost["kinds"])
    lines = ["| file | tests | s | most of it |", "|---|---|---|---|"]
    for path, spent in by_file(costs).most_common(top):
        most = ", ".join(f"{kind} {share:.0f}" for kind, share in kinds[path].most_common(4))
        lines.append(f"| {path} | {counts[path]} | {spent:.1f} | {most} |")
    return "\n".join([*lines, ""])


def tests_table(costs: Costs, top: int) -> str:
    """Return the table of the dearest tests."""
    dear = sorted(costs.items(), key=lambda each: -each[1]["wall"])[:top]
    lines = [f"| {test} | {cost['wall']:.1f} |" for test, cost in dear]
    return "\n".join(["| test | s |", "|---|---|", *lines, ""])


if __name__ == "__main__":
    main()
