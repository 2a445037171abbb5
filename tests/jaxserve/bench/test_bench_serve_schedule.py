"""``jaxserve bench serve``: when requests are sent."""

import math

import numpy as np
import pytest

from jaxserve.bench.serve.records import BenchServeError
from jaxserve.bench.serve.schedule import Rate, arrival_times

COUNT = 20_000


def gaps(rate: Rate, seed: int = 0) -> np.ndarray:
    """Seconds between requests."""
    return np.diff(arrival_times(COUNT, rate, seed))


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(5, Rate(), 0) == [0.0] * 5


def test_infinite_burstiness_is_even() -> None:
    assert arrival_times(4, Rate(8.0, math.inf), 0) == [0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    """Mean 1 / rate and coefficient of variation 1 / sqrt(shape), to within five standard errors or so."""
    found = gaps(Rate(10.0, burstiness))
    assert found.mean() == pytest.approx(0.1, rel=0.03)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.06)


def test_burstiness_one_is_a_poisson_process() -> None:
    """Arrivals of a second: the variance is the mean; and gaps longer than t are as rare as exp(-rate t)."""
    times = np.array(arrival_times(COUNT, Rate(10.0), 3))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.15)
    for t in (0.05, 0.1, 0.3):
        assert (np.diff(times) > t).mean() == pytest.approx(math.exp(-10 * t), abs=0.02)


def test_the_last_request_comes_when_the_rate_says() -> None:
    for seed in range(3):
        assert arrival_times(50, Rate(5.0, 0.5), seed)[-1] == pytest.approx(10.0)


def test_a_seed_decides_all() -> None:
    assert arrival_times(9, Rate(5.0), 1) == arrival_times(9, Rate(5.0), 1)
    assert arrival_times(9, Rate(5.0), 1) != arrival_times(9, Rate(5.0), 2)


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 8.5), ("exponential", 4.0)])
def test_ramps(strategy: str, middle: float) -> None:
    rate = Rate(ramp_up=strategy, start_rps=1.0, end_rps=16.0, burstiness=math.inf)  # type: ignore[arg-type]
    assert [rate.at(i, 3) for i in range(3)] == [1.0, middle, 16.0]
    assert np.diff([0.0, *arrival_times(3, rate, 0)]) == pytest.approx([1.0, 1 / middle, 1 / 16])


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"request_rate": 0.0}, "request rate: expected requests per second above 0, got 0.0"),
        ({"request_rate": math.nan}, "request rate"),
        ({"burstiness": -1.0}, "burstiness: expected a number above 0"),
        ({"start_rps": 1.0}, "need ramp-up-strategy"),
        ({"ramp_up": "linear", "start_rps": 1.0}, "expected rates 0 < ramp-up-start-rps <= ramp-up-end-rps"),
        ({"ramp_up": "linear", "start_rps": 3.0, "end_rps": 2.0}, "got 3.0 and 2.0"),
        ({"ramp_up": "linear", "start_rps": 1.0, "end_rps": 2.0, "request_rate": 5.0}, "omit request-rate"),
    ],
)
def test_wrong_rates(fields: dict[str, float], match: str) -> None:
    with pytest.raises(BenchServeError, match=match):
        Rate(**fields)  # type: ignore[arg-type]
