"""The periodic log line: vLLM's words, and silence while there is nothing to say."""

import logging
import time

import pytest

from jaxserve.api.metric_types import Counter, Gauge, Metric
from jaxserve.engine.stats_log import StatsLogger


class Clock:
    """Time that passes when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", self.read)

    def read(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def numbers(
    prompt: int = 0, generation: int = 0, running: int = 0, preemptions: int = 0, queries: int = 0, hits: int = 0
) -> list[Metric]:
    counters = {
        "prompt_tokens": prompt,
        "generation_tokens": generation,
        "num_preemptions": preemptions,
        "prefix_cache_queries": queries,
        "prefix_cache_hits": hits,
    }
    gauges = {"num_requests_running": running, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.125}
    found: list[Metric] = [Counter(f"jaxserve:{name}", {}, value) for name, value in counters.items()]
    found += [Gauge(f"jaxserve:{name}", {}, value) for name, value in gauges.items()]
    return [*found, Counter("jaxserve:request_success", {"finished_reason": "stop"}, 1)]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_the_line_is_vllm_s(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stats = StatsLogger("CPU")
    clock.now += 10
    stats.log(numbers(prompt=50, generation=200, running=3))
    assert lines(caplog) == [
        "Engine 000: Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 20.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, CPU KV cache usage: 12.5%"
    ]
    clock.now += 5
    stats.log(numbers(prompt=50, generation=300, running=1, preemptions=4, queries=200, hits=50))
    assert lines(caplog) == [
        "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 20.0 tokens/s, "
        "Running: 1 reqs, Waiting: 2 reqs, Preemptions: 4, CPU KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    ]


def drafts(num_drafts: int, num_tokens: int, *accepted: int) -> list[Metric]:
    counts = {"drafts": num_drafts, "draft_tokens": num_tokens, "accepted_tokens": sum(accepted)}
    found: list[Metric] = [Counter(f"jaxserve:spec_decode_num_{name}", {}, value) for name, value in counts.items()]
    name = "jaxserve:spec_decode_num_accepted_tokens_per_pos"
    return found + [Counter(name, {"position": str(position)}, count) for position, count in enumerate(accepted)]


def test_drafts_since_the_last_line_have_a_line_in_vllm_s_words(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stats = StatsLogger("CPU")
    found = []
    for counts in (drafts(0, 0, 0, 0), drafts(10, 20, 8, 4), drafts(10, 20, 8, 4), drafts(14, 26, 11, 4)):
        clock.now += 10
        stats.log([*numbers(generation=int(clock.now)), *counts])
        found += lines(caplog)[1:]
    assert found == [
        "SpecDecoding metrics: Mean acceptance length: 2.20, Accepted throughput: 1.20 tokens/s, Drafted throughput: "
        "2.00 tokens/s, Accepted: 12 tokens, Drafted: 20 tokens, Per-position acceptance rate: 0.800, 0.400, "
        "Avg Draft acceptance rate: 60.0%",
        "SpecDecoding metrics: Mean acceptance length: 1.75, Accepted throughput: 0.30 tokens/s, Drafted throughput: "
        "0.60 tokens/s, Accepted: 3 tokens, Drafted: 6 tokens, Per-position acceptance rate: 0.750, 0.000, "
        "Avg Draft acceptance rate: 50.0%",
    ]


def test_the_hit_rate_is_that_of_the_latest_lookups(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stats = StatsLogger("CPU")
    rates = []
    for total, hits in ((100, 0), (200, 80), (200, 80), (300, 180)):
        clock.now += 10
        stats.log(numbers(generation=int(clock.now), queries=total, hits=hits))
        rates.append(lines(caplog)[0].rpartition(": ")[2])
    assert rates == ["0.0%", "80.0%", "80.0%", "100.0%"]


def test_an_engine_at_rest_is_silent(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stats = StatsLogger("CPU")
    assert stats.is_quiet
    stats.resume()
    assert not stats.is_quiet
    clock.now += 10
    stats.log(numbers(generation=10))
    assert (len(lines(caplog)), stats.is_quiet) == (1, False)
    stats.log(numbers(generation=10))
    assert (lines(caplog), stats.is_quiet) == ([], True)


def test_a_time_of_rest_is_no_part_of_the_next_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stats = StatsLogger("CPU", interval_s=4.0)
    clock.now += 1000
    assert stats.is_due()
    stats.resume()
    assert not stats.is_due()
    clock.now += 3
    stats.resume()
    assert stats.remaining_s() == 1.0
    clock.now += 1
    assert stats.is_due()
    stats.log(numbers(generation=40))
    assert "generation throughput: 10.0 tokens/s" in lines(caplog)[0]
