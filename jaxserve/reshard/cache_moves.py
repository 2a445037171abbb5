"""Move the prefix cache of schedulers to others, which may be more, fewer, or have fewer pages."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.scheduling.context_cache import table_of
from jaxserve.scheduling.scheduler import Scheduler


class PageMove(NamedTuple):
    """Page ``source`` of old scheduler ``lane``, whose content belongs to page ``target`` of a new scheduler.

    ``table`` is the page table that both belong to.
    """

    lane: int
    source: int
    target: int
    table: int


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
    lanes = [[(lane, page) for page in each] for lane, each in enumerate(pages)]
    if len(old) != len(new):
        mixed = itertools.chain.from_iterable(itertools.zip_longest(*lanes))
        lanes = [[each for each in mixed if each is not None]] * len(new)
    return [_adopt(old, scheduler, each) for scheduler, each in zip(new, lanes, strict=True)]


def _adopt(old: Sequence[Scheduler], new: Scheduler, pages: Sequence[tuple[int, int]]) -> list[PageMove]:
    """Enter pages, given the most recently used first, into the cache of a new scheduler."""
    allocator, moves = new.allocator, list[PageMove]()
    allocator.cache.share_roots(old[0].allocator.cache)
    for lane, page in reversed(pages[: allocator.num_pages]):
        record = old[lane].allocator.cache.record(page)
        target = allocator.adopt(record)
        if target is not None:
            moves.append(PageMove(lane, page, target, table_of(record)))
    return moves
