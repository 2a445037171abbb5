"""What ``/metrics`` says: exact after a known load, the same series whatever happens, vLLM's names where asked for."""

import asyncio
import json
import mmap
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.errors import DeadlineError, EngineDeadError, OverloadedError, RequestError
from jaxserve.api.metric_types import Counter, Metric
from jaxserve.server import metrics
from jaxserve.server.auth import Caller
from jaxserve.server.errors import OUTCOMES, UnavailableError
from jaxserve.server.frontend import Frontend
from jaxserve.server.metrics import HELP_LINES, NOT_OF_VLLM, metrics_text
from jaxserve.server.resources import process_metrics
from tests.observed_engine import ANYBODY, ObservedEngine, engine_numbers, make_frontend, output, read_all

parser = pytest.importorskip("prometheus_client.parser")
REPOSITORY = Path(__file__).resolve().parents[3]


def text_of(frontend: Frontend) -> str:
    """What is served."""
    return asyncio.run(metrics_text(frontend))


def families(text: str) -> list[Any]:
    """As Prometheus reads them, without ``_created``."""
    return list(parser.text_string_to_metric_families(text))


def samples(text: str) -> dict[str, float]:
    """Values by name and by those labels that tell samples of a name apart."""
    found = {}
    for family in families(text):
        for sample in family.samples:
            own = [f"{name}={value}" for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            found["/".join([sample.name, *own])] = sample.value
    return found


def load(*scripts: Any) -> Frontend:
    """A front end after requests that went so."""
    engine = ObservedEngine()
    frontend = make_frontend(engine)
    for script in scripts:
        engine.script = script
        try:
            asyncio.run(read_all(frontend))
        except Exception:
            continue
    return frontend


# ---------------------------------------------------------------- numbers


def test_exact_after_a_known_load() -> None:
    answer = (output(("a", 2), prompt=5, cached=4), output(("b", 3), reason="stop", prompt=5, cached=4))
    frontend = load(
        *[answer] * 3,
        (RequestError("wrong"),),
        (answer[0], DeadlineError("late")),
        (OverloadedError("full"),),
        (RuntimeError("a bug"),),
    )
    limited = Caller("limited", frozenset(), max_concurrent_requests=1)
    with frontend.ledger.admit(limited):
        for _ in range(2):
            with pytest.raises(OverloadedError), frontend.ledger.admit(limited):
                pass
        found = samples(text_of(frontend))
    ours = {name.removeprefix("jaxserve:"): value for name, value in found.items() if name.startswith("jaxserve:")}
    expected = {
        "engine_up": 1,
        "accepting_requests": 1,
        "requests_started_total": 7,
        "requests_refused_total": 2,
        "requests_in_flight": 0,
        "texts_in_flight": 1,
        "cancelled_total": 0,
        "deadline_total": 1,
        "delivered_prompt_tokens_total": 4 * 5,
        "delivered_cached_tokens_total": 4 * 4,
        "delivered_generation_tokens_total": 3 * 5 + 2,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": 100,
        "max_num_queued_reqs": 32,
        "max_num_queued_tokens": 6400,
        "requests_finished_total/outcome=ok": 3,
        "requests_finished_total/outcome=client_error": 1,
        "requests_finished_total/outcome=failed": 1,
        "requests_finished_total/outcome=overloaded": 1,
        "requests_finished_total/outcome=deadline": 1,
        "requests_finished_total/outcome=cancelled": 0,
        "requests_finished_total/outcome=engine_dead": 0,
    }
    assert {name: ours[name] for name in expected} == expected
    assert 0 <= ours["uptime_seconds"] < 600


def test_limits_that_were_set() -> None:
    found = samples(text_of(make_frontend(max_num_queued_reqs=3, max_num_queued_tokens=7)))
    assert (found["jaxserve:max_num_queued_reqs"], found["jaxserve:max_num_queued_tokens"]) == (3, 7)


def test_the_engine_s_numbers_are_there() -> None:
    found = samples(text_of(make_frontend()))
    assert found["jaxserve:num_requests_running"] == 2
    assert found["jaxserve:kv_cache_usage_perc"] == 0.25
    assert found["jaxserve:prefix_cache_hits_total"] == 12
    assert found["jaxserve:corrupted_requests_total"] == 0
    assert found["jaxserve:time_to_first_token_seconds_bucket/le=+Inf"] == 0


def test_labels() -> None:
    text = text_of(make_frontend(served_model_name=['the "best"', "other"]))
    for family in families(text):
        for sample in family.samples:
            if family.name.startswith("jaxserve:") and not family.name.endswith("_info"):
                assert sample.labels["model_name"] == 'the "best"'
                assert sample.labels["engine"] == "0"


def test_infos() -> None:
    infos = {f.name: f.samples[0].labels for f in families(text_of(make_frontend())) if f.name.endswith("_info")}
    assert infos["jaxserve:cache_config_info"] == {
        "engine": "0",
        "num_pages": "50",
        "page_size": "16",
        "size_bytes": str(3 << 20),
        "dtype": "float32",
        "attention_backend": "xla",
        "layout": "tensor",
    }
    assert {"jaxserve", "jax", "python"} <= set(infos["jaxserve:build_info"])


# ---------------------------------------------------------------- series


def test_every_metric_is_described_and_named_once() -> None:
    text = text_of(make_frontend(vllm_metric_names=True))
    found = families(text)
    names = [family.name for family in found]
    assert len(names) == len(set(names))
    for family in found:
        # One that is described only by its own name has no line in the table.
        assert family.documentation not in ("", family.name)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    series = [line.rpartition(" ")[0] for line in lines]
    assert len(series) == len(set(series))
    assert all(re.fullmatch(r'[a-z][a-z:_0-9]*(\{[a-z_]+="[^\n]*"\})? \S+', line) for line in lines)


def test_no_description_is_left_over() -> None:
    served = {family.name.rpartition(":")[2] for family in families(text_of(make_frontend(vllm_metric_names=True)))}
    served |= {f"{name}_total" for name in served}
    on_request = ("spec_decode_", "key_", "group_")
    optional = {"expert_tokens", *(name for name in HELP_LINES if name.startswith(on_request))}
    assert {name for name in HELP_LINES if name not in served} == optional, "which are counted on request only"


def test_series_stay_the_same_under_load() -> None:
    frontend = load()
    before = set(samples(text_of(frontend)))
    engine = frontend.engine
    assert isinstance(engine, ObservedEngine)
    for number in range(20):
        engine.script = (output(("a", 1), reason="stop"),) if number % 2 else (RuntimeError(f"unique {number}"),)
        try:
            asyncio.run(read_all(frontend, f"prompt {number}", f"cmpl-{number}"))
        except RuntimeError:
            continue
    assert set(samples(text_of(frontend))) == before
    assert {name.partition("=")[2] for name in before if "outcome=" in name} == set(OUTCOMES)


# ---------------------------------------------------------------- an engine that does not answer


def test_a_dead_engine_leaves_the_front_end_s_numbers() -> None:
    engine = ObservedEngine()
    engine.numbers = EngineDeadError("gone")
    found = samples(text_of(make_frontend(engine, vllm_metric_names=True)))
    assert found["jaxserve:engine_up"] == 0
    assert found["jaxserve:requests_started_total"] == 0
    assert "process_open_fds" in found
    assert not [name for name in found if "num_requests_running" in name]


def test_a_stuck_engine_is_waited_for_some_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait() -> list[Metric]:
        await asyncio.sleep(60)
        return []

    engine = ObservedEngine()
    monkeypatch.setattr(engine, "metrics", wait)
    monkeypatch.setattr(metrics, "_ENGINE_LIMIT_S", 0.01)
    assert samples(text_of(make_frontend(engine)))["jaxserve:engine_up"] == 0


def test_a_start_without_an_engine() -> None:
    engine = ObservedEngine()
    frontend = make_frontend(engine)
    engine.is_ready, engine.numbers = False, UnavailableError("not yet")
    frontend.ledger.close("starting")
    found = samples(text_of(frontend))
    assert (found["jaxserve:accepting_requests"], found["jaxserve:engine_up"]) == (0, 0)
    assert "jaxserve:max_model_len" not in found


# ---------------------------------------------------------------- vLLM's names


def test_vllm_names_only_where_asked_for() -> None:
    assert "vllm:" not in text_of(make_frontend())


def test_vllm_names() -> None:
    engine = ObservedEngine()
    engine.numbers = [
        Counter("jaxserve:prompt_tokens", {}, 10),
        Counter("jaxserve:prompt_tokens_cached", {}, 4),
        *[
            one
            for one in engine_numbers()
            if one.name not in ("jaxserve:prompt_tokens", "jaxserve:prompt_tokens_cached")
        ],
    ]
    text = text_of(make_frontend(engine, vllm_metric_names=True))
    found = samples(text)
    theirs = {name: value for name, value in found.items() if name.startswith("vllm:")}
    for name, value in theirs.items():
        same = found.get(name.replace("vllm:", "jaxserve:"))
        assert same == value or "by_source" in name or name.startswith("vllm:cache_config_info")
    assert theirs["vllm:prompt_tokens_by_source_total/source=local_compute"] == 6
    assert theirs["vllm:prompt_tokens_by_source_total/source=local_cache_hit"] == 4
    assert theirs["vllm:prompt_tokens_by_source_total/source=external_kv_transfer"] == 0
    assert theirs["vllm:request_success_total/finished_reason=length"] == 0
    assert "vllm:num_preemptions_total" in theirs
    assert "vllm:e2e_request_latency_seconds_bucket/le=0.3" in theirs
    assert not [name for name in theirs if name.removeprefix("vllm:").removesuffix("_total") in NOT_OF_VLLM]
    (info,) = (family for family in families(text) if family.name == "vllm:cache_config_info")
    assert info.samples[0].labels == {
        "engine": "0",
        "block_size": "16",
        "num_gpu_blocks": "50",
        "kv_cache_size_tokens": "800",
        "kv_cache_max_concurrency": "7.5",
    }


# ---------------------------------------------------------------- the process


def test_what_the_process_takes() -> None:
    before = {one.name: one.value for one in process_metrics()}
    if not before:
        pytest.skip("needs /proc")
    files = [open(os.devnull) for _ in range(3)]
    block = mmap.mmap(-1, 32 << 20)  # new pages, unlike what the allocator may have left
    for start in range(0, len(block), mmap.PAGESIZE):
        block[start] = 1
    after = {one.name: one.value for one in process_metrics()}
    assert after["process_open_fds"] == before["process_open_fds"] + 3
    assert after["process_resident_memory_bytes"] >= before["process_resident_memory_bytes"] + len(block) // 2
    assert after["process_virtual_memory_bytes"] > after["process_resident_memory_bytes"]
    assert after["process_cpu_seconds"] >= before["process_cpu_seconds"] > 0
    assert time.time() - 86400 < after["process_start_time_seconds"] < time.time()
    assert after["process_max_fds"] >= after["process_open_fds"]
    for file in (*files, block):
        file.close()


# ---------------------------------------------------------------- the dashboard


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard of the repository."""
    return json.loads((REPOSITORY / "scripts" / "grafana_dashboard.json").read_text())


def expressions() -> list[str]:
    """Every query of the dashboard."""
    panels = dashboard()["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_the_dashboard_asks_for_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = make_frontend()
    asyncio.run(read_all(frontend))
    monkeypatch.setattr(ObservedEngine, "groups_up", [True, False])
    series: dict[str, set[str]] = {}
    for family in families(text_of(frontend)):
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    found = expressions()
    assert len(found) > 15
    for expression in found:
        names = re.findall(r"jaxserve:[a-z0-9_]+|process_[a-z0-9_]+", expression)
        assert names, expression
        assert set(names) <= set(series), expression
        labels = set(re.findall(r"([a-z_]+)\s*=~?", expression))
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            labels |= {label.strip() for label in grouped.split(",")}
        # "job" is Prometheus' own.
        assert labels - {"job"} <= set().union(*(series[name] for name in names)), expression
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    used = {name for expression in found for name in re.findall(r"\$(\w+)", expression)}
    assert used - {"__rate_interval"} <= variables


def test_the_dashboard_s_panels() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    asked = " ".join(expressions())
    wanted = (
        "time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket "
        "generation_tokens_total prompt_tokens_total num_requests_running num_requests_waiting kv_cache_usage_perc "
        "prefix_cache_hits_total requests_refused_total requests_finished_total compiles_after_ready_total engine_up "
        "group_up"
    )
    assert [name for name in wanted.split() if f"jaxserve:{name}" not in asked] == []


def test_admission_is_by_the_caller() -> None:
    """The helper of these tests lets its requests through the gate."""
    frontend = make_frontend()
    with frontend.ledger.admit(ANYBODY):
        assert samples(text_of(frontend))["jaxserve:texts_in_flight"] == 1
