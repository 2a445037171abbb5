"""Metrics of a load test: vLLM's, with its names and its text report.

As in vLLM, an inter-token latency (ITL) is the time between two chunks, so a chunk with several tokens counts once, as
users see it; the time per output token (TPOT) divides by the server's token count; peak tokens per second counts
chunks.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any

import numpy as np

from jaxserve.bench.serve.drafts import draft_rows
from jaxserve.bench.serve.records import BenchResponse, BenchServeError

WIDTH = 50
HEADERS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
"""Metrics that have percentiles: name in text, and headline."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
DETAILS = (
    *("input_lens", "output_lens", "start_times", "queue_times", "ttfts", "itls", "latencies"),
    *("generated_texts", "errors"),
)
"""Keys with one entry per request, which only ``--save-detailed`` keeps."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The metrics to report.

    Attributes:
        metrics: Keys of ``HEADERS``.
        percentiles: In 0..100.
        goodput: Largest milliseconds of some metrics in a good request; empty: no goodput.
        max_concurrency: Limit of concurrent requests; None: no limit.
        request_rate: Requests per second; infinite: all at once.

    Raises:
        BenchServeError: A metric of the client's queue without a concurrency limit.
    """

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] = dataclasses.field(default_factory=dict)
    max_concurrency: int | None = None
    request_rate: float = float("inf")

    def __post_init__(self):
        for name in ("client_queue_time", "e2el_including_client_queue"):
            if name in self.metrics and self.max_concurrency is None:
                raise BenchServeError(f"percentile-metrics: {name} needs max-concurrency")


def read_metrics(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of metrics.

    Raises:
        BenchServeError: A metric is unknown.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in HEADERS:
            raise BenchServeError(f"percentile-metrics: unknown metric {name!r}; metrics: {', '.join(HEADERS)}")
    return names


def read_percentiles(text: str) -> tuple[float, ...]:
    """Parse a comma-separated list of percentiles.

    Raises:
        BenchServeError: One is not a number from 0 to 100.
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= value <= 100 for value in found):
        raise BenchServeError(f"metric-percentiles: expected comma-separated numbers from 0 to 100, got {text!r}")
    return found


def read_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse pairs such as ``ttft:500``, in milliseconds.

    Raises:
        BenchServeError: A pair is malformed, or a metric is unknown, negative or repeated.
    """
    found: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name in found:
            raise BenchServeError(f"goodput: {name} is repeated")
        try:
            found[name] = float(value)
        except ValueError:
            raise BenchServeError(f"goodput: expected METRIC:MILLISECONDS such as ttft:500, got {pair!r}") from None
        if name not in GOODPUT_METRICS or not found[name] >= 0:
            raise BenchServeError(
                f"goodput: expected {', '.join(GOODPUT_METRICS)} with milliseconds >= 0, got {pair!r}"
            )
    return found


def output_length(response: BenchResponse) -> int:
    """Return the tokens of a response: the server's count, or its chunks if it sent none."""
    if not response.is_success:
        return 0
    return len(response.chunk_s) if response.num_output_tokens is None else response.num_output_tokens


def tpot_s(response: BenchResponse) -> float | None:
    """Return the mean time per output token after the first; None for fewer than two tokens."""
    length = output_length(response)
    return (response.latency_s - response.ttft_s) / (length - 1) if length > 1 else None


def figures(responses: Sequence[BenchResponse], duration_s: float, selection: Selection) -> dict[str, Any]:
    """Compute vLLM's metrics. Those of single requests have one entry per request, in the order they were sent."""
    good = [response for response in responses if response.is_success]
    num_input = sum(response.num_prompt_tokens for response in good)
    lengths = [output_length(response) for response in responses]
    num_good = sum(_is_within(response, selection.goodput) for response in good)
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(responses) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": sum(lengths),
        "request_throughput": len(good) / duration_s,
        "request_goodput": num_good / duration_s if selection.goodput else None,
        "output_throughput": sum(lengths) / duration_s,
        "total_token_throughput": (num_input + sum(lengths)) / duration_s,
        "input_lens": [response.num_prompt_tokens for response in responses],
        "output_lens": lengths,
        "ttfts": [response.ttft_s for response in responses],
        "itls": [response.itls_s for response in responses],
        "latencies": [response.latency_s for response in responses],
        "start_times": [response.start_s for response in responses],
        "queue_times": [response.queue_s for response in responses],
        "generated_texts": [response.text for response in responses],
        "errors": [response.error for response in responses],
        "max_output_tokens_per_s": _peak_chunks(good),
        "max_concurrent_requests": _peak_concurrency(good),
    }
    for name in selection.metrics:
        found |= _statistics(name, _values_s(name, good), selection.percentiles)
    return found


def _values_s(name: str, good: Sequence[BenchResponse]) -> list[float]:
    if name == "itl":
        return [gap for response in good for gap in response.itls_s]
    if name == "tpot":
        return [value for value in map(tpot_s, good) if value is not None]
    read = {
        "ttft": lambda response: response.ttft_s,
        "e2el": lambda response: response.latency_s,
        "client_queue_time": lambda response: response.queue_s,
        "e2el_including_client_queue": lambda response: response.latency_s + response.queue_s,
    }[name]
    return [read(response) for response in good]


def _statistics(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = np.array(values_s or [0.0]) * 1000
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    found |= {f"p{_word(p)}": np.percentile(values, p) for p in percentiles}
    return {f"{statistic}_{name}_ms": float(value) for statistic, value in found.items()}


def _word(percentile: float) -> str:
    return str(int(percentile)) if int(percentile) == percentile else str(percentile)


def _is_within(response: BenchResponse, limits_ms: Mapping[str, float]) -> bool:
    """Return whether a response meets all limits; one with a single token meets any limit of TPOT."""
    values_s = {"ttft": response.ttft_s, "tpot": tpot_s(response) or 0.0, "e2el": response.latency_s}
    return all(values_s[name] <= limit / 1000 for name, limit in limits_ms.items())


def _peak_chunks(good: Sequence[BenchResponse]) -> float:
    """Return the largest number of chunks per second, in seconds counted from the first request."""
    start = min((response.start_s for response in good), default=0.0)
    counts = collections.Counter(int(time - start) for response in good for time in response.chunk_s)
    return float(max(counts.values(), default=0))


def _peak_concurrency(good: Sequence[BenchResponse]) -> int:
    """Return the largest number of concurrent requests among the successful ones."""
    changes = [(response.start_s, 1) for response in good]
    changes += [(response.start_s + response.latency_s, -1) for response in good]
    peak = now = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak


def banner_lines(found: Mapping[str, Any], selection: Selection) -> list[str]:
    """Format the metrics as vLLM prints them."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines.append(_line("Successful requests:", found["completed"]))
    lines.append(_line("Failed requests:", found["failed"]))
    if selection.max_concurrency is not None:
        lines.append(_line("Maximum request concurrency:", selection.max_concurrency))
    if selection.request_rate != float("inf"):
        lines.append(_line("Request rate configured (RPS):", selection.request_rate))
    lines.append(_line("Benchmark duration (s):", found["duration"]))
    lines.append(_line("Total input tokens:", found["total_input_tokens"]))
    lines.append(_line("Total generated tokens:", found["total_output_tokens"]))
    lines.append(_line("Request throughput (req/s):", found["request_throughput"]))
    if selection.goodput:
        lines.append(_line("Request goodput (req/s):", found["request_goodput"]))
    lines.append(_line("Output token throughput (tok/s):", found["output_throughput"]))
    lines.append(_line("Peak output token throughput (tok/s):", found["max_output_tokens_per_s"]))
    lines.append(_line("Peak concurrent requests:", float(found["max_concurrent_requests"])))
    lines.append(_line("Total token throughput (tok/s):", found["total_token_throughput"]))
    for name, (short, headline) in HEADERS.items():
        if f"mean_{name}_ms" not in found:
            continue
        lines.append(f"{headline:-^{WIDTH}}")
        lines.append(_line(f"Mean {short} (ms):", found[f"mean_{name}_ms"]))
        lines.append(_line(f"Median {short} (ms):", found[f"median_{name}_ms"]))
        for p in map(_word, selection.percentiles):
            lines.append(_line(f"P{p} {short} (ms):", found[f"p{p}_{name}_ms"]))
    drafts = draft_rows(found)
    if drafts:
        lines += [f"{'Speculative Decoding':-^{WIDTH}}", *starmap(_line, drafts.items())]
    return [*lines, "=" * WIDTH]


def _line(label: str, value: int | float | None) -> str:
    if value is None:
        return label
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"
