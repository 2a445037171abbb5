"""vLLM's log line about a running engine, every ten seconds while there is something to say."""

import logging
import time

from jaxserve.engine.metrics import Metric

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class StatsLogger:
    """Logs throughput since its last line, and the state of this moment."""

    def __init__(self, device: str, interval_s: float = INTERVAL_S):
        self._device = device
        self._interval_s = interval_s
        self._last_s = time.monotonic()
        self._last_tokens = (0.0, 0.0)

    def is_due(self) -> bool:
        """Whether the interval has passed."""
        return time.monotonic() - self._last_s >= self._interval_s

    def log(self, metrics: list[Metric]) -> None:
        """Writes the line, unless nothing has run since the last."""
        values = {metric.name.removeprefix("jaxserve:"): metric.value for metric in metrics if not metric.labels}
        now = time.monotonic()
        elapsed = max(now - self._last_s, 1e-9)
        tokens = (values["prompt_tokens"], values["generation_tokens"])
        is_idle = tokens == self._last_tokens and not values["num_requests_running"]
        prompt, generation = (new - old for new, old in zip(tokens, self._last_tokens, strict=True))
        self._last_s, self._last_tokens = now, tokens
        if is_idle:
            return
        logger.info(
            "Engine 000: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, Preemptions: %d, %s KV cache usage: %.1f%%",
            prompt / elapsed,
            generation / elapsed,
            values["num_requests_running"],
            values["num_requests_waiting"],
            values["num_preemptions"],
            self._device,
            100 * values["kv_cache_usage_perc"],
        )
