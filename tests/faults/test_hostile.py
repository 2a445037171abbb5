"""Half a minute of a hostile API key; ``scripts/soak_server.py --mix hostile`` takes as long as one likes."""

import asyncio
from pathlib import Path

import pytest

from scripts.server_child import as_flags
from scripts.soak.two_keys import write_auth_file
from scripts.soak_server import HOSTILE_SERVER, run_two_keys
from tests.server_process import running_server

FLAGS = (
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "512"),
    *("--kv-cache-memory-bytes", str(16 << 20)),
)


@pytest.mark.slow
def test_half_a_minute_of_a_hostile_key(tmp_path: Path) -> None:
    """Whatever one key sends, another one gets its responses, memory is bounded, and afterwards nothing is left.

    Times are not compared here, since other tests may be running.
    """
    flags = (*FLAGS, "--auth-file", str(write_auth_file(tmp_path)), *as_flags(HOSTILE_SERVER))
    with running_server(*flags, engine=False) as server:
        report, _ = asyncio.run(run_two_keys(server, duration_s=30.0))
    problems = [problem for problem in report.problems if not problem.startswith("a first token came after")]
    assert not problems, "\n".join(report.lines())
    assert report.outcomes["measured http"]["completed"] > 5
