"""How much of prompts the prefix cache reuses with few and with many states of recurrent layers; the command."""

import random
import sys
from pathlib import Path

import pytest

from jaxserve.bench.traces import Trace, TraceRequest
from scripts.simulate_state_cache import Cache, Counts, Turn, agent, families, main, trace_counts


def replay(turns: list[Turn], num_states: int) -> Counts:
    """The counts of requests, with enough pages."""
    return Cache(num_states, 16, 9000).replay(turns)


@pytest.mark.parametrize(("num_states", "least"), [(20, 0.98), (2000, 0.999)])
def test_two_interleaved_families_reuse_what_they_share(num_states: int, least: float) -> None:
    counts = replay(families(20, random.Random(1)), num_states)
    assert counts.shared == 9 * 1600 + 9 * 1500
    assert counts.reused >= least * counts.shared


@pytest.mark.parametrize("num_generation_tokens", [5, 40])
def test_turns_whose_template_drops_thoughts_compute_little_twice(num_generation_tokens: int) -> None:
    """Answers end in other turns' prompts in another form: the state before what began them serves."""
    turns = agent(10, random.Random(2), num_thoughts=150, num_generation_tokens=num_generation_tokens)
    counts = replay(turns, 20)
    assert counts.computed <= 1.01 * (counts.prompt - counts.shared)
    unknown = replay([turn._replace(num_generation_tokens=-1) for turn in turns], 20)
    assert unknown.reused <= counts.reused
    if num_generation_tokens > 16:
        assert unknown.computed > 1.05 * counts.computed


def test_a_trace_shares_its_full_pieces() -> None:
    names = [(1, 2, 3), (1, 2, 4), (1, 2, 5), (6, 2, 7)]
    requests = [TraceRequest(0.0, 1100, 5, pieces) for pieces in names]
    counts = trace_counts(Trace("made", requests), Cache(50, 512, 100))
    assert counts == Counts(4400, 2 * 1024, 2 * 1024, 4400 - 2 * 1024)
    without = trace_counts(Trace("made", requests), Cache(0, 512, 100))
    assert without.reused == 0 and without.shared == counts.shared


def test_the_command_prints_what_was_reused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n' * 2)
    arguments = ["families", "mooncake", "--requests", "2", "--trace", str(trace), "--page-size", "512"]
    monkeypatch.setattr(sys, "argv", ["simulate_state_cache.py", *arguments])
    main()
    printed = capsys.readouterr().out
    assert "families: 2 requests, room for 10000 states: reused 0.00% of 0 shared tokens" in printed
    assert "mooncake: 2 requests, room for 10000 states: reused 100.00% of 512 shared tokens" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["mooncake"], "mooncake needs --trace"), (["agent", "--states", "-1"], "--states must be at least 0, got -1")],
)
def test_wrong_flags_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate_state_cache.py", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
