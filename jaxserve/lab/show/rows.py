"""The lines of a drawing, common to text and SVG: arrays and collectives in order, and their descriptions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxserve.lab.show.flow import PAGES, FlowStep
from jaxserve.lab.show.parts import ShownArray, ShownEnd, ShownLayers, ShownPages

Sizes = Mapping[str, int]
_DIMENSIONS = ("rows", "columns")


class CollectiveRow(NamedTuple):
    """A collective.

    Attributes:
        kind: Such as ``all-reduce``.
        axes: Mesh axes.
        decode_bytes: Bytes of its result on each device in a decode step; None if decode steps do not have it.
        prefill_bytes: The same in a step with a prompt.
        times: Executions.
    """

    kind: str
    axes: tuple[str, ...]
    decode_bytes: int | None
    prefill_bytes: int | None
    times: int


Row = ShownArray | ShownPages | CollectiveRow


def rows_of(part: ShownLayers | ShownEnd) -> list[Row]:
    """Return weights, pages and collectives in the order of a step with a prompt; where decode steps have other
    collectives, theirs follow."""
    arrays: dict[str, ShownArray | ShownPages] = {array.name: array for array in part.weights}
    if isinstance(part, ShownLayers):
        arrays[PAGES] = part.pages
    pairs = _paired(part.prefill, part.decode)
    rows: list[Row] = []
    for step, decode_bytes in pairs:
        rows += [arrays.pop(name) for name in step.arrays if name in arrays]
        if step.collective is not None:
            kind, axes, num_bytes, times = step.collective
            rows.append(CollectiveRow(kind, axes, decode_bytes, num_bytes, times))
    rows += arrays.values()
    if not _is_alike(part.prefill, part.decode):
        collectives = [step.collective for step in part.decode if step.collective is not None]
        rows += [CollectiveRow(kind, axes, size, None, times) for kind, axes, size, times in collectives]
    return rows


def _is_alike(prefill: Sequence[FlowStep], decode: Sequence[FlowStep]) -> bool:
    """Return whether both steps have the same collectives after the same arrays."""

    def order(steps: Sequence[FlowStep]) -> list[object]:
        return [(step.arrays, step.collective and (step.collective.kind, step.collective.axes)) for step in steps]

    return order(prefill) == order(decode)


def _paired(prefill: Sequence[FlowStep], decode: Sequence[FlowStep]) -> list[tuple[FlowStep, int | None]]:
    """Return each step of prefill with the bytes of the same collective in decode steps, if they are alike."""
    if not _is_alike(prefill, decode):
        return [(step, None) for step in prefill]
    return [
        (step, other.collective and other.collective.num_bytes) for step, other in zip(prefill, decode, strict=True)
    ]


def collective_text(row: CollectiveRow) -> str:
    """Return a collective in words: ``all-reduce over tensor, 16 KiB at decode, 32 MiB at prefill``."""
    decode = "decode" if row.prefill_bytes is not None else "decode instead"
    sizes = [(row.decode_bytes, decode), (row.prefill_bytes, "prefill")]
    texts = [f"{bytes_text(size)} at {step}" for size, step in sizes if size is not None]
    times = f" × {row.times}" if row.times > 1 else ""
    return f"{row.kind}{times} over {' and '.join(row.axes)}: {', '.join(texts)}"


def shape_text(array: ShownArray, shape: Sequence[int], num_parts: int = 1) -> str:
    """Return a shape, that of a device's part if the experts are shared by ``num_parts`` devices."""
    if not array.num_experts:
        return f"[{', '.join(map(str, shape))}]"
    experts = array.num_experts // num_parts
    return f"{experts} × [{', '.join(map(str, (shape[0] // experts, *shape[1:])))}]"


def part_text(array: ShownArray, sizes: Sizes) -> str:
    """Return the shape of each device's part."""
    return shape_text(array, array.part, 1 if array.experts_axis is None else sizes[array.experts_axis])


def split_text(array: ShownArray) -> str:
    """Return how a weight is split, in words."""
    texts = []
    for dimension, axes in enumerate(array.splits):
        for axis in axes:
            name = "elements" if len(array.shape) == 1 else _DIMENSIONS[dimension]
            is_experts = array.num_experts and dimension == 0 and axis == array.experts_axis
            texts.append(f"{'experts' if is_experts else name} over {axis}")
    return ", ".join(texts) or "whole on every device"


def pages_text(pages: ShownPages) -> str:
    """Return what KV pages hold."""
    window = "" if pages.window is None else f", latest {pages.window} tokens"
    if not pages.num_heads:
        return pages.content
    if pages.reads is not None:
        return f"those of layer {pages.reads}{window}"
    if pages.content == "latents":
        return f"latents of {pages.head_dim}{window}"
    return f"keys and values of {pages.num_heads} × {pages.head_dim}{window}"


def pages_split_text(pages: ShownPages) -> str:
    """Return how KV pages are split, in words."""
    texts = []
    if pages.pages_axis is not None:
        texts.append(f"requests over {pages.pages_axis}")
    if pages.tokens_axis is not None:
        texts.append(f"tokens over {pages.tokens_axis}")
    if pages.heads_axis is not None:
        copies = len(pages.heads) * len(pages.heads[0]) // pages.num_heads
        texts.append(f"heads over {pages.heads_axis}" + (f", each on {copies}" if copies > 1 else ""))
    return ", ".join(texts) or "whole on every device"


def heads_text(heads: Sequence[int]) -> str:
    """Return the heads of a device: ``head 3`` or ``heads 0–7``."""
    return f"head {heads[0]}" if len(heads) == 1 else f"heads {ranges_text(heads)}"


def ranges_text(numbers: Sequence[int], most: int | None = None) -> str:
    """Return increasing integers as ranges, ``0–2, 7``, or with a constant step ``0, 2, …, 24``; of more than ``most``
    ranges only the first and the last."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    step = numbers[1] - numbers[0] if len(numbers) > 3 else 0
    if step > 1 and list(numbers) == [*range(numbers[0], numbers[-1] + 1, step)]:
        return f"{numbers[0]}, {numbers[1]}, …, {numbers[-1]}"
    texts = [str(each[0]) if len(each) == 1 else f"{each[0]}–{each[-1]}" for each in ranges]
    if most is not None and len(texts) > most:
        texts[1:-1] = ["…"]
    return ", ".join(texts)


def bytes_text(num_bytes: int | float) -> str:
    """Return a number of bytes with a unit and three digits."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}"
