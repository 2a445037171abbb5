"""The choice of a scheduler for a new sequence, on schedulers without a model."""

import copy
from typing import Any

import pytest

from jaxserve.scheduling.page_allocator import KVWindow, PageAllocator
from jaxserve.scheduling.plan import SchedulerLimits
from jaxserve.scheduling.prefix_cache import PrefixCache
from jaxserve.scheduling.router import choose_scheduler
from jaxserve.scheduling.scheduler import Scheduler
from tests.jaxserve.test_scheduler import drain, make_scheduler, make_sequence

PROMPT = [*range(100, 113)]
"""Three full pages of four tokens, and one token."""


def make_lanes(count: int = 3, **settings: Any) -> list[Scheduler]:
    """Schedulers whose loads may differ by 2."""
    return [make_scheduler(**{"max_num_seqs": 8, **settings}) for _ in range(count)]


def fill(scheduler: Scheduler, prompt: list[int], **fields: Any) -> None:
    """Run a request with this prompt to its end."""
    scheduler.add(make_sequence("earlier", prompt, 1, **fields))
    drain(scheduler)


def load(scheduler: Scheduler, count: int) -> None:
    """Add waiting sequences with prompts of their own."""
    for number in range(count):
        scheduler.add(make_sequence(f"waiting {number}", 3, 1))


def choose(lanes: list[Scheduler], prompt: list[int] = PROMPT, **fields: Any) -> int:
    return choose_scheduler(lanes, make_sequence("new", prompt, 1, **fields))


def test_without_a_cached_prefix_the_least_loaded_is_chosen_then_the_first() -> None:
    lanes = make_lanes()
    fill(lanes[0], [*range(500, 513)])
    assert choose(lanes) == 0
    load(lanes[0], 1)
    assert choose(lanes) == 1
    load(lanes[1], 1)
    assert choose(lanes) == 2
    load(lanes[2], 1)
    assert choose(lanes) == 0


def test_the_longest_cached_prefix_is_chosen() -> None:
    lanes = make_lanes(4)
    fill(lanes[1], PROMPT[:9])
    fill(lanes[2], PROMPT)
    fill(lanes[3], PROMPT[4:])
    assert [lane.pages.num_cached_tokens(make_sequence("new", PROMPT, 1)) for lane in lanes] == [0, 8, 12, 0]
    assert choose(lanes) == 2
    assert choose(lanes, PROMPT[:9] + [7] * 4) == 1, "both have two pages: the first"
    load(lanes[1], 1)
    assert choose(lanes, PROMPT[:9] + [7] * 4) == 2, "both have two pages: the least loaded"
    assert choose(lanes, PROMPT[:3]) == 0, "less than a page"


@pytest.mark.parametrize(("max_num_seqs", "bound"), [(3, 0), (4, 1), (8, 2)])
def test_a_cached_prefix_counts_up_to_the_bound_on_the_load(max_num_seqs: int, bound: int) -> None:
    lanes = make_lanes(max_num_seqs=max_num_seqs)
    fill(lanes[2], PROMPT)
    load(lanes[2], bound)
    assert choose(lanes) == 2
    load(lanes[2], 1)
    assert choose(lanes) == 0
    load(lanes[0], 2)
    load(lanes[1], 1)
    assert choose(lanes) == 2, "the least load counts, not zero"


def test_sequences_that_share_nothing_go_to_the_least_loaded() -> None:
    lanes = make_lanes()
    fill(lanes[2], PROMPT, cache_root=b"tenant")
    assert choose(lanes, cache_root=b"tenant") == 2
    assert choose(lanes, cache_root=b"other") == 0
    assert choose(lanes, cache_root=b"tenant", reads_cache=False) == 0
    lanes[2].allocator.reset()
    assert choose(lanes, cache_root=b"tenant") == 0


def test_without_prefix_caching_the_least_loaded_is_chosen() -> None:
    lanes = make_lanes(2, keeps_free_pages=False)
    lanes[1].add(make_sequence("running", PROMPT, 4))
    lanes[1].schedule()
    load(lanes[0], 2)
    assert choose(lanes) == 1
    load(lanes[1], 2)
    assert choose(lanes) == 0


def test_a_prefix_counts_if_the_pages_in_the_window_are_cached() -> None:
    limits = SchedulerLimits(8, 16, windows=(KVWindow(4, 4, 16),))
    lanes = [Scheduler(limits, PageAllocator(16, 4)) for _ in range(2)]
    lanes[1].add(make_sequence("earlier", PROMPT, 1))
    plan = lanes[1].schedule()
    assert plan is not None
    lanes[1].complete(plan, [[7]])
    assert choose(lanes) == 1
    cache = lanes[1].allocator.cache
    first, second, third = (page for page in range(16) if page in cache and cache._records[page].key)
    cache.forget(first)
    assert choose(lanes) == 1, "the first page is outside the window"
    cache.forget(third)
    cache.forget(second)
    assert choose(lanes) == 0


def test_a_choice_changes_nothing() -> None:
    lanes = make_lanes(2)
    fill(lanes[1], PROMPT)
    fill(lanes[1], [*range(500, 513)])
    new = make_sequence("new", PROMPT, 1)

    def state() -> Any:
        return [
            (vars(lane.allocator.cache), [*lane.allocator._free_cached], lane.allocator._free, lane.allocator.num_free)
            + (lane.pages.num_queried_tokens, lane.pages.num_hit_tokens, lane.num_unfinished)
            for lane in lanes
        ] + [{name: getattr(new, name) for name in new.__slots__}]

    before = copy.deepcopy(state())
    assert choose_scheduler(lanes, new) == 1
    assert state() == before


def test_an_error_before_admission_leaves_the_pages_that_were_looked_up() -> None:
    lanes = make_lanes(2)
    fill(lanes[1], PROMPT)
    new = make_sequence("new", PROMPT, 1)
    lanes[choose_scheduler(lanes, new)].add(new)
    lanes[1].finish(new, "error")
    assert choose(lanes) == 1


def test_one_candidate_is_chosen_without_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = make_lanes(2)
    fill(lanes[1], PROMPT)
    load(lanes[1], 3)
    monkeypatch.delattr(PrefixCache, "key")
    assert choose(lanes[1:]) == 0
    assert choose(lanes) == 0
