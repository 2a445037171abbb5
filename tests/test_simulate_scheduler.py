"""The scheduler's simulator: times that a simple cost model makes plain, hits, preemptions, priorities, the command."""

import collections
import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.traces import Trace, TraceRequest, cut_trace, pieces, read_trace, scale_trace
from scripts.scheduler_simulation import CostModel, Settings, Simulation, trace_reuse
from scripts.simulate_scheduler import PRESETS, host_cost, lines_of, main, simulate
from tests.plan_rows import Row, decode_rows, make_plan

SECOND = CostModel(1.0, prefill_token_s=0.0, decode_row_s=0.0, context_token_s=0.0, pair_s=0.0, host_s=0.0)
SMALL = Settings(SECOND, num_pages=100, page_size=4, max_num_seqs=1, max_num_batched_tokens=64, depth=1)
MEASURED = ("host_us", "wall_s", "steps_per_wall_s")


def trace_of(*requests: tuple[float, int, int], shared: tuple[tuple[int, ...], ...] = ()) -> Trace:
    """Requests by arrival, prompt and output length."""
    made = [TraceRequest(float(arrival), prompt, output) for arrival, prompt, output in requests]
    if shared:
        made = [request._replace(piece_ids=names) for request, names in zip(made, shared, strict=True)]
    return Trace("made", made, piece_tokens=4)


def run(trace: Trace, rate: float = 1.0, settings: Settings = SMALL, **changes: Any) -> Simulation:
    simulation = Simulation(trace, rate, dataclasses.replace(settings, **changes))
    simulation.run()
    return simulation


def simulated(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name not in MEASURED}


# ---------------------------------------------------------------- times


def test_a_step_costs_the_sum_of_its_parts() -> None:
    cost = CostModel(step_s=1e6, prefill_token_s=1e4, decode_row_s=1e2, context_token_s=1.0, pair_s=1e-3, host_s=0.1)
    plan = make_plan(0, [], [], [*decode_rows([0, 1], [9, 4]), Row(2, 6, [7, 7, 7], 1)])
    context = 10 + 5 + 9
    pairs = 7 + 8 + 9
    assert cost.seconds(plan, [9, 4, 6]) == pytest.approx(1e6 + 3e4 + 2e2 + context + pairs * 1e-3)


@pytest.mark.parametrize("depth", [1, 2])
def test_one_slot_serves_in_turn(depth: int) -> None:
    simulation = run(trace_of((0, 4, 3), (0.5, 4, 2), (9, 4, 1)), depth=depth)
    assert simulation.scheduled_s == [0, 3, 9]
    assert simulation.first_s == [1, 4, 10]
    assert simulation.last_s == [3, 5, 10]


def test_rates_divide_arrivals() -> None:
    simulation = run(trace_of((0, 4, 3), (20, 4, 2)), rate=10.0)
    assert simulation.arrival_s == [0, 2]
    assert simulation.scheduled_s == [0, 3]


def test_a_request_that_comes_in_a_step_joins_the_next_one_that_is_not_planned() -> None:
    trace = trace_of((0, 4, 9), (2.5, 4, 1))
    assert run(trace, max_num_seqs=2, depth=1).first_s == [1, 4]
    assert run(trace, max_num_seqs=2, depth=2).first_s == [1, 5]
    idle = run(trace_of((0, 4, 1), (0.25, 4, 1)), max_num_seqs=2, depth=2)
    assert idle.scheduled_s == [0, 0.25], "the second step was still to be planned"
    assert idle.first_s == [1, 2]


def test_the_hosts_part_counts_where_nothing_hides_it() -> None:
    cost = dataclasses.replace(SECOND, host_s=0.5)
    assert run(trace_of((0, 4, 3)), cost=cost, depth=1).last_s == [4.5]
    assert run(trace_of((0, 4, 3)), cost=cost, depth=2).last_s == [3.5], "only the first step waits for it"


def test_long_prompts_come_in_chunks() -> None:
    simulation = run(trace_of((0, 10, 2)), max_num_batched_tokens=4)
    assert simulation.first_s == [3]
    assert simulation.last_s == [4]


def test_figures_are_those_of_the_times() -> None:
    _, figures = simulate(trace_of((0, 4, 3), (0, 4, 3)), 1.0, SMALL)
    assert figures["queue_s"] == pytest.approx({"mean": 1.5, "p50": 1.5, "p90": 2.7, "p99": 2.97})
    assert figures["ttft_s"] == pytest.approx({"mean": 2.5, "p50": 2.5, "p90": 3.7, "p99": 3.97})
    assert figures["tpot_s"]["p99"] == pytest.approx(1.0)
    assert figures["e2e_s"]["mean"] == pytest.approx(4.5)
    assert figures["steps"] == figures["duration_s"] == 6
    assert figures["output_tokens_per_s"] == pytest.approx(1.0)
    assert figures["total_tokens_per_s"] == pytest.approx(14 / 6)
    assert figures["requests_per_s"] == pytest.approx(1 / 3)
    # Each token is learned in a step; the last one of a sequence frees what it holds.
    assert figures["running"] == {"mean": pytest.approx(4 / 6), "peak": 1}
    assert figures["waiting"] == {"mean": pytest.approx(3 / 6), "peak": 1}
    assert figures["kv_use"]["peak"] == pytest.approx(2 / 100)
    assert "queue  mean 1.5 s, p50 1.5 s" in "\n".join(lines_of(figures))
    _, figures = simulate(trace_of((0, 4, 1)), 1.0, SMALL)
    assert figures["tpot_s"] == {}
    assert "TPOT   none" in "\n".join(lines_of(figures))


# ---------------------------------------------------------------- preemptions, priorities, seeds


def test_preemptions_come_with_too_few_pages() -> None:
    trace = trace_of((0, 4, 8), (0, 4, 8))
    plenty = run(trace, max_num_seqs=2, num_pages=6)
    assert plenty.scheduler.num_preemptions == 0
    assert plenty.last_s == [8, 8]
    scarce = run(trace, max_num_seqs=2, num_pages=4)
    assert scarce.scheduler.num_preemptions == 1
    assert scarce.last_s[0] == 8 < scarce.last_s[1]
    assert scarce.scheduler.allocator.usage == 0


def test_high_priorities_wait_less_and_seeds_repeat(shared_data: Path) -> None:
    read = read_trace(shared_data / "traces/azure-llm-2023/AzureLLMInferenceTrace_conv.csv", 150)
    trace = scale_trace(read, 32)
    priorities = tuple(i % 3 for i in range(150))
    settings = dataclasses.replace(SMALL, num_pages=1000, max_num_seqs=4, priorities=priorities)
    _, figures = simulate(trace, 1.0, settings)
    waits = [figures["ttft_s_of_priority"][priority]["p50"] for priority in range(3)]
    assert waits == sorted(waits)
    assert waits[0] < 0.2 * waits[2]
    assert simulated(simulate(trace, 1.0, settings)[1]) == simulated(figures)
    assert simulated(simulate(trace, 1.0, dataclasses.replace(settings, priorities=()))[1]) != simulated(figures)


# ---------------------------------------------------------------- prefix hits


def test_hits_of_pieces_that_come_again() -> None:
    trace = trace_of((0, 9, 2), (0, 11, 2), (0, 8, 2), shared=((1, 2, 3), (1, 2, 4), (7, 2)))
    simulation = run(trace)
    assert simulation.scheduler.pages.num_queried_tokens == 28
    assert simulation.scheduler.pages.num_hit_tokens == 8
    without = run(trace, is_caching=False)
    assert without.scheduler.pages.num_hit_tokens == 0
    assert without.last_s == simulation.last_s


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 64, "depth": 2}])
def test_an_endless_cache_finds_what_the_trace_shares(name: str, settings: dict[str, Any], shared_data: Path) -> None:
    trace = scale_trace(read_trace(shared_data / "traces" / "mooncake" / f"{name}_trace.jsonl", 500), 8)
    simulation = run(trace, num_pages=100_000, page_size=8, max_num_batched_tokens=256, **settings)
    found = simulation.scheduler.pages
    # A page that is shared in part is copied: single tokens more than the whole pages that the trace shares.
    pages, tokens = trace_reuse(trace, 8), trace_reuse(trace, 1)
    assert found.num_queried_tokens == pages.num_prompt_tokens
    assert pages.num_reused_tokens <= found.num_hit_tokens <= tokens.num_reused_tokens
    assert tokens.rate - pages.rate < 0.002


def least_recently_used(trace: Trace, num_pages: int) -> float:
    """Share of prompt tokens found in a cache of ``num_pages`` pages, one a piece; a prompt's last ones leave first."""
    held: collections.OrderedDict[int, None] = collections.OrderedDict()
    num_found = 0
    for request in trace.requests:
        num_found += sum(n for _, n in itertools.takewhile(lambda piece: piece[0] in held, pieces(trace, request)))
        for name in reversed(request.piece_ids):
            held.pop(name, None)
            held[name] = None
        while len(held) > num_pages:
            held.popitem(last=False)
    return num_found / sum(request.num_prompt_tokens for request in trace.requests)


@pytest.mark.parametrize("num_pages", [800, 1600])
def test_a_small_cache_keeps_what_was_used_last(num_pages: int, shared_data: Path) -> None:
    read = read_trace(shared_data / "traces" / "mooncake" / "conversation_trace.jsonl")
    beginnings = collections.Counter(request.piece_ids[:2] for request in read.requests)
    chosen = [r._replace(num_output_tokens=1) for r in read.requests if beginnings[r.piece_ids[:2]] > 4]
    trace = scale_trace(read._replace(requests=chosen[:300]), 8)
    found = run(trace, num_pages=num_pages, page_size=8, max_num_batched_tokens=4096).scheduler.pages
    expected = least_recently_used(trace, num_pages)
    assert 0.1 < expected < trace_reuse(trace, 8).rate - 0.1
    assert found.num_hit_tokens / found.num_queried_tokens == pytest.approx(expected, abs=0.005)


# ---------------------------------------------------------------- the command


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 100 * i, "input_length": 600, "output_length": 2 + i, "hash_ids": [0, 1 + i % 2]}
        for i in range(6)
    ]
    path = tmp_path / "tiny.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate_scheduler.py", *map(str, arguments)])
    main()


def test_the_command_prints_json(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--trace", trace_file, "--rate", 10, 1, "--max-model-len", 604, "--json", "--policy", "priority")
    command(monkeypatch, *flags)
    found = json.loads(capsys.readouterr().out)
    assert (found["trace"], found["requests"], found["requests_cut"]) == ("tiny", 6, 3)
    assert found["endless_cache_hit_rate"] == pytest.approx(
        trace_reuse(cut_trace(read_trace(trace_file), 604)[0], 16).rate
    )
    assert found["settings"]["cost"]["step_s"] == PRESETS["h200-8b"].cost.step_s
    slow, fast = found["rates"]
    assert (slow["rate"], fast["rate"]) == (1, 10)
    assert slow["duration_s"] > fast["duration_s"]
    assert set(slow["ttft_s_of_priority"]) <= {"0", "1", "2"}


def test_the_command_prints_text_and_takes_costs(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--step-s", 1, "--prefill-token-s", 0, "--requests", 1, "--depth", 1, "--host-s", 0, "--no-prefix-caching")
    command(monkeypatch, "--trace", trace_file, *flags)
    found = capsys.readouterr().out
    assert "tiny: 1 requests, 0 truncated to" in found
    assert "the model h200-8b, not measured" in found
    assert "rate 1x: 2 steps in 2.0 simulated s" in found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "pass --trace FILE or --host-cost"),
        (("--trace", "absent.jsonl"), "absent.jsonl: cannot be read"),
        (("--trace", "TINY", "--rate", 0), "--rate must be more than 0, got 0"),
        (("--trace", "TINY", "--requests", 0), "--requests must be at least 1, got 0"),
        (("--trace", "TINY", "--num-pages", 10), "--max-model-len 131072: the pages hold 160 tokens"),
        (("--trace", "TINY", "--page-size", 0), "--page-size must be at least 1, got 0"),
        (("--trace", "TINY", "--max-model-len", 1), "--max-model-len must be at least 2, got 1"),
        (("--trace", "TINY", "--max-num-batched-tokens", 8), "--max-num-batched-tokens 8: .* 256 sequences"),
        (("--trace", "TINY", "--step-s", "nan"), "--step-s must be at least 0, got nan"),
        (("--trace", "TINY", "--seed", 3), "--seed is the seed of priorities; it needs --policy priority"),
        (("--trace", "TINY", "--plot", "absent/plot.png"), "--plot absent/plot.png: expected a file in a folder that"),
        (("--trace", "TINY", "--host-cost"), "--host-cost measures only decode steps"),
        (("--host-cost", 0), "--host-cost must be at least 1, got 0"),
    ],
)
def test_wrong_flags_are_named(
    flags: tuple[object, ...],
    message: str,
    trace_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, *(trace_file if flag == "TINY" else flag for flag in flags))
    assert re.search(message, capsys.readouterr().err)


def test_a_plot(trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    command(monkeypatch, "--trace", trace_file, "--rate", 1, 10, "--plot", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        command(monkeypatch, "--trace", trace_file, "--plot", tmp_path / "plot.png")
    found = capsys.readouterr()
    assert "--plot needs matplotlib: pip install 'jaxserve[research]'" in found.err
    assert not found.out, "said before anything is simulated"


def test_host_cost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    chunked = dataclasses.replace(SMALL, max_num_seqs=4, depth=2, max_num_batched_tokens=8)
    found = host_cost(3, chunked, repetitions=4)
    assert found["rows"] == 3
    assert 0 < found["best_us"] <= found["median_us"]
    assert found["best_us_per_row"] == pytest.approx(found["best_us"] / 3)
    command(monkeypatch, "--host-cost", 2)
    assert capsys.readouterr().out.startswith("schedule + complete of 2 decoding sequences: best ")
