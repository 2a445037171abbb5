"""Log engine statistics every ten seconds while there is activity, in vLLM's format."""

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.api.draft_totals import DraftTotals
from jaxserve.api.metric_types import Metric

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class _Totals(NamedTuple):
    """Token counters."""

    prompt: float = 0.0
    generation: float = 0.0
    queries: float = 0.0
    hits: float = 0.0


class StatsLogger:
    """Logs the throughput since the last line, and the current state.

    Args:
        device: Name of the device with the KV pages, such as "GPU".
        interval_s: Seconds between two lines.
    """

    def __init__(self, device: str, interval_s: float = INTERVAL_S):
        self._device = device
        self._interval_s = interval_s
        self._last_s = time.monotonic()
        self._last, self._last_drafts = _Totals(), DraftTotals()
        self._hit_rate: float | None = None
        self._is_quiet = True

    def is_due(self) -> bool:
        """Whether the interval has passed."""
        return self.remaining_s() <= 0

    def remaining_s(self) -> float:
        """Seconds until the next line is due."""
        return self._interval_s - (time.monotonic() - self._last_s)

    def wait_s(self) -> float | None:
        """Seconds for which an idle engine may wait until ``log`` is to be called; None for any time."""
        return None if self._is_quiet else max(self.remaining_s(), 0.0)

    @property
    def is_quiet(self) -> bool:
        """Whether there was no activity at the last call of ``log``, so that an idle engine need not call it again."""
        return self._is_quiet

    def resume(self) -> None:
        """Exclude the idle time so far from the next line's throughput; call it when work begins."""
        if self._is_quiet:
            self._last_s = time.monotonic()
            self._is_quiet = False

    def log(self, metrics: Sequence[Metric]) -> None:
        """Log a line, and one about drafts if any were verified, unless nothing has run since the last one."""
        values = {metric.name.partition(":")[2]: metric.value for metric in metrics if not metric.labels}
        names = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
        totals = _Totals(*(values[name] for name in names))
        now = time.monotonic()
        elapsed = max(now - self._last_s, 1e-9)
        prompt, generation, queries, hits = (new - old for new, old in zip(totals, self._last, strict=True))
        self._is_quiet = totals == self._last and not values["num_requests_running"]
        self._last_s, self._last = now, totals
        if self._is_quiet:
            return
        if queries:
            self._hit_rate = hits / queries
        parts = [
            f"Avg prompt throughput: {prompt / elapsed:.1f} tokens/s",
            f"Avg generation throughput: {generation / elapsed:.1f} tokens/s",
            f"Running: {values['num_requests_running']:.0f} reqs",
            f"Waiting: {values['num_requests_waiting']:.0f} reqs",
        ]
        if values["num_preemptions"]:
            parts.append(f"Preemptions: {values['num_preemptions']:.0f}")
        parts.append(f"{self._device} KV cache usage: {100 * values['kv_cache_usage_perc']:.1f}%")
        if self._hit_rate is not None:
            parts.append(f"Prefix cache hit rate: {100 * self._hit_rate:.1f}%")
        logger.info("Engine 000: %s", ", ".join(parts))
        drafts = DraftTotals.of(metrics)
        new, self._last_drafts = drafts.since(self._last_drafts), drafts
        if new.num_drafts:
            logger.info("SpecDecoding metrics: %s", _drafts_line(new, elapsed))


def _drafts_line(drafts: DraftTotals, elapsed_s: float) -> str:
    """Return vLLM's line about the drafts of some seconds."""
    rates = ", ".join(f"{count / drafts.num_drafts:.3f}" for count in drafts.accepted)
    return (
        f"Mean acceptance length: {drafts.mean_length:.2f}, "
        f"Accepted throughput: {drafts.num_accepted / elapsed_s:.2f} tokens/s, "
        f"Drafted throughput: {drafts.num_tokens / elapsed_s:.2f} tokens/s, "
        f"Accepted: {drafts.num_accepted:.0f} tokens, Drafted: {drafts.num_tokens:.0f} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {100 * drafts.acceptance_rate:.1f}%"
    )
