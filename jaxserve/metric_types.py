"""Metrics: vLLM's ``Counter``, ``Gauge`` and ``Histogram`` (`vllm/v1/metrics/reader.py`), and their text form."""

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

HELP = MappingProxyType(
    {
        "num_requests_running": "Sequences that hold a place in the steps.",
        "num_requests_waiting": "Sequences that wait for a place.",
        "kv_cache_usage_perc": "Share of the KV pages that running sequences hold; 1 is all.",
        "num_preemptions": "Times that a sequence lost its pages to another.",
        "prompt_tokens": "Tokens of prompts, counted when the first token behind them comes.",
        "prompt_tokens_cached": "Those of them that the prefix cache had.",
        "generation_tokens": "Tokens generated.",
        "prefix_cache_queries": "Tokens looked up in the prefix cache.",
        "prefix_cache_hits": "Tokens found in the prefix cache.",
        "compiles_after_ready": "Programs compiled while the engine stepped; there should be none.",
        "corrupted_requests": "Requests that failed because the model's scores were not numbers (NaN).",
        "steps": "Steps launched.",
        "decode_rows": "Rows of those steps that decoded one token.",
        "request_success": "Samples that ended, by their finish reason.",
        "time_to_first_token_seconds": "From a request's arrival to its first token.",
        "inter_token_latency_seconds": "From one token of a text to the next.",
        "request_time_per_output_token_seconds": "Mean time a token of a text, the first not counted.",
        "e2e_request_latency_seconds": "From a request's arrival to its last token.",
        "request_queue_time_seconds": "From a request's place in the queue to its first step.",
        "request_inference_time_seconds": "From a request's first step to its last token.",
        "request_prefill_time_seconds": "From a request's first step to its first token.",
        "request_decode_time_seconds": "From a request's first token to its last.",
        "request_prompt_tokens": "Tokens of a request's prompt.",
        "request_generation_tokens": "Tokens of a generated text.",
        "request_max_num_generation_tokens": "Tokens of the longest text of a request.",
        "request_prefill_kv_computed_tokens": "Tokens of a request's prompt that the prefix cache did not have.",
        "request_params_n": "Samples that a request asked for.",
        "request_params_max_tokens": "Most tokens that a request allowed a text.",
        "iteration_tokens_total": "Tokens of a step: one a generated token, and the prompts that it completed.",
    }
)


@dataclasses.dataclass(frozen=True)
class Counter:
    """A number that only grows while the engine lives."""

    name: str
    labels: dict[str, str]
    value: int | float
    kind: ClassVar[str] = "counter"


@dataclasses.dataclass(frozen=True)
class Gauge:
    """A number of this moment."""

    name: str
    labels: dict[str, str]
    value: int | float
    kind: ClassVar[str] = "gauge"


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How often values came that were at most so large.

    Attributes:
        name: Its name.
        labels: What tells it from others of that name.
        count: Values seen.
        sum: Their sum.
        buckets: Upper bound, as text, up to ``+Inf`` -> values seen that were at most that.
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
        name: The histogram's, without prefix.
        bounds: Upper bounds of its buckets, rising; one without bound is added.
    """

    def __init__(self, name: str, bounds: Sequence[float]):
        self._name = name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: int | float, times: int = 1) -> None:
        """Add a value, or the same one several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self, prefix: str) -> Histogram:
        """Return the histogram so far; another thread may go on adding values meanwhile."""
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
    """Metrics in Prometheus' text format 0.0.4.

    Args:
        metrics: As ``get_metrics`` gives them: those of one name behind each other.
        labels: Added to each, such as ``model_name``.
        help_lines: What metrics are, by name without prefix.
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
