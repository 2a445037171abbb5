"""Faults of a group's processes one after another under load; ``scripts/soak_server.py`` does it for an hour."""

import asyncio

import pytest

from tests.group_server import running_group
from tests.hooks import run_group

pytestmark = pytest.mark.slow
FLAGS = (
    *("--mesh", "stage=2,tensor=2", "--step-timeout", "5", "--restart-engine", "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "128", "--max-model-len", "512", "--kv-cache-memory-bytes", str(16 << 20)),
)


def test_faults_of_a_group_one_after_another() -> None:
    """Killed and stopped processes: each request ends as it should or is told why, and the group comes back."""
    with running_group(*FLAGS, engine=False) as server:
        report, found = asyncio.run(run_group(server, duration_s=150.0, num_workers=4, interval_s=20.0))
        assert server.process.poll() is None
    assert not report.problems, "\n".join(report.lines())
    assert len(found["faults"]) > 1 and report.num_requests > 50
    assert any(counts.get("told") for counts in report.outcomes.values())
