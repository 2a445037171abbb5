"""A minute of everything at once (failure list 28); ``scripts/soak_server.py`` takes as long as one likes."""

import asyncio

import pytest

from tests.group_server import running_group
from tests.hooks import run_group, run_soak
from tests.server_process import running_server

FLAGS = (
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "512"),
    *("--kv-cache-memory-bytes", str(16 << 20), "--stall-timeout", "5", "--max-num-queued-reqs", "256"),
)


@pytest.mark.slow
def test_a_minute_of_everything() -> None:
    """Cancels, crashing clients, slow readers, bad requests: nothing lost, nothing wrong, nothing grows."""
    with running_server(*FLAGS, engine=False) as server:
        report = asyncio.run(run_soak(server, duration_s=60.0))
    assert report.is_clean, "\n".join(report.lines())
    assert report.num_requests > 100


@pytest.mark.slow
def test_faults_of_a_group_one_after_another() -> None:
    """Killed and stopped processes: each request ends as it should or is told why, and the group comes back."""
    flags = ("--mesh", "stage=2,tensor=2", "--step-timeout", "5", "--restart-engine", *FLAGS)
    with running_group(*flags, engine=False) as server:
        report, found = asyncio.run(run_group(server, duration_s=150.0, num_workers=4, interval_s=20.0))
        assert server.process.poll() is None
    assert not report.problems, "\n".join(report.lines())
    assert len(found["faults"]) > 1 and report.num_requests > 50
    assert any(counts.get("told") for counts in report.outcomes.values())
