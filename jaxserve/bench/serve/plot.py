"""Plots of a load test: distributions of latencies, and the load over time."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.serve.records import BenchServeError


def check_can_plot(path: str) -> None:
    """Check that matplotlib is installed and supports the file's format, before a long run.

    Raises:
        BenchServeError: It is missing, or does not support the format.
    """
    try:
        figure = importlib.import_module("matplotlib.figure").Figure()
    except ImportError as error:
        raise BenchServeError("plot needs matplotlib; run pip install 'jaxserve[research]'") from error
    formats = sorted(figure.canvas.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in formats:
        raise BenchServeError(f"plot: expected a file whose name ends in one of .{', .'.join(formats)}, got {path}")


def plot(found: Mapping[str, Any], path: str) -> None:
    """Plot the metrics of ``metrics.figures`` to a file, in the format of its suffix.

    Raises:
        BenchServeError: The file cannot be written.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    good = [i for i, error in enumerate(found["errors"]) if not error]
    _distribution(axes[0, 0], "time to first token", [found["ttfts"][i] for i in good])
    _distribution(axes[0, 1], "time between chunks", [gap for i in good for gap in found["itls"][i]])
    _distribution(axes[1, 0], "time of a request", [found["latencies"][i] for i in good])
    _course(axes[1, 1], found, good)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise BenchServeError(f"plot: {path} cannot be written: {error}") from error


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
