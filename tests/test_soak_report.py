"""The judgement of ``scripts/soak_server.py``: what counts as grown, stuck or wrong."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.soak.report import LIMITS, MIB, QUIET, ZERO, Report, Sample, rise
from scripts.soak.watch import tree_memory, unconnected_descriptors

STILL = {**{limit.name: 100.0 for limit in LIMITS}, **dict.fromkeys(ZERO, 0.0), "compiles_after_ready_total": 0.0}


def judged(samples: list[dict[str, float]], **after: float) -> Report:
    """The report of a run with these states, a second apart."""
    report = Report(before=dict(STILL), after={**STILL, **after})
    report.samples = [Sample(float(i), {**STILL, **values}) for i, values in enumerate(samples)]
    report.judge()
    return report


def test_what_stays_the_same_is_clean() -> None:
    report = judged([{}] * 30)
    assert report.is_clean
    assert report.rises["front_fds"] == pytest.approx({"mean": 100.0, "rise": 0.0, "allowed": 8.0})
    assert report.lines()[-1] == "clean"


def test_growth_in_the_warm_up_does_not_count() -> None:
    assert judged([{"front_fds": 100.0 + 9 * min(i, 10)} for i in range(31)]).is_clean


def test_a_leak_is_found_in_noise() -> None:
    noise = (3.0, -2.0, 1.0, -3.0, 2.0, 0.0, -1.0)
    still = [{"front_fds": 100 + noise[i % 7]} for i in range(60)]
    leaking = [{"front_fds": 100 + noise[i % 7] + i / 4} for i in range(60)]
    assert judged(still).is_clean
    report = judged(leaking)
    assert report.num_problems == 1
    assert report.problems[0].startswith("front_fds rose by ")
    assert report.rises["front_fds"]["rise"] == pytest.approx(10, abs=0.7)


def test_memory_may_rise_by_a_share_of_it() -> None:
    def samples(total: float) -> list[dict[str, float]]:
        return [{"engine_rss_bytes": 1000 * MIB + total * MIB * i / 29} for i in range(30)]

    assert judged(samples(60)).is_clean
    assert not judged(samples(100)).is_clean


@pytest.mark.parametrize("name", [*QUIET, *ZERO])
def test_what_is_left_at_the_end(name: str) -> None:
    report = judged([{}] * 9, **{name: STILL[name] + 10})
    assert report.num_problems == 1
    assert report.problems[0].startswith(name)


def test_programs_compiled_late() -> None:
    report = judged([{}] * 9, compiles_after_ready_total=2.0)
    assert report.problems == ["2 programs were compiled after the start"]


def test_few_samples_say_nothing() -> None:
    assert rise([], "front_fds") == {"mean": 0.0, "rise": 0.0}
    assert rise([Sample(0.0, {"x": 1.0}), Sample(1.0, {"x": 9.0})], "x")["rise"] == 0.0


def test_problems_are_counted_and_the_first_are_kept() -> None:
    report = Report()
    for i in range(60):
        report.complain(f"{i}")
        report.note("stream", "completed" if i % 2 else "wrong")
    assert (report.num_problems, len(report.problems), report.num_requests) == (60, 50, 60)
    found: Any = json.loads(json.dumps(report.as_json()))
    assert found["outcomes"] == {"stream": {"wrong": 30, "completed": 30}}
    assert found["is_clean"] is False


CHILDREN = """
import subprocess
held = b"1" * (100 << 20)
print("ready", flush=True)
for _ in range(100):
    subprocess.run(["true"], check=True)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory of other processes is read from /proc")
def test_memory_is_counted_once_while_a_child_starts() -> None:
    """Until it has started its own program, a child has the memory of its parent."""
    with subprocess.Popen([sys.executable, "-c", CHILDREN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        most = alone = 0.0
        while process.poll() is None:
            found = [one.rss_bytes for one in tree_memory(process.pid)]
            most, alone = max(most, sum(found)), max([alone, *found])
    assert 100 * MIB < most < alone + 50 * MIB


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_connection_counts_as_a_descriptor_once_the_other_side_has_left(family: int, host: str) -> None:
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"{host} is not there: {error}")
    at_rest = unconnected_descriptors(os.getpid())
    clients = [socket.create_connection(listener.getsockname()[:2]) for _ in range(3)]
    accepted = [listener.accept()[0] for _ in clients]
    with listener:
        assert unconnected_descriptors(os.getpid()) == at_rest
        clients[0].close()
        assert accepted[0].recv(1) == b""
        assert unconnected_descriptors(os.getpid()) == at_rest + 1
        accepted[0].close()
        assert unconnected_descriptors(os.getpid()) == at_rest
    for connection in (*clients, *accepted):
        connection.close()
