"""Pages: who holds them, which go first."""

import random

import pytest

from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.prefix_cache import pack_tokens


def make_allocator(num_pages: int = 6, num_known: int = 0, **fields: bool) -> PageAllocator:
    """The first pages that are handed out have a known content and are free again, the first page freed first."""
    allocator = PageAllocator(num_pages, 2, **fields)
    pages = allocator.allocate(num_known)
    assert pages is not None
    for page in pages:
        note(allocator, page)
        allocator.free([page])
    return allocator


def note(allocator: PageAllocator, page: int) -> bytes:
    """Says that a page is full of tokens of its own."""
    content = pack_tokens([page, page])
    key = allocator.cache.key(b"", content)
    allocator.cache.add(page, b"", content, key)
    return key


def test_pages_run_out_and_come_back():
    allocator = PageAllocator(4, 2)
    pages = allocator.allocate(3)
    assert pages is not None and len(set(pages)) == 3
    assert allocator.allocate(2) is None
    assert (allocator.num_free, allocator.usage) == (1, 0.75)
    allocator.free(pages)
    assert (allocator.num_free, allocator.usage) == (4, 0.0)
    assert [allocator.pages_for(count) for count in (0, 1, 2, 3)] == [0, 1, 1, 2]


def test_double_free_is_caught():
    allocator = PageAllocator(4, 2)
    pages = allocator.allocate(2)
    assert pages is not None
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages)
    assert allocator.allocate(5) is None and allocator.num_free == 4


def test_pages_without_known_content_go_first_then_the_one_freed_longest_ago():
    allocator = make_allocator(num_pages=5, num_known=3)
    allocator.touch(0)
    assert [allocator.allocate(1) for _ in range(6)] == [[3], [4], [1], [2], [0], None]
    assert len(allocator.cache) == 0


def test_the_last_pages_of_a_context_are_reused_before_its_first():
    allocator = PageAllocator(3, 2)
    pages = allocator.allocate(3)
    assert pages is not None
    for page in pages:
        note(allocator, page)
    allocator.free(pages)
    assert allocator.allocate(3) == pages[::-1]


def test_a_shared_page_is_free_when_its_last_holder_frees_it():
    allocator = make_allocator(num_known=2)
    assert allocator.num_free == 6
    first = allocator.allocate_after([0, 1], 1)
    second = allocator.allocate_after([0], 1)
    assert first is not None and second is not None
    assert first[:2] == [0, 1] and second[0] == 0
    assert [allocator.num_holders(page) for page in (0, 1, first[2])] == [2, 1, 1]
    assert allocator.num_free == 2
    allocator.free(first)
    assert (allocator.num_holders(0), allocator.num_free) == (1, 4)
    allocator.free(second)
    assert allocator.num_free == 6 and 0 in allocator.cache


def test_shared_pages_that_are_free_count_as_taken():
    allocator = make_allocator(num_pages=4, num_known=3)
    assert allocator.allocate_after([0, 1], 3) is None
    assert allocator.num_free == 4 and len(allocator.cache) == 3
    pages = allocator.allocate_after([0, 1], 2)
    assert pages is not None and sorted(pages) == [0, 1, 2, 3]


def test_without_free_pages_kept_a_content_is_forgotten_with_its_last_holder():
    allocator = PageAllocator(4, 2, keeps_free_pages=False)
    pages = allocator.allocate(1)
    assert pages is not None
    key = note(allocator, pages[0])
    assert allocator.allocate_after(pages, 0) == pages
    allocator.free(pages)
    assert allocator.cache.find(key) == pages[0]
    allocator.free(pages)
    assert allocator.cache.find(key) is None


def test_reset_makes_all_free_pages_the_same_and_lets_held_ones_be():
    allocator = make_allocator(num_pages=4, num_known=3)
    assert allocator.allocate_after([0], 0) == [0]
    allocator.reset()
    assert len(allocator.cache) == 0 and allocator.num_free == 3
    assert sorted(allocator.allocate(3) or []) == [1, 2, 3]
    allocator.free([0])
    assert allocator.num_free == 1


def test_random_use_keeps_count():
    rng = random.Random(0)
    allocator = PageAllocator(12, 2)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and rng.random() < 0.45:
            allocator.free(held.pop(rng.randrange(len(held))))
        else:
            known = [page for page in range(12) if page in allocator.cache]
            pages = allocator.allocate_after(rng.sample(known, rng.randint(0, len(known))), rng.randint(0, 3))
            if pages is not None:
                assert len(set(pages)) == len(pages)
                held.append(pages)
                for page in pages:
                    if rng.random() < 0.5:
                        note(allocator, page)
        counts = [sum(page in pages for pages in held) for page in range(12)]
        assert [allocator.num_holders(page) for page in range(12)] == counts
        assert allocator.num_free == counts.count(0)
