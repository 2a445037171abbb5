"""Why a prompt is not in the prefix cache, and the states that are kept while a context decodes."""

from typing import Any

import pytest

from jaxserve.api.request import Request
from jaxserve.scheduling.dropped_contexts import DroppedContexts
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import PageCopy, SchedulerLimits
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence

PAGE = 4
ONE, OTHER = [*range(100, 120)], [*range(200, 220)]


def make_scheduler(num_pages: int = 100, num_states: int = 0) -> Scheduler:
    return Scheduler(SchedulerLimits(1, 600, num_states=num_states), PageAllocator(num_pages, PAGE))


def run(scheduler: Scheduler, prompt: list[int], num_new: int = 1, salt: str | None = None, **fields: Any) -> Sequence:
    """Run a prompt to its end; its answer repeats its last token."""
    length = len(prompt)
    root = b"" if salt is None else salt.encode()
    request = Request(request_id="a", cache_salt=salt)
    sequence = Sequence(request, list(prompt), length, length + num_new, cache_root=root, **fields)
    scheduler.add(sequence)
    while sequence.finish_reason is None:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.complete(plan, [[prompt[-1]] if count else [] for count in plan.num_samples])
    return sequence


def test_pages_that_were_dropped_for_others_are_an_eviction() -> None:
    scheduler = make_scheduler(num_pages=6)
    assert run(scheduler, ONE).miss_reason == "first_seen"
    assert run(scheduler, ONE).miss_reason is None
    assert run(scheduler, OTHER).miss_reason == "first_seen"
    assert run(scheduler, ONE).miss_reason == "evicted"
    scheduler.pages.reset_cache()
    assert run(scheduler, ONE).miss_reason == "first_seen"
    assert scheduler.pages.misses == {"first_seen": 3, "evicted": 1}


def test_states_that_were_dropped_for_others_are_an_eviction() -> None:
    scheduler = make_scheduler(num_states=3)
    assert run(scheduler, ONE).miss_reason == "first_seen"
    assert run(scheduler, [*ONE[:10], 7]).miss_reason == "no_checkpoint"
    found = run(scheduler, [*ONE[:10], 8])
    assert found.num_cached_tokens == 10 and found.miss_reason is None
    for index in range(4):
        run(scheduler, [*range(300 + 20 * index, 320 + 20 * index)])
    again = run(scheduler, [*ONE[:10], 9])
    assert again.miss_reason == "evicted" and again.num_shared_tokens == 10 and not again.num_cached_tokens


def test_the_first_request_with_a_salt_says_so_and_nothing_of_others() -> None:
    """A later one with the salt is like any other; none tells whether a prompt is cached under another salt."""
    scheduler = make_scheduler()
    run(scheduler, ONE)
    assert run(scheduler, ONE, salt="x").miss_reason == "new_salt"
    assert run(scheduler, OTHER, salt="x").miss_reason == "first_seen"
    assert run(scheduler, ONE, salt="x").miss_reason is None
    assert run(scheduler, ONE, salt="y", reads_cache=False).miss_reason == "not_read"


def test_what_was_dropped_is_forgotten_in_the_end() -> None:
    dropped = DroppedContexts(most=2)
    for content in (b"a", b"ab", b"ab"):
        dropped.add(b"key", content)
    assert dropped.has(b"key", b"abc") and not dropped.has(b"key", b"a") and not dropped.has(b"other", b"abc")
    dropped.add(b"other")
    assert dropped.has(b"key", b"ab") and dropped.has(b"other", b"x")
    dropped.add(b"more")
    assert not dropped.has(b"key", b"ab") and dropped.has(b"other") and dropped.has(b"more")
    dropped.clear()
    assert not dropped.has(b"more")


@pytest.mark.parametrize("depth", [1, 2])
def test_states_are_kept_while_a_context_decodes(depth: int) -> None:
    """After every 256 tokens, by a copy before the row that follows, of the sequence's own page."""
    scheduler = Scheduler(SchedulerLimits(1, 600, num_states=6), PageAllocator(400, PAGE))
    prompt = [*range(1000, 1250)]
    sequence = Sequence(Request(request_id="a"), list(prompt), len(prompt), 600)
    scheduler.add(sequence)
    flights, kept = [], dict[int, PageCopy]()
    while sequence.finish_reason is None:
        start, page = sequence.num_computed, sequence.state_page
        plan = scheduler.schedule()
        if plan is not None:
            flights.append(plan)
            if plan.state_copies:
                (kept[start],) = plan.state_copies
                assert kept[start].source == page
        if plan is None or len(flights) == depth:
            plan = flights.pop(0)
            scheduler.complete(plan, [[sequence.num_output_tokens] if count else [] for count in plan.num_samples])
    assert [*kept] == [256, 512]
    assert len({copy.target for copy in kept.values()}) == 2
    edited = run(scheduler, [*sequence.token_ids[:530], 9, 9, 9])
    assert edited.num_cached_tokens == 512 and edited.miss_reason == "no_checkpoint"
