"""Tables of a plan, as text, JSON and HTML, each number with its source."""

import dataclasses
import html
from collections.abc import Collection, Sequence
from typing import Any

from jaxserve.lab.records import Communication, DraftingPlan, StageMemory, StepCost

_MOST_COLUMNS = 4
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""A title, the names of columns, and rows of cells."""

SOURCES = {
    "bytes of weights, slots, pages and activations": "counted",
    "temporaries": "see temporaries_source",
    "step_reserve, reserve, left, num_pages": "modelled",
    "number and bytes of communication": "counted",
    "weight_bytes, kv_bytes, flops": "counted",
    "seconds, tokens_per_s": "modelled",
    "bytes of the drafter": "counted",
    "ratio and acceptance of drafts": "modelled, unmeasured",
}
"""Where the numbers of a plan come from; a device or link that was measured says so itself."""


def as_text(summary: str, tables: Sequence[Table], verdict: str) -> str:
    """Return tables for a terminal, between two paragraphs."""
    blocks = [summary]
    for title, names, rows in tables:
        cells = [names, *rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(_aligned, row, widths, range(len(row)))) for row in cells]
        blocks.append("\n".join([title, *(f"  {line.rstrip()}" for line in lines)]))
    return "\n\n".join([*blocks, verdict])


def as_html(summary: str, tables: Sequence[Table], verdict: str) -> str:
    """Return the same as HTML, for a notebook."""
    parts = [f"<p><b>{html.escape(summary)}</b></p>"]
    for title, names, rows in tables:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts.append(f"<p>{html.escape(title)}</p><table><tr>{head}</tr>{body}</table>")
    return "".join([*parts, f"<p>{html.escape(verdict)}</p>"])


def memory_table(stages: Sequence[StageMemory], fullest: StageMemory, total: int, page_size: int) -> Table:
    """Return the memory of a device of each stage, in columns; of many stages, the first, the fullest and the last.

    Args:
        stages: The stages.
        fullest: The stage with room for the fewest pages.
        total: Memory of a device in bytes.
        page_size: Tokens per page.
    """
    several = len(stages) > 1
    if len(stages) > _MOST_COLUMNS:
        stages = [stage for stage in stages if stage in (stages[0], fullest, stages[-1])]
    names = ["", *(f"stage {stage.stage}" if several else "bytes" for stage in stages), "source"]
    lines = [
        ("weights", [size(stage.weights) for stage in stages], "counted"),
        ("state of sequences", [size(stage.slots) for stage in stages], "counted"),
        *_state_lines(stages),
        ("activations between layers", [size(stage.activations) for stage in stages], "counted"),
        (
            "temporaries of the largest step",
            [size(stage.temporaries) for stage in stages],
            stages[0].temporaries_source,
        ),
        ("reserved for the largest step", [size(stage.step_reserve) for stage in stages], "modelled"),
        ("reserved for XLA and driver", [size(stage.reserve) for stage in stages], "modelled"),
        ("left for pages", [size(stage.left) for stage in stages], "modelled"),
        ("KV bytes per token", [size(stage.kv_bytes_per_token) for stage in stages], "counted"),
        (f"pages of {page_size} tokens that fit", [f"{stage.num_pages:,}" for stage in stages], "modelled"),
    ]
    if several:
        spans = [f"{stage.layers.start}-{stage.layers.stop - 1}" for stage in stages]
        lines.insert(0, ("layers", spans, "counted"))
    usable = size(stages[0].usable)
    title = f"Memory of each device ({usable} usable of {size(total)})"
    return title, names, [[name, *cells, source] for name, cells, source in lines]


def _state_lines(stages: Sequence[StageMemory]) -> list[tuple[str, list[str], str]]:
    """Return the lines of recurrent states; none for a model without them."""
    if not any(stage.num_states for stage in stages):
        return []
    tokens = [
        f"{stage.state_bytes / stage.kv_bytes_per_token:,.0f} tokens" if stage.kv_bytes_per_token else "-"
        for stage in stages
    ]
    return [
        ("recurrent states", [size(stage.num_states * stage.state_bytes) for stage in stages], "counted"),
        ("state of one sequence", [size(stage.state_bytes) for stage in stages], "counted"),
        ("its size in keys and values", tokens, "counted"),
    ]


def compiled_table(stages: Sequence[StageMemory]) -> Table:
    """Return the collectives of the largest step of each stage, as compiled."""
    found = [stage.compiled_collectives or {} for stage in stages]
    kinds = sorted({kind for each in found for kind in each})
    rows = [
        [f"stage {stage.stage}", *(str(each.get(kind, 0)) for kind in kinds)]
        for stage, each in zip(stages, found, strict=True)
    ]
    return "Collectives of the largest step (compiled)", ("", *kinds), rows


def communication_table(step: StepCost) -> Table:
    """Return the communication of a step."""
    what = f"a decode step, batch {step.batch}" if step.kind == "decode" else f"a prefill step of {step.rows:,} tokens"
    names = ("part", "kind", "axis", "devices", "number", "bytes each", "bytes", "link", "time")
    title = f"Communication of {what} (number and bytes: counted, time: modelled)"
    return title, names, [_row(each) for each in step.communication]


def _row(each: Communication) -> list[str]:
    sizes = [size(each.num_bytes), size(each.total_bytes)]
    return [
        each.part,
        each.kind,
        "+".join(each.axes),
        str(each.num_devices),
        str(each.times),
        *sizes,
        each.link,
        seconds(each.seconds),
    ]


def time_table(
    decode: Sequence[StepCost], prefill: StepCost, fitting: Collection[int], rates: str = "modelled"
) -> Table:
    """Return the times of decode steps, and of a prefill step.

    Args:
        decode: Decode steps.
        prefill: A prefill step.
        fitting: Batch sizes of decode steps whose sequences and pages fit.
        rates: Source of the device's rates.
    """
    names = ("step", "batch", "memory", "compute", "communication", "latency", "tokens/s", "bound by", "fits")
    rows = [
        [
            step.kind,
            str(step.batch),
            seconds(step.memory_s),
            seconds(step.compute_s),
            seconds(step.communication_s),
            seconds(step.step_s if step.kind == "decode" else step.latency_s),
            f"{step.tokens_per_s:,.0f}",
            step.bound,
            "yes" if step is prefill or step.batch in fitting else "no",
        ]
        for step in (*decode, prefill)
    ]
    context, tokens = decode[0].context, prefill.rows
    source = "modelled" if rates == "modelled" else f"modelled from {rates} rates"
    title = f"Time ({source}; decode at {context:,} tokens of context, prefill of {tokens:,} tokens per prompt)"
    return title, names, rows


def drafting_tables(plan: DraftingPlan, rates: str = "modelled") -> list[Table]:
    """Return the memory of a drafter, if there is one, and the times of steps with drafts.

    Args:
        plan: Speculative decoding.
        rates: Source of the device's rates.
    """
    tables = list[Table]()
    if plan.drafter is not None:
        lines = {
            "weights": plan.drafter.weights,
            "KV bytes per token": plan.drafter.kv_bytes_per_token,
            "states beside each page": plan.drafter.page_state_bytes,
            "states and drafts of sequences": plan.drafter.slot_bytes,
        }
        title = (
            f"Drafter on each device of the last stage: {plan.drafter.name}, {plan.drafter.dtype}; part of the above"
        )
        tables.append((title, ("", "bytes", "source"), [[name, size(each), "counted"] for name, each in lines.items()]))
    names = ("batch", "drafts", "without", "with", "of it drafting", "ratio", "pays from")
    rows = [
        [
            str(cost.batch),
            str(cost.num_drafts),
            seconds(cost.plain_s),
            seconds(cost.step_s),
            seconds(cost.drafting_s) if plan.drafter is not None else "-",
            f"{cost.ratio:.2f}",
            "never" if cost.acceptance is None else f"{cost.acceptance:.0%} accepted",
        ]
        for cost in plan.costs
    ]
    source = "modelled, unmeasured" if rates == "modelled" else f"modelled from {rates} rates"
    what = f"{plan.method}, {plan.num_speculative_tokens} drafts per sequence"
    title = f"Decode steps without and with drafts ({what}; {source})"
    return [*tables, (title, names, rows)]


def drafting_dict(plan: DraftingPlan) -> dict[str, Any]:
    """Return speculative decoding as values that JSON can hold."""
    costs = [{**fields_dict(cost), "ratio": cost.ratio, "acceptance": cost.acceptance} for cost in plan.costs]
    return {**fields_dict(plan), "drafter": plan.drafter and fields_dict(plan.drafter), "costs": costs}


def step_dict(step: StepCost) -> dict[str, Any]:
    """Return a step as values that JSON can hold."""
    communication = [{**fields_dict(each), "total_bytes": each.total_bytes} for each in step.communication]
    derived = ("latency_s", "step_s", "tokens_per_s", "bound")
    return {**fields_dict(step), "communication": communication, **{name: getattr(step, name) for name in derived}}


def fields_dict(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, unconverted."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def size(num_bytes: int) -> str:
    """Return bytes with a binary unit."""
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    for unit, factor in units:
        if abs(num_bytes) >= factor:
            scaled = num_bytes / factor
            return f"{scaled:,.0f} {unit}" if scaled == int(scaled) or abs(scaled) >= 100 else f"{scaled:.2f} {unit}"
    return f"{num_bytes} B"


def seconds(time_s: float) -> str:
    """Return a time with a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if time_s >= factor:
            return f"{time_s / factor:.2f} {unit}"
    return f"{time_s * 1e6:.1f} µs"
