"""The picture of a comparison: memory, communication and the time of a step of each candidate."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.api.errors import ConfigError
from jaxserve.api.text_files import file_errors
from jaxserve.pictures import check_format, new_figure

_MOST_BARS = 16
_COLOURS = {
    "weights": "#2563eb",
    "largest step": "#f59e0b",
    "state": "#94a3b8",
    "KV pages": "#86efac",
    "all-reduce": "#dc2626",
    "all-gather": "#f97316",
    "reduce-scatter": "#a855f7",
    "all-to-all": "#0d9488",
    "hand-over": "#64748b",
    "collective-permute": "#64748b",
}
_UNITS = {"B": 1.0, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3}
_TIMES = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


class Bar(NamedTuple):
    """A candidate.

    Attributes:
        name: Mesh and layout.
        memory: Bytes on a device of the fullest stage, by use.
        exchanged: Bytes of the results of a step's collectives on each device, by kind.
        predicted_s: Time of a step.
        measured_s: The same, measured; None if it did not run.
        fits: Whether the model fits.
    """

    name: str
    memory: Mapping[str, int | float]
    exchanged: Mapping[str, int | float]
    predicted_s: float
    measured_s: float | None
    fits: bool


def draw(bars: Sequence[Bar], title: str, memory_bytes: int | float, path: str) -> None:
    """Draw the first candidates to a file.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    check_format("picture", path)
    with file_errors("picture", path):
        _figure(bars, title, memory_bytes).savefig(path, dpi=100)


def svg(bars: Sequence[Bar], title: str, memory_bytes: int | float) -> str:
    """Return the same as SVG, or "" without matplotlib."""
    try:
        figure = _figure(bars, title, memory_bytes)
    except ConfigError:
        return ""
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()


def _figure(bars: Sequence[Bar], title: str, memory_bytes: int | float) -> Any:
    shown = bars[:_MOST_BARS]
    figure = new_figure("picture", figsize=(9.6, 1.9 + 0.27 * len(shown)))
    more = f"; the fastest {len(shown)} of {len(bars)}" if len(bars) > len(shown) else ""
    figure.suptitle(f"{title}{more}", fontsize=10, fontweight="bold")
    memory, exchanged, time = figure.subplots(1, 3, sharey=True)
    _stack(memory, [bar.memory for bar in shown], "memory of a device", _UNITS, memory_bytes)
    unit, _ = _unit(memory_bytes, _UNITS)
    limit = memory_bytes / _UNITS[unit]
    memory.axvline(limit, color="#17202e", linewidth=1, linestyle="--", label=f"has {limit:.3g} {unit}")
    _stack(exchanged, [bar.exchanged for bar in shown], "collectives of a step", _UNITS)
    _times(time, shown)
    memory.set_yticks(
        range(len(shown)), [bar.name + ("" if bar.fits else " (does not fit)") for bar in shown], fontsize=8
    )
    memory.set_ylim(len(shown) - 0.4, -0.6)
    for axes in (memory, exchanged, time):
        axes.tick_params(labelsize=8)
        axes.grid(axis="x", linewidth=0.4)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(
            fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.9 / len(shown) - 0.09), ncols=2, frameon=False
        )
    return figure


def _stack(
    axes: Any,
    rows: Sequence[Mapping[str, int | float]],
    title: str,
    units: Mapping[str, int | float],
    least: int | float = 0,
) -> None:
    """Draw a stacked bar for each row, in a unit that suits the largest."""
    unit, scale = _unit(max([least, *(sum(row.values()) for row in rows)]), units)
    start = [0.0] * len(rows)
    for kind in dict.fromkeys(kind for row in rows for kind in row):
        widths = [row.get(kind, 0.0) / scale for row in rows]
        axes.barh(range(len(rows)), widths, 0.7, left=start, color=_COLOURS[kind], label=kind)
        start = [begin + width for begin, width in zip(start, widths, strict=True)]
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(unit, fontsize=8)
    if not any(start):
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", fontsize=8)
        axes.set_xlim(0, 1)


def _times(axes: Any, bars: Sequence[Bar]) -> None:
    measured = [(row, bar.measured_s) for row, bar in enumerate(bars) if bar.measured_s is not None]
    unit, scale = _unit(max([bar.predicted_s for bar in bars] + [time_s for _, time_s in measured]), _TIMES)
    predicted = [bar.predicted_s / scale for bar in bars]
    axes.barh(range(len(bars)), predicted, 0.7, color="#93c5fd", label="predicted")
    if measured:
        rows, times = zip(*measured, strict=True)
        axes.plot([time_s / scale for time_s in times], rows, "D", color="#17202e", markersize=4, label="measured")
    axes.set_title("time of a step", fontsize=9)
    axes.set_xlabel(unit, fontsize=8)


def _unit(largest: int | float, units: Mapping[str, int | float]) -> tuple[str, float]:
    """Return the largest unit of which a number has at least one, and its size."""
    fitting = [name for name, size in units.items() if size <= largest]
    name = fitting[-1] if fitting else next(iter(units))
    return name, units[name]
