"""Arrange a run of the tests: which of them, in which order, until when, and what each file cost.

``tests/file_costs.json`` holds the seconds that each test file takes. The dearest files run first, so that both workers
finish together; ``--fast`` runs the cheap ones; and a run of the whole gate names the files whose cost has doubled.
``scripts/test_costs.py`` writes the table.
"""

import collections
import json
import shutil
import statistics
import time
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.slow_cases import mark_slow_cases, unmatched

FILE_COSTS = Path(__file__).resolve().parent / "file_costs.json"
FAST_LIMIT_S = 2.0
"""The longest that a file of ``--fast`` takes."""
NUM_QUARTERS = 4
MAX_PROGRAM_BYTES = 1 << 30
NOT_REACHED = "not reached in time"
_LEAST_NAMED_S = 4.0  # a cheaper file doubles by chance


def add_options(parser: pytest.Parser) -> None:
    """Add the options of this module to the command line."""
    parser.addoption("--fast", action="store_true", help="run only the files that take a short time")
    parser.addoption("--slow-quarter", type=int, help="run only this quarter of the tests, 0 to 3; use with -m slow")
    parser.addoption("--deadline", type=float, help="Unix time after which no more tests begin; the rest is printed")


def read_costs() -> dict[str, float]:
    """Return the seconds that each test file takes, by its path from the repository's root."""
    return json.loads(FILE_COSTS.read_text()) if FILE_COSTS.exists() else {}


def empty_if_large(programs: Path) -> None:
    """Empty the folder of compiled programs, which every change of a program adds to, once it is large."""
    if sum(file.stat().st_size for file in programs.rglob("*") if file.is_file()) > MAX_PROGRAM_BYTES:
        shutil.rmtree(programs, ignore_errors=True)


def file_of(node_id: str) -> str:
    """Return the path in the id of a test."""
    return node_id.partition("::")[0]


def quarter_of(node_id: str) -> int:
    """Return the quarter of a slow test, 0 to 3; tests of a file with the same parameters may share a fixture."""
    path, _, name = node_id.partition("::")
    function, _, parameters = name.partition("[")
    return zlib.crc32(f"{path} {parameters or function}".encode()) % NUM_QUARTERS


def arrange(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases, drop the tests that the options leave out, and order the rest by the cost of their files."""
    mark_slow_cases(items)
    if not any("::" in argument for argument in config.args):
        for each in unmatched([item.nodeid for item in items]):
            raise pytest.UsageError(f"tests/slow_cases.py: no test matches {each}")
    costs, quarter = read_costs(), config.getoption("--slow-quarter")
    kept = items[:]
    if config.getoption("--fast"):
        kept = [item for item in kept if costs.get(file_of(item.nodeid), 0.0) <= FAST_LIMIT_S]
    if quarter is not None:
        kept = [item for item in kept if quarter_of(item.nodeid) == quarter]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=list({*items} - {*kept}))
    items[:] = sorted(kept, key=lambda item: -costs.get(file_of(item.nodeid), 0.0))


def check_deadline(config: pytest.Config) -> None:
    """Skip the current test if the deadline is over."""
    deadline = config.getoption("--deadline")
    if deadline is not None and time.time() > deadline:
        pytest.skip(NOT_REACHED)


class CostReport:
    """A plugin that adds up what each file costs, and says at the end what a reader should know of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._not_reached: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        path = file_of(report.nodeid)
        self.seconds[path] += report.duration
        self._not_reached[path] += report.skipped and NOT_REACHED in str(report.longrepr)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tests that were not reached, and the files that became dear."""
        for path, count in (+self._not_reached).items():
            terminalreporter.write_line(f"{NOT_REACHED}: {count} tests of {path}")
        for line in risen(self.seconds, read_costs()):
            terminalreporter.write_line(line)


def risen(seconds: Mapping[str, float], expected: Mapping[str, float]) -> list[str]:
    """Return a line for each file that took more than twice its share of a run of all files.

    Args:
        seconds: What each file took in this run.
        expected: The committed costs. This machine may be slower than theirs: by the median of the ratios.
    """
    dear = [path for path, cost in expected.items() if cost >= _LEAST_NAMED_S]
    if not dear or any(path not in seconds for path in dear):
        return []
    slowness = statistics.median(seconds[path] / expected[path] for path in dear)
    lines = []
    for path, spent in sorted(seconds.items(), key=lambda each: -each[1]):
        before, now = expected.get(path, 0.0), spent / slowness
        if now > 2 * max(before, _LEAST_NAMED_S / 2):
            lines.append(f"cost more than doubled: {path} took {now:.1f} s, {before:.1f} s in tests/file_costs.json")
    return lines
