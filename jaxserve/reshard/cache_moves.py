"""Move the prefix cache of schedulers to others, which may be more, fewer, or have fewer pages or states."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from jaxserve.scheduling.context_cache import table_of
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.state_allocator import Checkpoint

_Item = TypeVar("_Item")


class PageMove(NamedTuple):
    """Page ``source`` of old scheduler ``lane``, whose content belongs to page ``target`` of a new scheduler.

    ``table`` is the page table that both belong to.
    """

    lane: int
    source: int
    target: int
    table: int


class StateMove(NamedTuple):
    """State page ``source`` of old scheduler ``lane``, whose state belongs to page ``target`` of a new scheduler."""

    lane: int
    source: int
    target: int


KeptState = tuple[Checkpoint, int]
"""A checkpoint of a scheduler and its age."""


def newest_pages(schedulers: Sequence[Scheduler], max_pages: int) -> list[list[int]]:
    """Return the cached pages of schedulers that hold none, the most recently used first, ``max_pages`` in all."""
    each = max_pages // len(schedulers)
    return [scheduler.allocator.cached_pages[::-1][:each] for scheduler in schedulers]


def move_cache(
    old: Sequence[Scheduler], new: Sequence[Scheduler], pages: Sequence[Sequence[int]]
) -> list[list[PageMove]]:
    """Enter cached pages of old schedulers into the empty caches of new ones; return the moves to each.

    With as many schedulers as before each gets the pages of its own; else each gets those of all, as far as it has
    room for them.

    Args:
        old: The old schedulers.
        new: The new schedulers.
        pages: Pages of each old scheduler, the most recently used first.
    """
    return [_adopt(old, scheduler, each) for scheduler, each in zip(new, _shared_out(pages, len(new)), strict=True)]


def best_states(schedulers: Sequence[Scheduler], max_states: int) -> list[list[KeptState]]:
    """Return the checkpoints of schedulers, those to keep longest first, ``max_states`` in all."""
    each = max_states // len(schedulers)
    kept = (scheduler.pages.states for scheduler in schedulers)
    return [[] if states is None else states.allocator.checkpoints()[:each] for states in kept]


def move_states(new: Sequence[Scheduler], states: Sequence[Sequence[KeptState]]) -> list[list[StateMove]]:
    """Enter checkpoints of old schedulers into the empty caches of new ones, as ``move_cache`` does pages; return the
    moves to each. Cached pages, and with them the keys of contexts, have moved before.

    Args:
        new: The new schedulers.
        states: Checkpoints of each old scheduler, those to keep longest first.
    """
    return [_adopt_states(scheduler, each) for scheduler, each in zip(new, _shared_out(states, len(new)), strict=True)]


def _adopt_states(new: Scheduler, states: Sequence[tuple[int, KeptState]]) -> list[StateMove]:
    """Enter checkpoints, given those to keep longest first, into the cache of a new scheduler."""
    if new.pages.states is None:
        return []
    allocator, moves = new.pages.states.allocator, list[StateMove]()
    for lane, (checkpoint, age) in sorted(states[: allocator.num_pages], key=lambda each: -each[1][1]):
        target = allocator.adopt(checkpoint, age)
        if target is not None:
            moves.append(StateMove(lane, checkpoint.page, target))
    return moves


def _shared_out(items: Sequence[Sequence[_Item]], num_new: int) -> list[list[tuple[int, _Item]]]:
    """Return what each of ``num_new`` schedulers gets of the items of old ones, each with the index of its old one."""
    lanes = [[(lane, item) for item in each] for lane, each in enumerate(items)]
    if len(lanes) == num_new:
        return lanes
    mixed = itertools.chain.from_iterable(itertools.zip_longest(*lanes))
    return [[each for each in mixed if each is not None]] * num_new


def _adopt(old: Sequence[Scheduler], new: Scheduler, pages: Sequence[tuple[int, int]]) -> list[PageMove]:
    """Enter pages, given the most recently used first, into the cache of a new scheduler."""
    allocator, moves = new.allocator, list[PageMove]()
    allocator.cache.share_roots(old[0].allocator.cache)
    for lane, page in reversed(pages[: allocator.num_pages]):
        record = old[lane].allocator.cache.record(page)
        target = allocator.adopt(record)
        if target is not None:
            moves.append(PageMove(lane, page, target, table_of(record)))
    new.pages.settle()
    return moves
