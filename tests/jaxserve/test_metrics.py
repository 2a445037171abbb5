"""Counters, gauges and histograms: what they count, and their text form."""

import collections
import math
import random
from typing import Any, cast

import pytest

from jaxserve import SamplingParams
from jaxserve.api.metric_types import HELP, Counter, Distribution, Gauge, Histogram, Metric, prometheus_text
from jaxserve.api.request import Request
from jaxserve.engine.metrics import FINISH_REASONS, EngineMetrics
from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.scheduling.context_pages import MISS_REASONS
from jaxserve.scheduling.drafts import DraftCounts
from jaxserve.scheduling.plan import SchedulerLimits, StepPlan
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step import Step

# vLLM's names (v1/metrics/loggers.py) that mean the same here.
OF_VLLM = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions prompt_tokens prompt_tokens_cached "
    "generation_tokens prefix_cache_queries prefix_cache_hits request_success time_to_first_token_seconds "
    "inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds "
    "request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds "
    "request_decode_time_seconds request_prompt_tokens request_generation_tokens request_params_n "
    "request_params_max_tokens iteration_tokens_total request_max_num_generation_tokens "
    "request_prefill_kv_computed_tokens corrupted_requests spec_decode_num_drafts spec_decode_num_draft_tokens "
    "spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos"
).split()


def make_request(name: str, num_prompt: int = 4, n: int = 1, max_tokens: int = 50) -> RequestState:
    """Arrives at 10 s, queued at 11 s, first scheduled at 13 s; a quarter of its prompt was cached."""
    params = SamplingParams(n=n, max_tokens=max_tokens)
    prompt = [3] * num_prompt
    asked = Request(request_id=name, params=params)
    samples = [Sample(Sequence(asked, list(prompt), num_prompt, 1000, index=i), None, None) for i in range(n)]
    samples[0].sequence.num_cached_tokens = num_prompt // 4
    request = RequestState(asked, prompt, samples, 10.0, 11.0)
    samples[0].sequence.scheduled_s = 13.0
    return request


def step(metrics: EngineMetrics, now: float, *rows: tuple[RequestState, int]) -> None:
    """Samples get a token each."""
    started: list[RequestState] = []
    sampled = [request.samples[index].sequence for request, index in rows]
    first, previous_s = list[Sequence](), list[float]()
    for sequence, (request, _) in zip(sampled, rows, strict=True):
        sequence.token_ids.append(5)
        if sequence.last_token_s:
            previous_s.append(sequence.last_token_s)
        else:
            first.append(sequence)
            sequence.first_token_s = now
            started += [] if sequence.index else [request]
        sequence.last_token_s = now
    done = Step(StepPlan(0), [], 9, 9, 9, sampled, completed_s=now)
    done.started, done.previous_s, done.num_new_tokens = first, previous_s, len(rows)
    metrics.stepped(done, started, ())


def finish(metrics: EngineMetrics, request: RequestState, *reasons: Any) -> None:
    for sample, reason in zip(request.samples, reasons, strict=True):
        sample.sequence.finish_reason = reason
    metrics.finished(request)


def collected(metrics: EngineMetrics) -> dict[str, Metric]:
    """Metrics by name; the reason stands behind ``request_success``."""
    found = metrics.collect([fake_replica()], 3)
    return {"/".join([one.name.removeprefix("jaxserve:"), *one.labels.values()]): one for one in found}


def fake_replica() -> Any:
    """A replica with two sequences running and one waiting."""

    class Pages:
        num_queried_tokens, num_hit_tokens, num_states = 30, 12, 6
        misses = collections.Counter({"first_seen": 4, "no_checkpoint": 1, "evicted": 2})

    class Allocator:
        usage = 0.25

    class Scheduler:
        running, waiting, num_preemptions, pages, allocator = [1, 2], [3], 4, Pages, Allocator
        limits = SchedulerLimits(2, 8, max_draft_tokens=2)
        draft_counts = DraftCounts(5, 10, collections.Counter({0: 4, 1: 3}))

    class FakeReplica:
        schedulers, num_steps, num_decode_rows = (Scheduler,), 7, 9
        num_stage_ticks, num_idle_stage_ticks = 14, 1

    return cast(Any, FakeReplica)


@pytest.fixture(autouse=True)
def any_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``collect`` take the fake: the run-time check of its annotation would not."""
    monkeypatch.setattr(EngineMetrics, "collect", getattr(EngineMetrics.collect, "__wrapped__", EngineMetrics.collect))


def histogram(found: dict[str, Metric], name: str) -> Histogram:
    metric = found[name]
    assert isinstance(metric, Histogram)
    return metric


# ---------------------------------------------------------------- what is counted


def test_names_and_kinds() -> None:
    found = collected(EngineMetrics(1000))
    ours = {"compiles_after_ready", "steps", "decode_rows", "stage_ticks", "idle_stage_ticks"}
    ours |= {"prefix_cache_misses", "prefix_cache_states"}
    assert {name.partition("/")[0] for name in found} == {*OF_VLLM, *ours}
    assert {name.partition("/")[0] for name in found} | {"expert_tokens"} == set(HELP)
    labelled = {f"request_success/{reason}" for reason in FINISH_REASONS}
    labelled |= {f"spec_decode_num_accepted_tokens_per_pos/{position}" for position in (0, 1)}
    labelled |= {f"prefix_cache_misses/{reason}" for reason in MISS_REASONS}
    assert {name for name in found if "/" in name} == labelled
    assert [found[f"prefix_cache_misses/{reason}"].value for reason in MISS_REASONS] == [4, 1, 2, 0, 0]
    assert found["prefix_cache_states"].value == 6
    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos/0", "accepted_tokens_per_pos/1")
    assert [found[f"spec_decode_num_{name}"].value for name in names] == [5, 10, 7, 4, 3]
    kinds = {metric.kind for name, metric in found.items() if name.endswith("_seconds")}
    assert kinds == {"histogram"}
    values = {name: found[name].value for name in ("num_requests_running", "num_requests_waiting", "steps")}
    assert values == {"num_requests_running": 2, "num_requests_waiting": 1, "steps": 7}
    assert found["kv_cache_usage_perc"].value == 0.25
    assert (found["prefix_cache_queries"].value, found["prefix_cache_hits"].value) == (30, 12)
    assert (found["compiles_after_ready"].value, found["num_preemptions"].value) == (3, 4)
    assert (found["stage_ticks"].value, found["idle_stage_ticks"].value) == (14, 1)
    assert isinstance(found["num_requests_running"], Gauge)
    assert isinstance(found["compiles_after_ready"], Counter)


def test_bounds_are_vllm_s() -> None:
    found = collected(EngineMetrics(1000))
    tokens = [*histogram(found, "request_prompt_tokens").buckets]
    assert tokens == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "1000.0", "+Inf"]
    steps = [*histogram(found, "iteration_tokens_total").buckets]
    assert (steps[:3], steps[-2:]) == (["1.0", "8.0", "16.0"], ["16384.0", "+Inf"])
    first = [*histogram(found, "time_to_first_token_seconds").buckets]
    assert (len(first), first[0], first[-2]) == (23, "0.001", "2560.0")
    between = [*histogram(found, "inter_token_latency_seconds").buckets]
    assert (len(between), between[0], between[-2]) == (20, "0.01", "80.0")
    latency = [*histogram(found, "e2e_request_latency_seconds").buckets]
    assert (len(latency), latency[0], latency[-2]) == (22, "0.3", "7680.0")


def test_numbers_of_a_known_load() -> None:
    """Two requests, one with two samples; every time is chosen, so every sum is known."""
    metrics = EngineMetrics(1000)
    one, two = make_request("one"), make_request("two", num_prompt=8, n=2)
    step(metrics, 14.0, (one, 0))
    step(metrics, 14.5, (one, 0), (two, 0))
    step(metrics, 15.0, (one, 0), (two, 0), (two, 1))
    finish(metrics, one, "stop")
    step(metrics, 17.0, (two, 0), (two, 1))
    finish(metrics, two, "length", "length")
    found = collected(metrics)
    assert found["prompt_tokens"].value == 12
    assert found["prompt_tokens_cached"].value == 3
    assert found["generation_tokens"].value == 8
    sums = {name: (metric.count, metric.sum) for name, metric in found.items() if isinstance(metric, Histogram)}
    assert sums == {
        "time_to_first_token_seconds": (2, 4.0 + 4.5),
        "inter_token_latency_seconds": (5, 0.5 + 0.5 + 0.5 + 2.0 + 2.0),
        "request_time_per_output_token_seconds": (3, 0.5 + 1.25 + 2.5),
        "e2e_request_latency_seconds": (2, 5.0 + 7.0),
        "request_queue_time_seconds": (2, 2.0 + 2.0),
        "request_inference_time_seconds": (2, 2.0 + 4.0),
        "request_prefill_time_seconds": (2, 1.0 + 1.5),
        "request_decode_time_seconds": (2, 1.0 + 2.5),
        "request_prompt_tokens": (2, 12.0),
        "request_generation_tokens": (3, 8.0),
        "request_max_num_generation_tokens": (2, 3.0 + 3.0),
        "request_prefill_kv_computed_tokens": (2, 3.0 + 6.0),
        "request_params_n": (2, 3.0),
        "request_params_max_tokens": (2, 100.0),
        "iteration_tokens_total": (4, 5.0 + 10.0 + 3.0 + 2.0),
    }
    assert (found["request_success/stop"].value, found["request_success/length"].value) == (1, 2)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_requests_that_were_cut_are_in_no_histogram_of_requests(reason: str) -> None:
    metrics = EngineMetrics(1000)
    request = make_request("one", n=2)
    step(metrics, 14.0, (request, 0), (request, 1))
    finish(metrics, request, "length", reason)
    finish(metrics, make_request("never ran"), None)
    found = collected(metrics)
    assert found["request_success/length"].value == 1
    assert sum(found[f"request_success/{one}"].value for one in ("abort", "error")) == 2
    assert all(histogram(found, name).count == 0 for name in found if name.startswith("request_") and "/" not in name)
    assert histogram(found, "time_to_first_token_seconds").count == 1


def test_requests_without_numbers_are_counted() -> None:
    metrics = EngineMetrics(1000)
    metrics.corrupted()
    metrics.corrupted()
    assert collected(metrics)["corrupted_requests"].value == 2


def test_a_step_without_tokens_counts_nothing() -> None:
    metrics = EngineMetrics(1000)
    step(metrics, 1.0)
    assert histogram(collected(metrics), "iteration_tokens_total").count == 0


# ---------------------------------------------------------------- histograms


def test_buckets_count_what_is_at_most_their_bound() -> None:
    distribution = Distribution("x", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        distribution.observe(value)
    distribution.observe(7, 10)
    found = distribution.snapshot("p:")
    assert found == Histogram("p:x", {}, 15, 77.5, {"1.0": 2, "2.0": 4, "+Inf": 15})
    assert found.value == found.sum


def test_counting_several_at_once_is_counting_each() -> None:
    generator = random.Random(3)
    one, other = (Distribution("x", (0.25, 0.5, 0.75)) for _ in range(2))
    for _ in range(100):
        value, times = generator.random(), generator.randrange(5)
        one.observe(value, times)
        for _ in range(times):
            other.observe(value)
    found, expected = one.snapshot(""), other.snapshot("")
    assert found.buckets == expected.buckets
    assert found.sum == pytest.approx(expected.sum)


# ---------------------------------------------------------------- the text form

SHOWN: list[Metric] = [
    Gauge("jaxserve:kv_cache_usage_perc", {}, 0.5),
    Counter("jaxserve:request_success", {"finished_reason": "stop"}, 3),
    Counter("jaxserve:request_success", {"finished_reason": "length"}, 4),
    Histogram("jaxserve:request_params_n", {}, 3, 4.5, {"1.0": 2, "+Inf": 3}),
]


def test_text_form() -> None:
    lines = prometheus_text(SHOWN, {"model_name": 'a"b\\c\nd'}).splitlines()
    name = 'model_name="a\\"b\\\\c\\nd"'
    assert [line for line in lines if not line.startswith("# HELP")] == [
        "# TYPE jaxserve:kv_cache_usage_perc gauge",
        f"jaxserve:kv_cache_usage_perc{{{name}}} 0.5",
        "# TYPE jaxserve:request_success_total counter",
        f'jaxserve:request_success_total{{{name},finished_reason="stop"}} 3',
        f'jaxserve:request_success_total{{{name},finished_reason="length"}} 4',
        "# TYPE jaxserve:request_params_n histogram",
        f'jaxserve:request_params_n_bucket{{{name},le="1.0"}} 2',
        f'jaxserve:request_params_n_bucket{{{name},le="+Inf"}} 3',
        f"jaxserve:request_params_n_sum{{{name}}} 4.5",
        f"jaxserve:request_params_n_count{{{name}}} 3",
    ]
    assert sum(line.startswith("# HELP jaxserve:") for line in lines) == 3
    assert prometheus_text(SHOWN).splitlines()[2] == "jaxserve:kv_cache_usage_perc 0.5"
    assert prometheus_text([]) == ""


def test_prometheus_reads_all_of_it() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    metrics = EngineMetrics(1000)
    request = make_request("one")
    step(metrics, 14.0, (request, 0))
    step(metrics, 14.25, (request, 0))
    finish(metrics, request, "stop")
    ours = metrics.collect([fake_replica()], 0)
    families = list(parser.text_string_to_metric_families(prometheus_text(ours, {"engine": "0"})))
    assert [family.name for family in families] == list(dict.fromkeys(metric.name for metric in ours))
    assert all(family.documentation for family in families)
    samples = {(s.name, s.labels.get("le") or s.labels.get("finished_reason")): s for f in families for s in f.samples}
    assert all(sample.labels["engine"] == "0" for sample in samples.values())
    assert samples["jaxserve:request_success_total", "stop"].value == 1
    assert samples["jaxserve:inter_token_latency_seconds_sum", None].value == 0.25
    assert samples["jaxserve:inter_token_latency_seconds_bucket", "0.2"].value == 0
    assert samples["jaxserve:inter_token_latency_seconds_bucket", "0.3"].value == 1
    infinite = [float(key[1]) for key in samples if key[1] == "+Inf"]
    assert infinite == [math.inf] * 15
