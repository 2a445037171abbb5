"""The prefix cache moves to other schedulers, without a model."""

import itertools
from collections.abc import Sequence

import pytest

from jaxserve.reshard.cache_moves import PageMove, move_cache, newest_pages
from jaxserve.scheduling.scheduler import Scheduler
from tests.jaxserve.test_router import fill, make_lanes
from tests.jaxserve.test_scheduler import Device, drain, make_sequence
from tests.plan_rows import rows_of

PROMPTS = [[*range(start, start + 13)] for start in range(100, 180, 20)]
"""Each has three full pages of four tokens, and a page of one token."""


def move(old: Sequence[Scheduler], new: Sequence[Scheduler], most: int = 1000) -> list[list[PageMove]]:
    return move_cache(old, new, newest_pages(old, most))


def hits(scheduler: Scheduler) -> list[int]:
    """Cached tokens of each prompt."""
    return [scheduler.pages.num_cached_tokens(make_sequence("new", prompt, 1)) for prompt in PROMPTS]


def check(old: Sequence[Scheduler], new: Scheduler, moves: Sequence[PageMove]) -> None:
    """Every page is free, each target has the content of its source, and those of other pages are unknown."""
    allocator = new.allocator
    assert allocator.num_free == allocator.num_pages
    assert len({each.target for each in moves}) == len(moves) == len(allocator.cache)
    assert sorted(allocator.cached_pages) == sorted(each.target for each in moves)
    for lane, source, target, _ in moves:
        assert allocator.cache.record(target) == old[lane].allocator.cache.record(source)


def test_each_new_scheduler_gets_the_pages_of_all() -> None:
    old, new = make_lanes(2), make_lanes(3)
    for scheduler, prompt in zip(itertools.cycle(old), PROMPTS, strict=False):
        fill(scheduler, prompt)
    assert [hits(scheduler) for scheduler in old] == [[12, 0, 12, 0], [0, 12, 0, 12]]
    for scheduler, moves in zip(new, move(old, new), strict=True):
        assert hits(scheduler) == [12, 12, 12, 12]
        check(old, scheduler, moves)


def test_as_many_schedulers_get_their_own_pages() -> None:
    old, new = make_lanes(2), make_lanes(2, num_pages=64)
    fill(old[0], PROMPTS[0])
    fill(old[1], PROMPTS[1])
    for scheduler, moves, expected in zip(new, move(old, new), ([12, 0, 0, 0], [0, 12, 0, 0]), strict=True):
        assert hits(scheduler) == expected
        check(old, scheduler, moves)


def test_content_that_two_have_moves_once() -> None:
    old, new = make_lanes(2), make_lanes(1)
    fill(old[0], PROMPTS[0])
    fill(old[1], PROMPTS[0])
    (moves,) = move(old, new)
    assert len({(each.lane, each.source) for each in moves}) == len(moves) < sum(len(s.allocator.cache) for s in old)
    assert hits(new[0]) == [12, 0, 0, 0]


@pytest.mark.parametrize(("num_pages", "most"), [(7, 1000), (32, 7)])
def test_the_least_recently_used_pages_are_dropped(num_pages: int, most: int) -> None:
    """If the new scheduler, or the host, has less room."""
    old, new = make_lanes(1), make_lanes(1, num_pages=num_pages)
    device = Device(old[0])
    for prompt in (*PROMPTS[:3], PROMPTS[0]):
        old[0].add(make_sequence("earlier", prompt, 1))
        drain(old[0], device=device)
    (moves,) = move(old, new, most)
    assert hits(new[0]) == [12, 0, 12, 0] and len(moves) == 7
    check(old, new[0], moves)
    sources = {each.target: each.source for each in moves}
    in_order = [sources[page] for page in new[0].allocator.cached_pages]
    assert in_order == old[0].allocator.cached_pages[-7:], "the order of use is kept"


def test_a_cache_that_was_reset_has_the_same_keys_after_it_moved() -> None:
    """Sequences that are requeued keep keys of their pages."""
    old, new = make_lanes(1), make_lanes(2)
    old[0].allocator.reset()
    sequence = make_sequence("running", PROMPTS[0], 4)
    old[0].add(sequence)
    assert old[0].schedule() is not None
    (root, *_) = sequence.page_keys
    move(old, new)
    for scheduler in new:
        scheduler.pages.cache.begin(sequence)
        assert sequence.page_keys[0] == root


def test_running_sequences_are_requeued_with_their_pages_cached() -> None:
    (old,), (new,) = make_lanes(1, num_pages=64), make_lanes(1, num_pages=64)
    sequences = [make_sequence(str(number), prompt, 20) for number, prompt in enumerate(PROMPTS)]
    for sequence in sequences:
        old.add(sequence)
    for _ in range(6):
        plan = old.schedule()
        assert plan is not None
        old.complete(plan, [[5] for _ in rows_of(plan)])
    known = [len(sequence.token_ids) for sequence in sequences]
    assert all(length > 13 for length in known)
    old.requeue_all()
    assert not old.running and [*old.waiting] == sequences
    assert old.allocator.num_free == old.allocator.num_pages and old.num_preemptions == 0
    move([old], [new])
    new.replace([old])
    for sequence in sequences:
        new.add(sequence)
    plan = new.schedule()
    assert plan is not None and [*new.running] == sequences
    assert plan.num_tokens == len(sequences), "all but the latest token of each is in a page, some in copied ones"
    assert new.num_decode_rows == old.num_decode_rows
    assert new.pages.num_queried_tokens == old.pages.num_queried_tokens == 4 * 13


def test_pages_that_a_failed_sequence_had_computed_do_not_move() -> None:
    """They are free, and in no cache."""
    (old,), (new,) = make_lanes(1, num_pages=64), make_lanes(1, num_pages=64)
    sequences = [make_sequence(str(number), PROMPTS[number], 20) for number in range(2)]
    for sequence in sequences:
        old.add(sequence)
    drain(old)
    old.finish(sequences[0], "error")
    (moves,) = move([old], [new])
    assert hits(old) == hits(new) == [0, 12, 0, 0]
    check([old], new, moves)
