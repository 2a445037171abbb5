"""A drawing as SVG: the devices, then each weight as a rectangle whose parts have the colours of their devices."""

import colorsys
import itertools
from collections.abc import Iterator, Sequence
from html import escape

from jaxserve.lab.show.drawing import ShownModel
from jaxserve.lab.show.parts import ShownPages
from jaxserve.lab.show.rows import (
    CollectiveRow,
    Row,
    Sizes,
    bytes_text,
    collective_text,
    pages_split_text,
    pages_text,
    part_text,
    ranges_text,
    shape_text,
    split_text,
)

_WIDTH, _MARGIN, _TEXT_LEFT = 830, 20, 164
_PICTURE_WIDTH, _PICTURE_HEIGHT = 128, 34
_MOST_STAGES, _MOST_REPLICAS, _MOST_EXPERTS, _MOST_STRIPES = 4, 3, 8, 64
_BOX_HEIGHT, _LABEL_WIDTH = 20, 74
_MUTED, _WHOLE, _ACCENT = "#566377", "#e2e6ec", "#b45309"
_FONT = 'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif"'

Place = dict[str, int]  # position along mesh axes


def as_svg(model: ShownModel) -> str:
    """Return the drawing as an SVG document."""
    lines = [_text(_MARGIN, 28, model.title, size=15, weight=600), _text(_MARGIN, 48, model.subtitle, colour=_MUTED)]
    top = 66
    devices, top = _devices(model, top)
    lines += devices
    for note in [_legend(model.mesh), *model.notes]:
        lines.append(_text(_MARGIN, top + 12, note, size=12, colour=_MUTED))
        top += 18
    for title, rows in model.parts():
        top += 14
        lines.append(_text(_MARGIN, top + 14, title, size=14, weight=600))
        top += 26
        for row in rows:
            drawn, height = _row(row, top, model)
            lines += drawn
            top += height
    height = top + 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'{_FONT} font-size="13" fill="#17202e">'
    )
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="#ffffff"/>', *lines, "</svg>", ""])


def _legend(sizes: Sizes) -> str:
    split = [axis for axis in ("tensor", "expert") if sizes[axis] > 1]
    if not split:
        return "Every device has all of its stage's weights."
    letters = " and ".join(f"{axis[0]} the position along {axis}" for axis in split)
    return f"Colours are those of the devices ({letters}); grey is whole on every device."


def _devices(model: ShownModel, top: int) -> tuple[list[str], int]:
    """Return the picture of the mesh, and where it ends: a column for each stage, a row for each replica."""
    sizes, lines = model.mesh, list[str]()
    columns, replicas = _some(len(model.stages), _MOST_STAGES), _some(sizes["data"], _MOST_REPLICAS)
    experts = _some(sizes["expert"], _MOST_EXPERTS)
    column_width = (_WIDTH - 2 * _MARGIN - _LABEL_WIDTH) // len(columns)
    height = len(experts) * (_BOX_HEIGHT + 3) + 8
    for column, stage in enumerate(columns):
        left = _MARGIN + _LABEL_WIDTH + column * column_width
        if stage is None:
            lines.append(_text(left + column_width // 2, top + 34, "…", anchor="middle"))
            continue
        lines += _stage_text(model, stage, left, top)
        for row, replica in enumerate(replicas):
            if replica is not None:
                lines += _boxes(model, stage, replica, experts, (left, top + 62 + row * height, column_width - 16))
    for row, replica in enumerate(replicas):
        name = "…" if replica is None else f"replica {replica}" if sizes["data"] > 1 else "devices"
        lines.append(_text(_MARGIN, top + 62 + row * height + 15, name, size=12, colour=_MUTED))
    return lines, top + 62 + len(replicas) * height + 4


def _stage_text(model: ShownModel, index: int, left: int, top: int) -> list[str]:
    stage = model.stages[index]
    name = f"stage {index}: " if len(model.stages) > 1 else ""
    return [
        _text(left, top + 14, f"{name}layers {ranges_text(stage.layers)}", size=12, weight=600),
        _text(left, top + 31, f"{bytes_text(stage.weight_bytes)} of weights", size=12, colour=_MUTED),
        _text(left, top + 48, f"{bytes_text(stage.token_bytes)} of KV per token", size=12, colour=_MUTED),
    ]


def _boxes(
    model: ShownModel, stage: int, replica: int, experts: Sequence[int | None], area: tuple[int, int, int]
) -> Iterator[str]:
    """Yield a box for each device of a stage of a replica: a row for each position along ``expert``."""
    left, top, width = area
    size, numbers = model.mesh["tensor"], model.devices_of(stage, replica)
    box = min(64.0, width / size)
    for row, expert in enumerate(experts):
        y = top + row * (_BOX_HEIGHT + 3)
        if expert is None:
            yield _text(left + 4, y + 14, "…")
            continue
        for tensor in range(size):
            colour = _colour({"tensor": tensor, "expert": expert}, model.mesh)
            yield _rect(left + tensor * box, y, box - 1, _BOX_HEIGHT, colour)
            number = str(numbers[expert * size + tensor])
            if box >= 8 * len(number) + 4:
                yield _text(left + (tensor + 0.5) * box, y + 14, number, size=11, anchor="middle")


def _row(row: Row, top: int, model: ShownModel) -> tuple[list[str], int]:
    """Return the picture of an array or a collective, and its height."""
    sizes = model.mesh
    if isinstance(row, CollectiveRow):
        band = _rect(_TEXT_LEFT - 8, top, _WIDTH - _MARGIN - _TEXT_LEFT + 8, 20, "#fff4e5")
        text = _text(_TEXT_LEFT, top + 14, f"⇄ {collective_text(row)}", size=12, colour=_ACCENT)
        return [band, text, *_linked(row, top, sizes)], 28
    if isinstance(row, ShownPages):
        name, detail = "KV pages", f"{pages_text(row)}, {bytes_text(row.token_bytes)} per token on each device"
        picture = _picture(_page_grid(row), top, _PICTURE_HEIGHT, sizes)
        return [*picture, *_two_lines(name, f"{detail}; {pages_split_text(row)}", top)], _PICTURE_HEIGHT + 10
    detail = shape_text(row, row.shape) + ("" if row.dtype == model.dtype else f" {row.dtype}")
    if row.part != row.shape:
        detail += f" → {part_text(row, sizes)} on each"
    detail += f", {bytes_text(row.part_bytes)}; {split_text(row)}"
    if len(row.shape) == 1:
        picture = _picture([*row.splits, ()], top + 3, 8, sizes)
        texts = (
            _text(_TEXT_LEFT, top + 12, row.name, size=12, weight=600),
            _text(_TEXT_LEFT + 8 * len(row.name) + 10, top + 12, detail, size=12, colour=_MUTED),
        )
        return [*picture, *texts], 22
    return [
        *_picture(row.splits, top, _PICTURE_HEIGHT, sizes),
        *_two_lines(row.name, detail, top),
    ], _PICTURE_HEIGHT + 10


def _two_lines(name: str, detail: str, top: int) -> list[str]:
    return [
        _text(_TEXT_LEFT, top + 13, name, weight=600),
        _text(_TEXT_LEFT, top + 30, detail, size=12, colour=_MUTED),
    ]


def _page_grid(pages: ShownPages) -> list[tuple[str, ...]]:
    """Return the axes that split heads (vertically) and requests or tokens (horizontally)."""
    across = [axis for axis in (pages.pages_axis, pages.tokens_axis) if axis is not None]
    return [() if pages.heads_axis is None else (pages.heads_axis,), tuple(across)]


def _picture(splits: Sequence[tuple[str, ...]], top: int, height: int, sizes: Sizes) -> Iterator[str]:
    """Yield a rectangle cut as its rows and columns are split; parts have their devices' colours."""
    rows, columns = (_places(axes, sizes) for axes in splits)
    width, part_height = _PICTURE_WIDTH / len(columns), height / len(rows)
    for (y, row), (x, column) in itertools.product(enumerate(rows), enumerate(columns)):
        place = row | column
        colour = _colour(place, sizes) if place else _WHOLE
        left, upper = _MARGIN + x * width, top + y * part_height
        yield _rect(left, upper, width - min(1, width / 4), part_height - min(1, part_height / 4), colour)
        label = " ".join(f"{axis[0]}{place[axis]}" for axis in ("expert", "tensor") if axis in place)
        if label and part_height >= 11 and width >= 7 * len(label):
            yield _text(left + width / 2, upper + part_height / 2 + 4, label, size=10, anchor="middle")


def _places(axes: Sequence[str], sizes: Sizes) -> list[Place]:
    """Return the positions along some axes of each part that they cut, in order; of very many only the first."""
    ranges = [range(sizes[axis]) for axis in axes]
    found = [dict(zip(axes, place, strict=True)) for place in itertools.product(*ranges)]
    return found[:_MOST_STRIPES]


def _linked(row: CollectiveRow, top: int, sizes: Sizes) -> Iterator[str]:
    """Yield a dot for each position along a collective's axes, joined by a line."""
    places = _places(row.axes, sizes)[:8]
    gap = _PICTURE_WIDTH / len(places)
    centres = [_MARGIN + (index + 0.5) * gap for index in range(len(places))]
    yield f'<path d="M{centres[0]:.1f} {top + 10}H{centres[-1]:.1f}" stroke="{_ACCENT}" stroke-width="2"/>'
    for centre, place in zip(centres, places, strict=True):
        yield f'<circle cx="{centre:.1f}" cy="{top + 10}" r="6" fill="{_colour(place, sizes)}" stroke="{_ACCENT}"/>'


def _colour(place: Place, sizes: Sizes) -> str:
    """Return the colour of a position: the hue is that along ``tensor``, the lightness that along ``expert``."""
    tensor, expert = place.get("tensor"), place.get("expert")
    hue = 0.58 if tensor is None else (0.58 + tensor / sizes["tensor"]) % 1
    lightness = 0.72 if expert is None else 0.62 + 0.24 * expert / max(1, sizes["expert"] - 1)
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.15 if tensor is None and sizes["tensor"] > 1 else 0.65)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _some(count: int, most: int) -> list[int | None]:
    """Return all indices or, of more than ``most``, the first ones and the last with None for those between them."""
    return [*range(count)] if count <= most else [*range(most - 2), None, count - 1]


def _rect(x: int | float, y: int | float, width: int | float, height: int | float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{colour}"/>'


def _text(
    x: int | float,
    y: int | float,
    content: str,
    *,
    size: int = 13,
    weight: int = 400,
    colour: str = "#17202e",
    anchor: str = "",
) -> str:
    where = f' text-anchor="{anchor}"' if anchor else ""
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}"{where}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'
