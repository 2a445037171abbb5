"""Build the padded input buffer of a step from its plan."""

import numpy as np

from jaxserve.device.slots import Slots
from jaxserve.device.step_batch import BatchShape
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.row_starts import as_array


def build(slots: Slots, plan: StepPlan, shape: BatchShape, variant: int, num_drafts: int = 0) -> np.ndarray:
    """Return the int32 buffer of one lane's part of a step, padded to ``shape``; call once per plan, in order.

    Args:
        slots: The lane's slots, to which the plan has been applied.
        plan: The lane's plan.
        shape: Batch shape.
        variant: Index of the sampler variant.
        num_drafts: Most drafts that the plans of all lanes make after the step.
    """
    buffer = _padding(slots, shape).copy()
    views = _views(buffer, shape)
    num_rows, num_tokens = plan.num_rows, plan.num_tokens
    rows, lengths, num_samples = as_array(plan.slots), as_array(plan.lengths), as_array(plan.num_samples)
    starts = slots.starts.advance(plan)
    ends = lengths.cumsum()
    views["tokens"][:num_tokens] = as_array(plan.token_ids)
    views["token_rows"][:num_tokens] = np.arange(num_rows).repeat(lengths)
    views["page_tables"][:, :num_rows] = slots.page_tables[:, rows]
    columns = {
        "slots": rows,
        "starts": as_array(plan.starts),
        "row_limits": slots.lengths[rows],
        "query_starts": ends - lengths,
        "query_lens": lengths,
        "sampled_slots": np.where(num_samples, rows, slots.num_slots),
        "counted_slots": np.where(starts >= slots.counted_from[rows], rows, slots.num_slots),
    }
    for name, values in columns.items():
        views[name][:num_rows] = values
    if shape.max_samples > 1:
        _fill_samples(views, np.maximum(num_samples, 1), ends)
    else:
        views["sampled_tokens"][:num_rows] = ends - 1
    num_single = num_rows if shape.decode_only else _num_single(lengths)
    views["num_shared_pages"][...] = _num_shared_pages(slots, rows[:num_single], starts[:num_single])
    if shape.has_states or plan.targets or plan.pooling:
        _fill_special(slots, views, plan, shape, starts, ends)
    start, stop, size, _ = shape.slot_params
    buffer[start:stop].reshape(size)[:, :num_rows] = slots.params[:, rows]
    views["num_rows"][...] = num_rows
    views["variant"][...] = variant
    views["num_drafts"][...] = num_drafts
    return buffer


def _num_single(lengths: np.ndarray) -> int:
    """Return the number of leading rows of one token."""
    is_longer = lengths != 1
    return int(is_longer.argmax()) if is_longer.any() else len(lengths)


def _padding(slots: Slots, shape: BatchShape) -> np.ndarray:
    """Return a buffer of empty rows and padding tokens."""
    buffer = slots.paddings.get(shape)
    if buffer is None:
        buffer = slots.paddings[shape] = np.zeros(shape.buffer_size, np.int32)
        views = _views(buffer, shape)
        views["token_rows"][...] = shape.num_rows
        views["targets"][...] = -1
        views["page_tables"][...] = slots.num_pages
        for name in ("slots", "sampled_slots", "counted_slots", "carried_slots"):
            views[name][...] = slots.num_slots
        views["query_starts"][...] = shape.num_tokens
        views["pooled_from"][...] = shape.num_tokens
        if shape.has_states:
            views["snapshot_tokens"][...] = shape.num_tokens
        if shape.max_samples > 1:
            views["sample_rows"][...] = shape.num_rows
        start, stop, size, _ = shape.slot_params
        buffer[start:stop].reshape(size)[...] = slots.default_params
    return buffer


def _num_shared_pages(slots: Slots, rows: np.ndarray, positions: np.ndarray) -> list[int]:
    """Return the number of full leading pages that all rows of one token share in each page table.

    Args:
        slots: The lane's slots.
        rows: Slot of each row of one token.
        positions: Position of its token.
    """
    num_full = int(positions.min() + 1) // slots.page_size if len(rows) else 0
    return [_num_equal(table, rows, num_full) for table in slots.page_tables]


def _num_equal(page_table: np.ndarray, rows: np.ndarray, num_full: int) -> int:
    """Return how many of the first ``num_full`` pages all rows share."""
    if not num_full or (page_table[rows, 0] != page_table[rows[0], 0]).any():
        return 0  # the common case
    table = page_table[rows, :num_full]
    differs = (table != table[0]).any(0)
    return int(differs.argmax()) if differs.any() else num_full


def _fill_special(
    slots: Slots,
    views: dict[str, np.ndarray],
    plan: StepPlan,
    shape: BatchShape,
    starts: np.ndarray,
    ends: np.ndarray,
) -> None:
    """Fill in what few models and plans have: recurrent states, prompts that are scored, and rows that are pooled."""
    if shape.has_states:
        _fill_states(slots, views, plan, shape, starts)
    if plan.targets:
        _fill_targets(slots, views, plan, ends)
    if plan.pooling:
        _fill_pooling(slots, views, plan, ends)


def _fill_states(
    slots: Slots, views: dict[str, np.ndarray], plan: StepPlan, shape: BatchShape, starts: np.ndarray
) -> None:
    """Set each row's state page, and after which tokens states are kept in which other pages."""
    rows = as_array(plan.slots)
    if shape.max_samples > 1:  # rows may begin with accepted drafts
        counted = starts + as_array(plan.lengths) - np.maximum(as_array(plan.num_samples), 1)
        is_counted = counted >= slots.counted_from[rows]
        views["counted_slots"][: len(rows)] = np.where(is_counted, rows, slots.num_slots)
    pages = slots.state_pages[rows]
    assert len(np.unique(pages)) == len(pages), "two rows update the same state"
    views["state_pages"][: len(rows)] = pages
    for index, (row, num_tokens, page) in enumerate(plan.snapshots):
        views["snapshot_tokens"][index] = views["query_starts"][row] + num_tokens - 1
        views["snapshot_pages"][index] = page


def _fill_targets(slots: Slots, views: dict[str, np.ndarray], plan: StepPlan, ends: np.ndarray) -> None:
    for row, targets in plan.targets:
        with slots.alone(plan.slots[row]):
            views["targets"][ends[row] - len(targets) : ends[row]] = targets
        views["num_target_tokens"][...] = ends[row]


def _fill_pooling(slots: Slots, views: dict[str, np.ndarray], plan: StepPlan, ends: np.ndarray) -> None:
    for row, num_tokens, is_first, _ in plan.pooling:
        with slots.alone(plan.slots[row]):
            views["pooled_from"][row] = ends[row] - num_tokens
            if not is_first:
                views["carried_slots"][row] = plan.slots[row]


def _fill_samples(views: dict[str, np.ndarray], counts: np.ndarray, ends: np.ndarray) -> None:
    """Set each sample's row and query token: ``counts`` samples for the last tokens of each row."""
    sample_ends = counts.cumsum()
    num_samples = int(counts.sum())
    views["sample_rows"][:num_samples] = np.arange(len(counts)).repeat(counts)
    views["sampled_tokens"][:num_samples] = (ends - sample_ends).repeat(counts) + np.arange(num_samples)
    views["num_samples"][...] = num_samples


def _views(buffer: np.ndarray, shape: BatchShape) -> dict[str, np.ndarray]:
    """Return views of the arrays in a buffer."""
    floats = buffer.view(np.float32)
    return {
        name: (floats if field.is_float else buffer)[field.start : field.stop].reshape(field.shape)
        for name, field in shape.fields.items()
    }
