"""Plots of a load test: distributions of latencies, and the load over time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.api.text_files import file_errors
from jaxserve.pictures import new_figure


def plot(found: Mapping[str, Any], path: str) -> None:
    """Plot the metrics of ``metrics.figures`` to a file, in the format of its suffix.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    figure = new_figure("plot", figsize=(10, 7))
    axes = figure.subplots(2, 2)
    good = [i for i, error in enumerate(found["errors"]) if not error]
    _distribution(axes[0, 0], "time to first token", [found["ttfts"][i] for i in good])
    _distribution(axes[0, 1], "time between chunks", [gap for i in good for gap in found["itls"][i]])
    _distribution(axes[1, 0], "time of a request", [found["latencies"][i] for i in good])
    _course(axes[1, 1], found, good)
    with file_errors("plot", path):
        figure.savefig(path, dpi=120)


def _distribution(axes: Any, title: str, values_s: Sequence[float]) -> None:
    values = np.sort(np.array(values_s or [0.0])) * 1000
    axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post")
    for share, style in ((50, ":"), (99, "--")):
        value = float(np.percentile(values, share))
        axes.axvline(value, color="grey", linestyle=style, linewidth=1, label=f"P{share} {value:.1f} ms")
    axes.set(title=title, xlabel="ms", ylabel="fraction", ylim=(0, 1))
    axes.legend()


def _course(axes: Any, found: Mapping[str, Any], good: Sequence[int]) -> None:
    """Plot chunks per second and concurrent requests over time."""
    start_s = min((found["start_times"][i] for i in good), default=0.0)
    first = [found["start_times"][i] - start_s for i in good]
    last = [begin + found["latencies"][i] for begin, i in zip(first, good, strict=True)]
    chunks = [
        time
        for begin, i in zip(first, good, strict=True)
        for time in begin + found["ttfts"][i] + np.cumsum([0.0, *found["itls"][i]])
    ]
    seconds = np.arange(0, int(max(last, default=0.0)) + 2)
    axes.stairs(np.histogram(chunks, seconds)[0], seconds, label="chunks/s")
    axes.set(title="over time", xlabel="s", ylabel="chunks/s")
    times = np.sort([*first, *last])
    running = np.searchsorted(np.sort(first), times, "right") - np.searchsorted(np.sort(last), times, "right")
    beside = axes.twinx()
    beside.step(times, running, where="post", color="tab:orange")
    beside.set_ylabel("concurrent requests", color="tab:orange")
