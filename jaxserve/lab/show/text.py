"""A drawing as text."""

from collections.abc import Sequence

from jaxserve.lab.show.drawing import ShownModel
from jaxserve.lab.show.parts import ShownArray, ShownPages
from jaxserve.lab.show.rows import (
    CollectiveRow,
    Row,
    Sizes,
    bytes_text,
    collective_text,
    heads_text,
    pages_split_text,
    pages_text,
    part_text,
    ranges_text,
    shape_text,
    split_text,
)

_MOST_RANGES = 3  # ranges of devices that a line lists
_MOST_SHARES = 4  # devices whose heads a line names


def as_text(drawing: ShownModel) -> str:
    """Return the drawing as lines of text."""
    lines = [drawing.title, drawing.subtitle, "", *_devices(drawing)]
    for title, rows in drawing.parts():
        lines += ["", *_table([title, "whole", "on each device", "", "split"], rows, drawing.mesh)]
    return "\n".join(lines)


def _devices(drawing: ShownModel) -> list[str]:
    rows = [["", "layers", "weights each", "KV per token each"]]
    for index, stage in enumerate(drawing.stages):
        name = f"stage {index}: " if len(drawing.stages) > 1 else ""
        found = drawing.devices_of(index)
        place = f"{name}device{'s' * (len(found) > 1)} {ranges_text(found, _MOST_RANGES)}"
        rows.append([place, ranges_text(stage.layers), bytes_text(stage.weight_bytes), bytes_text(stage.token_bytes)])
    return [*_aligned(rows), *drawing.notes]


def _table(heading: Sequence[str], rows: Sequence[Row], sizes: Sizes) -> list[str]:
    """Return lines with columns; collectives are lines of their own."""
    table = [[*heading]] + [_cells(row, sizes) for row in rows if not isinstance(row, CollectiveRow)]
    aligned = iter(_aligned(table))
    lines = [next(aligned)]
    for row in rows:
        if isinstance(row, CollectiveRow):
            lines.append(f"  ⇄ {collective_text(row)}")
            continue
        lines.append(next(aligned))
        if isinstance(row, ShownPages) and row.heads_axis is not None and len(row.heads) <= _MOST_SHARES:
            shares = [f"{row.heads_axis} {index} has {heads_text(heads)}" for index, heads in enumerate(row.heads)]
            lines.append(f"    {', '.join(shares)}")
    return lines


def _cells(row: ShownArray | ShownPages, sizes: Sizes) -> list[str]:
    if isinstance(row, ShownPages):
        return ["  KV pages", pages_text(row), "", f"{bytes_text(row.token_bytes)}/token", pages_split_text(row)]
    whole = shape_text(row, row.shape)
    return [f"  {row.name}", whole, part_text(row, sizes), bytes_text(row.part_bytes), split_text(row)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
