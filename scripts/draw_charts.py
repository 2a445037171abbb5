"""Draws the charts of the README from the measurements that are committed beside them.

    python scripts/draw_charts.py

Reads `scripts/charts/*_measurements.json` and writes an SVG for each: one panel per measurement, one bar per
engine, each panel with a scale of its own. A test compares the SVGs with what this script draws.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

CHARTS = Path(__file__).parent / "charts"
WIDTH, PANEL_TOP, ROW_HEIGHT, HEADER = 760, 40, 24, 64
BAR_LEFT, BAR_WIDTH, BAR_HEIGHT = 170, 460, 20
COLOURS = ("#2563eb", "#94a3b8", "#cbd5e1", "#e2e8f0")


def draw(measurements: dict[str, Any]) -> str:
    """The SVG of one file of measurements.

    Args:
        measurements: `date`, `machine` and `model`, for the header; `engines`, their names; `panels`, each with
            `title`, `unit`, `better` ("higher" or "lower") and `values`, one per engine, null if not measured.
    """
    panel_height = PANEL_TOP + ROW_HEIGHT * len(measurements["engines"])
    height = HEADER + panel_height * len(measurements["panels"])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" fill="#17202e">',
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>',
        _text(20, 28, measurements["model"], size=15, weight=600),
        _text(20, 48, f"{measurements['machine']}; {measurements['date']}", colour="#566377"),
    ]
    for index, panel in enumerate(measurements["panels"]):
        lines += _panel(HEADER + index * panel_height, panel, measurements["engines"])
    return "\n".join([*lines, "</svg>", ""])


def _panel(top: int, panel: dict[str, Any], engines: list[str]) -> list[str]:
    title = f"{panel['title']}, {panel['unit']} ({panel['better']} is better)"
    lines = [_text(20, top + 20, title, weight=600)]
    largest = max(value for value in panel["values"] if value is not None)
    for row, (engine, value) in enumerate(zip(engines, panel["values"], strict=True)):
        y = top + 30 + row * ROW_HEIGHT
        lines.append(_text(BAR_LEFT - 10, y + 15, engine, anchor="end"))
        if value is None:
            lines.append(_text(BAR_LEFT, y + 15, "not measured", colour="#566377"))
            continue
        width = round(BAR_WIDTH * value / largest, 1)
        lines.append(
            f'<rect x="{BAR_LEFT}" y="{y}" width="{width}" height="{BAR_HEIGHT}" rx="3" fill="{COLOURS[row]}"/>'
        )
        lines.append(_text(BAR_LEFT + width + 8, y + 15, f"{value:g}", weight=600 if row == 0 else 400))
    return lines


def _text(
    x: float, y: int, content: str, *, size: int = 13, weight: int = 400, colour: str = "#17202e", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:g}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )


def main() -> None:
    """Draws every chart."""
    for source in sorted(CHARTS.glob("*_measurements.json")):
        chart = CHARTS / f"{source.stem.removesuffix('_measurements')}.svg"
        chart.write_text(draw(json.loads(source.read_text())))
        print(chart)


if __name__ == "__main__":
    main()
