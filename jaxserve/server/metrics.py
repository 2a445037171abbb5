"""The Prometheus metrics of the engine and the front end. All labels come from closed sets."""

import asyncio
import collections
import dataclasses
import functools
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxserve.api.errors import JaxserveError
from jaxserve.api.metric_types import HELP, Counter, Gauge, Metric, prometheus_text
from jaxserve.server.frontend import Frontend
from jaxserve.server.resources import process_metrics
from jaxserve.server.settings import queued_tokens_limit
from jaxserve.server.usage import Usage
from jaxserve.server.wire import EngineInfo

PREFIX = "jaxserve:"
VLLM_PREFIX = "vllm:"
ENGINE = "0"
"""vLLM's label of the only engine."""
NOT_OF_VLLM = (
    *("compiles_after_ready", "steps", "decode_rows", "stage_ticks", "idle_stage_ticks", "expert_tokens"),
    *("group_steps", "group_sent_bytes"),
)
"""The engine's metrics without a counterpart in vLLM."""
_ENGINE_LIMIT_S = 5.0

HELP_LINES = MappingProxyType(
    {
        **HELP,
        "engine_up": "1 if the engine process responds, else 0.",
        "group_up": "1 if a group of processes that is a replica is ready, else 0; its index is the label engine.",
        "accepting_requests": "1 if requests are accepted, 0 while the server starts or drains.",
        "requests_started": "Number of admitted requests.",
        "requests_finished": "Number of finished requests, by outcome.",
        "requests_in_flight": "Number of admitted requests that have not finished.",
        "requests_refused": "Number of requests rejected by a queue limit; no other metric counts them.",
        "texts_in_flight": "Number of completions of requests in flight.",
        "admitted_bytes": "Estimated bytes of host memory that the requests in flight take.",
        "max_admitted_bytes": "Maximum number of these bytes.",
        "cancelled": "Number of requests whose client disconnected, or that an operator aborted.",
        "deadline": "Number of requests that exceeded their deadline.",
        "delivered_prompt_tokens": "Number of prompt tokens of requests with a response, as the front end counts them.",
        "delivered_cached_tokens": "Number of these tokens found in the prefix cache.",
        "delivered_generation_tokens": "Number of generated tokens that the front end received.",
        "key_requests": "Number of requests of each API key, by its name; prompts of one request count separately.",
        "key_prompt_tokens": "Number of prompt tokens of each API key, by its name.",
        "key_generation_tokens": "Number of generated tokens of each API key, by its name.",
        "max_num_seqs": "Maximum number of sequences in a step.",
        "max_num_batched_tokens": "Maximum number of tokens in a step.",
        "max_model_len": "Maximum context length in tokens.",
        "max_num_queued_reqs": "Maximum number of waiting sequences.",
        "max_num_queued_tokens": "Maximum number of prompt tokens of waiting sequences.",
        "uptime_seconds": "Seconds since the front end started.",
        "build_info": "Versions of jaxserve, JAX and Python.",
        "cache_config_info": "Settings of the KV cache.",
        "prompt_tokens_by_source": "Number of prompt tokens, by the source of their keys and values.",
        "process_resident_memory_bytes": "Resident memory of the front end's process in bytes.",
        "process_virtual_memory_bytes": "Virtual memory of the front end's process in bytes.",
        "process_cpu_seconds": "User and system CPU time of the front end's process in seconds.",
        "process_open_fds": "Number of open file descriptors of the front end's process.",
        "process_max_fds": "Maximum number of open file descriptors of the front end's process.",
        "process_start_time_seconds": "Start time of the front end's process since the Unix epoch in seconds.",
    }
)


async def metrics_text(frontend: Frontend) -> str:
    """Return all metrics in Prometheus' text format 0.0.4, without the engine's if its process does not respond."""
    engine = await engine_metrics(frontend)
    measured = [*(engine or ()), *_server_metrics(frontend, is_engine_up=engine is not None)]
    if frontend.config.vllm_metric_names:
        measured += _as_vllm(engine or ())
    labels = {"model_name": frontend.model_names[0], "engine": ENGINE}
    without_labels = [*_infos(frontend), *process_metrics()]
    return prometheus_text(measured, labels, HELP_LINES) + prometheus_text(without_labels, help_lines=HELP_LINES)


async def engine_metrics(frontend: Frontend) -> list[Metric] | None:
    """Return the engine's current metrics; None if it does not respond within seconds."""
    try:
        async with asyncio.timeout(_ENGINE_LIMIT_S):
            return await frontend.engine.metrics()
    except (JaxserveError, TimeoutError):
        return None


def values_of_all(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return the values of metrics without labels by name, without prefix: sums over groups, means of shares."""
    found = collections.defaultdict[str, list[float]](list)
    for metric in metrics:
        if not metric.labels.keys() - {"engine"}:
            found[metric.name.partition(":")[2]].append(metric.value)
    return {name: sum(values) / (len(values) if name.endswith("_perc") else 1) for name, values in found.items()}


class RankProgress(NamedTuple):
    """How far a process of a group is, other than rank 0.

    Attributes:
        engine: Index of its replica.
        rank: Its rank in the group.
        host: Where it runs.
        num_steps: Steps that it has finished.
        num_sent_bytes: Bytes of plans and other messages sent to it.
    """

    engine: int
    rank: int
    host: str
    num_steps: int
    num_sent_bytes: int


def rank_progress(metrics: Iterable[Metric]) -> list[RankProgress]:
    """Return how far each process of each group is, in order of replicas and ranks."""
    found = collections.defaultdict[tuple[int, int, str], dict[str, int]](dict)
    for metric in metrics:
        name = metric.name.partition(":")[2]
        if name in ("group_steps", "group_sent_bytes"):
            labels = metric.labels
            place = int(labels.get("engine", ENGINE)), int(labels["rank"]), labels["host"]
            found[place][name] = int(metric.value)
    return [
        RankProgress(*place, values.get("group_steps", 0), values.get("group_sent_bytes", 0))
        for place, values in sorted(found.items())
    ]


def info_of(frontend: Frontend) -> EngineInfo | None:
    """Return what the engine tells of itself; None while it is not ready."""
    try:
        return frontend.info
    except JaxserveError:
        return None


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions of a server's parts."""
    names = ("jaxserve", "jax", "jaxlib", "flax")
    found = {name: importlib.metadata.version(name) for name in names}
    return MappingProxyType({**found, "python": platform.python_version()})


def _server_metrics(frontend: Frontend, *, is_engine_up: bool) -> Iterable[Metric]:
    """Return the front end's current metrics."""
    counts, ledger, info, config = frontend.log.counts, frontend.ledger, info_of(frontend), frontend.config
    gauges = {
        "engine_up": int(is_engine_up),
        "accepting_requests": int(ledger.is_open),
        "requests_in_flight": counts.in_flight,
        "texts_in_flight": ledger.num_in_flight,
        "admitted_bytes": ledger.memory.num_bytes,
        "max_admitted_bytes": ledger.memory.limit_bytes,
        "uptime_seconds": frontend.uptime_s,
    }
    if info is not None:
        model = info.model
        gauges |= {
            "max_num_seqs": model.max_num_seqs,
            "max_num_batched_tokens": model.max_num_batched_tokens,
            "max_model_len": model.max_model_len,
            "max_num_queued_reqs": config.queued_reqs_limit(model.max_num_seqs),
            "max_num_queued_tokens": queued_tokens_limit(config.max_num_queued_tokens, model.max_model_len),
        }
    counters = {
        "requests_started": counts.started,
        "requests_refused": ledger.num_refused,
        "cancelled": counts.finished["cancelled"],
        "deadline": counts.finished["deadline"],
        "delivered_prompt_tokens": counts.prompt_tokens,
        "delivered_cached_tokens": counts.cached_tokens,
        "delivered_generation_tokens": counts.generation_tokens,
    }
    yield from (Gauge(PREFIX + name, {}, value) for name, value in gauges.items())
    for index, is_up in enumerate(frontend.engine.groups_up):
        yield Gauge(f"{PREFIX}group_up", {"engine": str(index)}, int(is_up))
    yield from (Counter(PREFIX + name, {}, value) for name, value in counters.items())
    for outcome, number in counts.finished.items():
        yield Counter(f"{PREFIX}requests_finished", {"outcome": outcome}, number)
    for caller in frontend.authenticator.callers if config.has_keys else ():
        for name, number in dataclasses.asdict(frontend.log.usage.by_name.get(caller.name, Usage())).items():
            yield Counter(f"{PREFIX}key_{name}", {"key": caller.name}, number)


def _infos(frontend: Frontend) -> Iterable[Metric]:
    """Return gauges of 1 whose labels describe the server."""
    yield Gauge(f"{PREFIX}build_info", dict(versions()), 1)
    info = info_of(frontend)
    if info is None:
        return
    model, cache = info.model, info.model.kv_cache
    ours = {"num_pages": cache.num_pages, "page_size": cache.page_size, "size_bytes": cache.size_bytes}
    ours |= {"dtype": cache.dtype, "attention_backend": model.attention_backend, "layout": model.layout}
    infos: dict[str, Mapping[str, object]] = {PREFIX: ours}
    if frontend.config.vllm_metric_names:  # vLLM's labels that apply here
        infos[VLLM_PREFIX] = {
            "block_size": cache.page_size,
            "num_gpu_blocks": cache.num_pages,
            "kv_cache_size_tokens": cache.num_tokens,
            "kv_cache_max_concurrency": cache.max_concurrency,
        }
    for prefix, labels in infos.items():
        texts = {name: str(value) for name, value in labels.items()}
        yield Gauge(f"{prefix}cache_config_info", {"engine": ENGINE, **texts}, 1)


def _as_vllm(engine: Iterable[Metric]) -> Iterable[Metric]:
    """Return the engine's metrics that vLLM has too, under vLLM's names."""
    plain = collections.defaultdict[str, dict[str, int | float]](dict)  # of each group
    for metric in engine:
        name = metric.name.removeprefix(PREFIX)
        if not metric.labels.keys() - {"engine"}:
            plain[metric.labels.get("engine", ENGINE)][name] = metric.value
        if name not in NOT_OF_VLLM:
            yield dataclasses.replace(metric, name=VLLM_PREFIX + name)
    for number, values in plain.items():
        cached = values["prompt_tokens_cached"]
        sources = {"local_compute": values["prompt_tokens"] - cached, "local_cache_hit": cached}
        for source, value in {**sources, "external_kv_transfer": 0}.items():
            yield Counter(f"{VLLM_PREFIX}prompt_tokens_by_source", {"engine": number, "source": source}, value)
