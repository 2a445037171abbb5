"""The arrangement of the tests themselves: quarters of the slow ones, and files that became dear."""

import json
import re

from pallas_kernels.registry import OPERATIONS
from tests.slow_cases import KERNELS_IN_GATE, SLOW_CASES, SlowCases, kernel_cases, pattern_of, unmatched
from tests.suite import FAST_LIMIT_S, FILE_COSTS, NUM_QUARTERS, quarter_of, read_costs, risen


def test_every_slow_test_is_in_one_quarter_and_tests_of_one_fixture_stay_together() -> None:
    names = [f"tests/test_a.py::test_{i}" for i in range(400)]
    sizes = [sum(quarter_of(name) == quarter for name in names) for quarter in range(NUM_QUARTERS)]
    assert sum(sizes) == 400 and min(sizes) > 50
    first = quarter_of("tests/test_a.py::test_one[stage=2]")
    assert quarter_of("tests/test_a.py::test_other[stage=2]") == first
    assert {quarter_of(f"tests/test_a.py::test_one[stage={i}]") for i in range(40)} == set(range(NUM_QUARTERS))


def test_files_that_cost_twice_as_much_are_named_whatever_the_machine() -> None:
    expected = {"a.py": 10.0, "b.py": 20.0, "c.py": 30.0, "quick.py": 0.5}
    slow_machine = {path: 3 * cost for path, cost in expected.items()}
    assert risen(slow_machine, expected) == []
    (line,) = risen({**slow_machine, "b.py": 200.0}, expected)
    assert line == "cost more than doubled: b.py took 66.7 s, 20.0 s in tests/file_costs.json"
    (line,) = risen({**slow_machine, "new.py": 30.0}, expected)
    assert line.startswith("cost more than doubled: new.py took 10.0 s, 0.0 s")
    assert risen({**slow_machine, "quick.py": 9.0}, expected) == []  # 3 s: cheap files double by chance
    assert risen({"a.py": 90.0}, expected) == []  # a part of the tests says nothing about shares


def test_an_entry_that_matches_nothing_is_found() -> None:
    assert unmatched([]) == []
    for each in SLOW_CASES:
        re.compile(pattern_of(each))
        assert each.covered_by
    file = f"tests/{SLOW_CASES[0].file}"
    assert SLOW_CASES[0] in unmatched([f"{file}::test_renamed[a]"])
    assert unmatched([f"{file}::test_renamed[a]", f"{file}::test_without_data[NOTSET]"]) == []
    case = SlowCases("a/test_b.py", "test_c", "d(-e)?", "f")
    assert re.fullmatch(pattern_of(case), "tests/a/test_b.py::test_c[d-e]")
    assert not re.fullmatch(pattern_of(case), "tests/a/test_b.py::test_c[d-f]")


def test_the_gate_compares_each_kernel_of_this_machine_with_its_reference() -> None:
    """What is kept is not slow, and what is not kept is."""
    for_cpus = {f"{name}-{row}" for name, rows in OPERATIONS.items() for row in rows if row in ("native", "xla")}
    assert for_cpus <= KERNELS_IN_GATE.keys() and OPERATIONS.keys() == {
        row.partition("-")[0] for row in KERNELS_IN_GATE
    }
    names = [
        f"tests/pallas_kernels/test_kernels.py::test_matches_reference[{row}-" for row in ("linear-xla", "mamba2-xla")
    ]
    patterns = [pattern_of(cases) for cases in kernel_cases()]
    slow = {
        name + case
        for name in names
        for case in ("residual]", "ragged]", "no_such]")
        if any(re.fullmatch(pattern, name + case) for pattern in patterns)
    }
    assert slow == {f"{names[0]}ragged]", f"{names[0]}no_such]", f"{names[1]}residual]", f"{names[1]}no_such]"}


def test_the_table_of_costs_has_cheap_and_dear_files() -> None:
    costs = read_costs()
    assert json.loads(FILE_COSTS.read_text()) == costs
    assert min(costs.values()) < FAST_LIMIT_S < max(costs.values())
