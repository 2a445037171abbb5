"""Frozen tests once more, with drafts in every engine: stories, traces, request options, request mixes and faults.

Those of ``tests/jaxserve/test_determinism.py`` make steps without an engine, so that none has drafts.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests import drafting
from tests.suite import check_deadline

pytestmark = pytest.mark.slow

SUITES: Mapping[str, str] = MappingProxyType(
    {
        "stories": "tests/jaxserve/test_engine_stories.py",
        "trace": "tests/jaxserve/test_trace.py",
        "request features": "tests/jaxserve/test_request_features.py",
        "request mix": "tests/jaxserve/test_request_mix.py",
        "faults": "tests/faults",
    }
)
LEFT_OUT: Mapping[str, tuple[str, ...]] = MappingProxyType(dict.fromkeys(("suffix", "draft_model", "mtp"), ("trace",)))
"""A suite that expects 20 preemptions and mostly decode rows, both of which drafts save where they are right often.
With ``mtp`` there are 22 preemptions on one device and fewer on four."""
COUNT_STEPS = (
    "tests/jaxserve/test_engine_stories.py::test_streamed_text_adds_up_to_the_whole",
    "tests/jaxserve/test_engine_stories.py::test_metrics_count_tokens_and_requests",
)
"""Tests that expect a step for each token, of which drafts save some."""
COUNT_STEPS_OF_RIGHT_DRAFTS = (
    "tests/faults/test_drain.py::test_sigterm_lets_requests_end_and_takes_no_more",
    "tests/faults/test_drain.py::test_sigterm_behind_a_drain_cuts_nothing",
)
"""Tests that expect 24 tokens to take more than 8 steps, which they do not if the model drafts for itself."""
COUNTS_PREEMPTIONS = ("tests/jaxserve/test_trace.py::test_a_trace_with_too_few_pages[stage=2,tensor=2]",)
"""A test that expects 20 preemptions; with an EAGLE-3 head there are 14 on four devices."""
FEATURES = SUITES["request features"]
COUNT_PARTS_OF_PAGES = (
    f"{FEATURES}::test_a_prompt_seen_before_is_found_and_the_answer_is_the_same",
    f"{FEATURES}::test_hits_are_counted_in_tokens",
    f"{FEATURES}::test_the_next_turn_finds_the_answer_of_the_last",
    f"{FEATURES}::test_without_caching_nothing_is_kept_but_samples_still_share",
    f"{FEATURES}::test_samples_of_a_request_share_its_prompt",
    f"{FEATURES}::test_beams_share_pages",
)
"""Tests that expect prefix hits to end within a page, where a draft head has no state of the last token."""
CASES = [(suite, method) for suite in SUITES for method in drafting.METHODS if suite not in LEFT_OUT.get(method, ())]


@pytest.mark.parametrize(("suite", "method"), CASES)
def test_a_suite_passes_with_drafts(suite: str, method: str, repository: Path, pytestconfig: pytest.Config) -> None:
    """Where there is a deadline, tests of the suite that it leaves no time for do not begin."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", SUITES[suite], "--speculation", method]
    command += ["-m", "slow or not slow"]
    if pytestconfig.getoption("--deadline") is not None:
        command += ["--deadline", str(pytestconfig.getoption("--deadline"))]
    left_out = COUNT_STEPS + (COUNT_PARTS_OF_PAGES if method in ("eagle3", "mtp") else ())
    left_out += COUNT_STEPS_OF_RIGHT_DRAFTS if method == "draft_model" else ()
    left_out += COUNTS_PREEMPTIONS if method == "eagle3" else ()
    without_worker = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [*command, *(f"--deselect={test}" for test in left_out)],
        cwd=repository,
        env=without_worker,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    check_deadline(pytestconfig)
