"""Metrics: vLLM's ``Counter``, ``Gauge`` and ``Histogram`` (`vllm/v1/metrics/reader.py`), and their text form."""

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

HELP = MappingProxyType(
    {
        "num_requests_running": "Number of running sequences.",
        "num_requests_waiting": "Number of waiting sequences.",
        "kv_cache_usage_perc": "Fraction of the KV pages in use by running sequences; 1 is 100 percent.",
        "prefix_cache_states": "Number of states of recurrent layers that the prefix cache keeps.",
        "num_preemptions": "Number of preemptions: a sequence lost its pages to another one.",
        "prompt_tokens": "Number of prompt tokens, counted when prefill is done.",
        "prompt_tokens_cached": "Number of those prompt tokens found in the prefix cache.",
        "generation_tokens": "Tokens generated.",
        "prefix_cache_queries": "Number of tokens looked up in the prefix cache.",
        "prefix_cache_hits": "Number of tokens found in the prefix cache.",
        "prefix_cache_misses": "Number of prompts not wholly in the prefix cache, by reason.",
        "compiles_after_ready": "Number of programs compiled after the engine was ready; expected to be 0.",
        "corrupted_requests": "Number of requests that failed because of NaN logits.",
        "steps": "Steps launched.",
        "decode_rows": "Number of rows of those steps that decoded one token.",
        "stage_ticks": "Number of pipeline stages times the number of ticks in which they moved on by one step.",
        "idle_stage_ticks": "Number of these in which a stage had no work despite a runnable sequence per stage.",
        "expert_tokens": "Number of tokens routed to an expert, by group of layers.",
        "group_steps": "Number of steps that a process of a group other than rank 0 has finished, by rank and host.",
        "group_sent_bytes": "Bytes of plans and other messages from process 0 of a group to another, by rank and host.",
        "spec_decode_num_drafts": "Number of drafts verified: rows with at least one draft token.",
        "spec_decode_num_draft_tokens": "Number of draft tokens verified.",
        "spec_decode_num_accepted_tokens": "Number of draft tokens accepted.",
        "spec_decode_num_accepted_tokens_per_pos": "Number of draft tokens accepted, by position in the draft.",
        "request_success": "Number of finished samples, by finish reason.",
        "time_to_first_token_seconds": "Seconds from a request's arrival to its first token.",
        "inter_token_latency_seconds": "Seconds between consecutive tokens of a completion.",
        "request_time_per_output_token_seconds": "Mean seconds per output token of a completion, excluding the first.",
        "e2e_request_latency_seconds": "Seconds from a request's arrival to its last token.",
        "request_queue_time_seconds": "Seconds from queueing a request to its first step.",
        "request_inference_time_seconds": "Seconds from a request's first step to its last token.",
        "request_prefill_time_seconds": "Seconds from a request's first step to its first token.",
        "request_decode_time_seconds": "Seconds from a request's first token to its last.",
        "request_prompt_tokens": "Number of prompt tokens of a request.",
        "request_generation_tokens": "Number of tokens of a completion.",
        "request_max_num_generation_tokens": "Number of tokens of the longest completion of a request.",
        "request_prefill_kv_computed_tokens": "Number of prompt tokens of a request that were not in the prefix cache.",
        "request_params_n": "The parameter n of a request.",
        "request_params_max_tokens": "The parameter max_tokens of a request.",
        "iteration_tokens_total": "Number of tokens per step: generated tokens, and prompts whose prefill ended.",
    }
)


@dataclasses.dataclass(frozen=True)
class Counter:
    """A number that only increases."""

    name: str
    labels: dict[str, str]
    value: int | float
    kind: ClassVar[str] = "counter"


@dataclasses.dataclass(frozen=True)
class Gauge:
    """A number that can go up and down."""

    name: str
    labels: dict[str, str]
    value: int | float
    kind: ClassVar[str] = "gauge"


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts of values by upper bound.

    Attributes:
        name: Name of the metric.
        labels: Labels that distinguish metrics of the same name.
        count: Number of values.
        sum: Sum of the values.
        buckets: Upper bound, as text, up to ``+Inf`` -> number of values that are at most that bound.
    """

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]
    kind: ClassVar[str] = "histogram"

    @property
    def value(self) -> float:
        """Return the sum."""
        return self.sum


Metric = Counter | Gauge | Histogram


class Distribution:
    """Collects the values of a histogram.

    Args:
        name: Name of the histogram, without prefix.
        bounds: Upper bounds of its buckets, ascending; ``+Inf`` is added.
    """

    def __init__(self, name: str, bounds: Sequence[float]):
        self._name = name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: int | float, times: int = 1) -> None:
        """Add a value, once or several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self, prefix: str) -> Histogram:
        """Return the histogram so far; other threads may keep adding values."""
        total, buckets = 0, dict[str, int]()
        for bound, count in zip([*self._bounds, "+Inf"], self._counts.copy(), strict=True):
            total += count
            buckets[str(bound)] = total
        return Histogram(prefix + self._name, {}, total, self._sum, buckets)


def prometheus_text(
    metrics: Iterable[Metric],
    labels: Mapping[str, str] = MappingProxyType({}),
    help_lines: Mapping[str, str] = HELP,
) -> str:
    """Format metrics in Prometheus' text format 0.0.4.

    Args:
        metrics: As returned by ``get_metrics``: metrics of the same name are adjacent.
        labels: Added to each metric, such as ``model_name``.
        help_lines: Help text of metrics, by name without prefix.
    """
    lines: list[str] = []
    described = ""
    for metric in metrics:
        name = f"{metric.name}_total" if isinstance(metric, Counter) else metric.name
        if name != described:
            described = name
            lines.append(f"# HELP {name} {help_lines.get(metric.name.rpartition(':')[2], metric.name)}")
            lines.append(f"# TYPE {name} {metric.kind}")
        own = {**labels, **metric.labels}
        if isinstance(metric, Histogram):
            lines += [f"{name}_bucket{_labelled({**own, 'le': le})} {n}" for le, n in metric.buckets.items()]
            lines.append(f"{name}_sum{_labelled(own)} {metric.sum!r}")
            lines.append(f"{name}_count{_labelled(own)} {metric.count}")
        else:
            lines.append(f"{name}{_labelled(own)} {metric.value!r}")
    return "".join(line + "\n" for line in lines)


def _labelled(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
