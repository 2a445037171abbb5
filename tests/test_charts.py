"""The README's chart is what the script draws, and its table has the same numbers."""

import json
import re

from scripts.draw_charts import CHARTS, draw

MEASUREMENTS = json.loads((CHARTS / "cpu_measurements.json").read_text())


def test_committed_charts_are_what_the_script_draws() -> None:
    sources = sorted(CHARTS.glob("*_measurements.json"))
    assert len(sources) > 1
    for source in sources:
        chart = CHARTS / f"{source.stem.removesuffix('_measurements')}.svg"
        assert chart.read_text() == draw(json.loads(source.read_text())), "run: python scripts/draw_charts.py"


def test_table_and_chart_have_the_same_numbers() -> None:
    readme = (CHARTS.parent.parent / "README.md").read_text()
    rows = [re.split(r" *\| *", line.strip("| ")) for line in readme.splitlines() if re.match(r"\| [ABC]: ", line)]
    table = [[float(cell.strip("*")) if cell else None for cell in row[1:4]] for row in rows]
    assert table == [panel["values"] for panel in MEASUREMENTS["panels"]]


def test_bars_are_as_long_as_the_values_are_large() -> None:
    panel = {"workload": "A", "title": "t", "unit": "s", "better": "lower", "values": [2.0, 4.0, None]}
    svg = draw({**MEASUREMENTS, "panels": [panel]})
    short, long = [float(width) for width in re.findall(r'<rect x="170" y="\d+" width="([\d.]+)"', svg)]
    assert long == 2 * short
    assert svg.count("not measured") == 1


def test_the_table_of_experts_has_the_measured_numbers() -> None:
    measured = json.loads((CHARTS / "experts_measurements.json").read_text())
    page = (CHARTS.parent / "README.md").read_text()
    for panel in measured["panels"]:
        cells = " | ".join(f"{value:g}" for value in panel["values"])
        assert f"| {panel['title']}, tokens/s | {cells} |" in page
    steps = measured["decode_step"]
    assert f"{steps['ms']['experts']:g} ms" in page and f"{steps['experts_to_dense']['quartiles'][1]:.2f}" in page
