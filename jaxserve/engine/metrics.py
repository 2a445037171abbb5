"""Metrics of a running engine, under vLLM's names with the prefix ``jaxserve:``."""

import collections
import threading
from collections.abc import Iterable, Mapping, Sequence

import jax

from jaxserve.api.metric_types import Counter, Distribution, Gauge, Metric
from jaxserve.api.outputs import FinishReason
from jaxserve.engine.replica import Replica
from jaxserve.engine.request_state import RequestState
from jaxserve.scheduling.context_pages import MISS_REASONS
from jaxserve.scheduling.drafts import DraftCounts
from jaxserve.scheduling.step import Step

PREFIX = "jaxserve:"
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

# Histogram buckets (upper bounds) are vLLM's (`vllm/v1/metrics/buckets.py`), so that its dashboards work.
_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_STEP_TOKENS = (1.0, *(2.0**power for power in range(3, 15)))
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)


class EngineMetrics:
    """Counters and histograms of an engine.

    A request with ``n`` samples counts once for its latencies, prompt and parameters, and ``n`` times in
    ``request_success``, ``request_generation_tokens`` and ``request_time_per_output_token_seconds``. Aborted and failed
    requests count in ``request_success`` only. A pooling request counts for its prompt and its queue, prefill,
    inference and total latency.

    Args:
        max_model_len: Maximum context length in tokens.
    """

    def __init__(self, max_model_len: int):
        tokens = _one_two_five(max_model_len)
        self._prompt_tokens = self._cached_tokens = self._generation_tokens = self._corrupted = 0
        self._finished = collections.Counter[FinishReason](dict.fromkeys(FINISH_REASONS, 0))
        bounds = {
            "time_to_first_token_seconds": _FIRST_TOKEN_S,
            "inter_token_latency_seconds": _TOKEN_S,
            "request_time_per_output_token_seconds": _TOKEN_S,
            "e2e_request_latency_seconds": _LATENCY_S,
            "request_queue_time_seconds": _LATENCY_S,
            "request_inference_time_seconds": _LATENCY_S,
            "request_prefill_time_seconds": _LATENCY_S,
            "request_decode_time_seconds": _LATENCY_S,
            "request_prompt_tokens": tokens,
            "request_generation_tokens": tokens,
            "request_max_num_generation_tokens": tokens,
            "request_prefill_kv_computed_tokens": tokens,
            "request_params_n": _SAMPLES,
            "request_params_max_tokens": tokens,
            "iteration_tokens_total": _STEP_TOKENS,
        }
        self._distributions = {name: Distribution(name, limits) for name, limits in bounds.items()}

    def stepped(self, step: Step, started: Sequence[RequestState], pooled: Sequence[RequestState]) -> None:
        """Count the results of a step.

        Args:
            step: The completed step.
            started: Requests that got their first token.
            pooled: Requests that the step pooled.
        """
        for previous_s, count in collections.Counter(step.previous_s).items():
            self._distributions["inter_token_latency_seconds"].observe(step.completed_s - previous_s, count)
        num_tokens = step.num_new_tokens
        self._generation_tokens += num_tokens
        for request in (*started, *pooled):
            num_prompt_tokens = len(request.prompt_token_ids)
            num_tokens += num_prompt_tokens
            self._prompt_tokens += num_prompt_tokens
            self._cached_tokens += request.num_cached_tokens or 0
        for request in started:
            self._distributions["time_to_first_token_seconds"].observe(step.completed_s - request.arrival_s)
        if num_tokens:
            self._distributions["iteration_tokens_total"].observe(num_tokens)

    def corrupted(self) -> None:
        """Count a request with NaN logits or non-finite hidden states."""
        self._corrupted += 1

    def finished(self, request: RequestState) -> None:
        """Count a finished request."""
        sequences = [sample.sequence for sample in request.samples]
        reasons: list[FinishReason] = [
            "error" if request.error is not None else sequence.finish_reason or "abort" for sequence in sequences
        ]
        self._finished.update(reasons)
        first_s = request.first_token_s
        if request.embedding is not None and request.finished_s is not None:
            self._observe(_request_values(request, request.finished_s, request.finished_s))
        elif first_s is not None and "abort" not in reasons and "error" not in reasons:
            last_s = max(sequence.last_token_s for sequence in sequences)
            self._observe(
                {
                    **_request_values(request, first_s, last_s),
                    "request_decode_time_seconds": last_s - first_s,
                    "request_max_num_generation_tokens": max(sequence.num_output_tokens for sequence in sequences),
                    "request_params_n": len(sequences),
                    "request_params_max_tokens": request.request.params.max_tokens or 0,
                }
            )
            for sequence in sequences:
                num_tokens, duration_s = sequence.num_output_tokens, sequence.last_token_s - first_s
                self._observe(
                    {
                        "request_generation_tokens": num_tokens,
                        "request_time_per_output_token_seconds": duration_s / max(num_tokens - 1, 1),
                    }
                )

    def _observe(self, values: Mapping[str, float]) -> None:
        """Add a value to each of some histograms, by name."""
        for name, value in values.items():
            self._distributions[name].observe(value)

    def collect(self, replicas: Sequence[Replica], num_compiles: int) -> list[Metric]:
        """Return the current metrics in a fixed order; ``num_compiles`` is the count of a ``CompileCounter``."""
        schedulers = [scheduler for replica in replicas for scheduler in replica.schedulers]
        usage = sum(scheduler.allocator.usage for scheduler in schedulers) / len(schedulers)
        gauges = {
            "num_requests_running": sum(len(scheduler.running) for scheduler in schedulers),
            "num_requests_waiting": sum(len(scheduler.waiting) for scheduler in schedulers),
            "kv_cache_usage_perc": usage,
            "prefix_cache_states": sum(scheduler.pages.num_states for scheduler in schedulers),
        }
        counters = {
            "num_preemptions": sum(scheduler.num_preemptions for scheduler in schedulers),
            "prompt_tokens": self._prompt_tokens,
            "prompt_tokens_cached": self._cached_tokens,
            "generation_tokens": self._generation_tokens,
            "prefix_cache_queries": sum(scheduler.pages.num_queried_tokens for scheduler in schedulers),
            "prefix_cache_hits": sum(scheduler.pages.num_hit_tokens for scheduler in schedulers),
            "compiles_after_ready": num_compiles,
            "corrupted_requests": self._corrupted,
            "steps": sum(replica.num_steps for replica in replicas),
            "decode_rows": sum(replica.num_decode_rows for replica in replicas),
            "stage_ticks": sum(replica.num_stage_ticks for replica in replicas),
            "idle_stage_ticks": sum(replica.num_idle_stage_ticks for replica in replicas),
        }
        found: list[Metric] = [Gauge(PREFIX + name, {}, value) for name, value in gauges.items()]
        found += [Counter(PREFIX + name, {}, value) for name, value in counters.items()]
        for reason, count in self._finished.items():
            found.append(Counter(f"{PREFIX}request_success", {"finished_reason": reason}, count))
        for reason in MISS_REASONS:
            count = sum(scheduler.pages.misses[reason] for scheduler in schedulers)
            found.append(Counter(f"{PREFIX}prefix_cache_misses", {"reason": reason}, count))
        found += [metric.snapshot(PREFIX) for metric in self._distributions.values()]
        drafts = (scheduler.draft_counts for scheduler in schedulers)
        return found + _draft_metrics(drafts, schedulers[0].limits.max_draft_tokens)


def _draft_metrics(each: Iterable[DraftCounts], num_positions: int) -> list[Metric]:
    """Return the counters of drafts of at most ``num_positions`` tokens; none without speculative decoding."""
    counts = DraftCounts()
    for one in each:
        counts.add(one)
    accepted = counts.num_accepted
    values = {"drafts": counts.num_drafts, "draft_tokens": counts.num_tokens, "accepted_tokens": accepted.total()}
    name, positions = f"{PREFIX}spec_decode_num", range(num_positions)
    found: list[Metric] = [Counter(f"{name}_{what}", {}, value) for what, value in values.items() if positions]
    return found + [
        Counter(f"{name}_accepted_tokens_per_pos", {"position": str(position)}, accepted[position])
        for position in positions
    ]


def _request_values(request: RequestState, first_s: float, last_s: float) -> dict[str, float]:
    """Return the latencies and token counts of the prompt of a request whose prefill ended at ``first_s``."""
    scheduled_s, num_prompt_tokens = request.samples[0].sequence.scheduled_s, len(request.prompt_token_ids)
    return {
        "e2e_request_latency_seconds": last_s - request.arrival_s,
        "request_queue_time_seconds": scheduled_s - request.queued_s,
        "request_prefill_time_seconds": first_s - scheduled_s,
        "request_inference_time_seconds": last_s - scheduled_s,
        "request_prompt_tokens": num_prompt_tokens,
        "request_prefill_kv_computed_tokens": num_prompt_tokens - (request.num_cached_tokens or 0),
    }


class CompileCounter:
    """Counts XLA compilations during steps; there should be none.

    Args:
        ignores_other_threads: Whether to count only those on the thread of the steps: programs that another thread
            compiles for a new mesh delay no step.
    """

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self, ignores_other_threads: bool = False):
        self.count = 0
        self._ignores_other_threads = ignores_other_threads
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def __enter__(self) -> "CompileCounter":
        self._thread = threading.get_ident()
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread = None

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        thread = threading.get_ident() if self._ignores_other_threads else self._thread
        self.count += event == self._EVENT and self._thread is not None and self._thread == thread


def _one_two_five(largest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 … up to ``largest``."""
    powers = range(len(str(largest)))
    return tuple(float(bound) for power in powers for digit in (1, 2, 5) if (bound := digit * 10**power) <= largest)
