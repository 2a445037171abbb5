"""Plans for tests, made of rows and read as rows."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.scheduling.plan import (
    ON_DEVICE,
    ChunkPooling,
    ChunkTargets,
    PageCopy,
    PageGrant,
    SlotMask,
    SlotSetup,
    StepPlan,
)


class Row(NamedTuple):
    """The part of a plan that belongs to one slot."""

    slot: int
    start: int
    token_ids: list[int]
    num_samples: int
    targets: list[int] | None = None
    pooling: ChunkPooling | None = None


def make_plan(
    number: int,
    setups: Iterable[SlotSetup],
    grants: Iterable[PageGrant],
    rows: Iterable[Row],
    copies: Iterable[PageCopy] = (),
    masks: Iterable[SlotMask] = (),
) -> StepPlan:
    """A plan of these rows."""
    plan = StepPlan(number, [*setups], [*grants], [*copies], masks=[*masks])
    for index, (slot, start, token_ids, num_samples, targets, pooling) in enumerate(rows):
        plan.add_row(slot, start, token_ids, num_samples)
        if targets is not None:
            plan.targets.append(ChunkTargets(index, targets))
        if pooling is not None:
            plan.pooling.append(pooling._replace(row=index))
    return plan


def rows_of(plan: StepPlan) -> list[Row]:
    """The rows of a plan."""
    ends = itertools.accumulate(plan.lengths)
    tokens = [[*plan.token_ids[end - length : end]] for end, length in zip(ends, plan.lengths, strict=True)]
    targets = {one.row: one.token_ids for one in plan.targets}
    pooling = {one.row: one for one in plan.pooling}
    rows = zip(plan.slots, plan.starts, tokens, plan.num_samples, strict=True)
    return [Row(*row, targets.get(index), pooling.get(index)) for index, row in enumerate(rows)]


def decode_rows(slots: Iterable[int], starts: Iterable[int], tokens: Iterable[int] | None = None) -> list[Row]:
    """Rows of one token each, left to the device where ``tokens`` are not given."""
    slots = list(slots)
    known = [ON_DEVICE] * len(slots) if tokens is None else tokens
    return [Row(slot, start, [token], 1) for slot, start, token in zip(slots, starts, known, strict=True)]
