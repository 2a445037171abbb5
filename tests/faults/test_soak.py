"""A minute of everything at once (failure list 28); ``scripts/soak_server.py`` takes as long as one likes."""

import asyncio

import pytest

from tests.hooks import run_soak
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
