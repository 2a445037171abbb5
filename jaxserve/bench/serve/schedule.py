"""Send times of requests, computed before the first one, so that no response delays a request (an open loop)."""

import dataclasses
import itertools
import math
from typing import Literal

import numpy as np

from jaxserve.bench.serve.records import BenchServeError

RampUp = Literal["linear", "exponential"]


@dataclasses.dataclass(frozen=True)
class Rate:
    """The rate of requests over time.

    Attributes:
        request_rate: Requests per second; infinite: all at once.
        burstiness: Shape of the gamma distribution of the gaps between requests: 1 is a Poisson process, smaller
            values come in bursts, infinite is evenly spaced.
        ramp_up: How the rate changes from ``start_rps`` to ``end_rps``; None: constant.
        start_rps: Rate of the first request.
        end_rps: Rate of the last.

    Raises:
        BenchServeError: A number is out of range, or two settings exclude each other.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp_up: RampUp | None = None
    start_rps: float | None = None
    end_rps: float | None = None

    def __post_init__(self):
        if not self.request_rate > 0:
            raise BenchServeError(f"request rate: expected requests per second above 0, got {self.request_rate}")
        if not self.burstiness > 0:
            raise BenchServeError(f"burstiness: expected a number above 0, got {self.burstiness}")
        start, end = self.start_rps, self.end_rps
        if self.ramp_up is None:
            if start is not None or end is not None:
                raise BenchServeError("ramp-up-start-rps and ramp-up-end-rps need ramp-up-strategy")
            return
        if not math.isinf(self.request_rate):
            raise BenchServeError("ramp-up-strategy: the ramp sets the rate; omit request-rate")
        if start is None or end is None or not 0 < start <= end < math.inf:
            raise BenchServeError(
                f"ramp-up: expected rates 0 < ramp-up-start-rps <= ramp-up-end-rps, got {start} and {end}"
            )

    def at(self, index: int, count: int) -> float:
        """Return the requests per second around request ``index`` of ``count``."""
        if self.ramp_up is None or self.start_rps is None or self.end_rps is None:
            return self.request_rate
        progress = index / max(count - 1, 1)
        if self.ramp_up == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * (self.end_rps / self.start_rps) ** progress


def arrival_times(count: int, rate: Rate, seed: int) -> list[float]:
    """Return the seconds from the start at which each request is sent, drawn as in vLLM.

    At a fixed rate all are scaled so that the last one is sent after exactly ``count / request_rate`` seconds.
    """
    generator = np.random.default_rng(seed)
    rates = [rate.at(i, count) for i in range(count)]
    if math.isinf(rate.burstiness) or math.isinf(rates[0]):
        gaps = [1 / one for one in rates]
    else:
        gaps = [float(generator.gamma(rate.burstiness, 1 / (one * rate.burstiness))) for one in rates]
    times = list(itertools.accumulate(gaps))
    if rate.ramp_up is None and times[-1] > 0:
        scale = count / rate.request_rate / times[-1]
        times = [time * scale for time in times]
    return times
