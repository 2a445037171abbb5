"""Which page holds which tokens."""

import random

import pytest

from jaxserve.scheduling.prefix_cache import PartialHit, PrefixCache, pack_tokens

ROOT = b"root"


def add_full(cache: PrefixCache, page: int, tokens: list[int], parent: bytes = ROOT) -> bytes:
    content = pack_tokens(tokens)
    key = cache.key(parent, content)
    cache.add(page, parent, content, key)
    return key


def add_part(cache: PrefixCache, page: int, tokens: list[int], parent: bytes = ROOT) -> None:
    cache.add(page, parent, pack_tokens(tokens))
    cache.settle()


def find_part(cache: PrefixCache, tokens: list[int], parent: bytes = ROOT) -> PartialHit | None:
    return cache.find_partial(parent, pack_tokens(tokens))


def test_a_key_stands_for_a_whole_context():
    cache = PrefixCache(2)
    one, other = pack_tokens([1, 2]), pack_tokens([2, 1])
    roots = {cache.root_key(name) for name in (b"", b"salt", b"adapter")}
    assert len(roots) == 3
    keys = {
        cache.key(cache.key(root, first), second) for root in roots for first in (one, other) for second in (one, other)
    }
    assert len(keys) == 12 and all(len(key) == 32 for key in keys)


def test_a_full_page_is_found_at_once_and_the_first_of_equals_is_kept():
    cache = PrefixCache(2)
    key = add_full(cache, 3, [1, 2])
    assert cache.find(key) == 3
    assert add_full(cache, 4, [1, 2]) == key
    assert cache.find(key) == 3 and 4 not in cache
    cache.forget(3)
    assert cache.find(key) is None
    cache.forget(3)


def test_copies_are_made_only_of_pages_noted_before_the_plan():
    cache = PrefixCache(4)
    cache.add(0, ROOT, pack_tokens([1, 2]))
    assert find_part(cache, [1, 2, 3]) is None
    cache.settle()
    assert find_part(cache, [1, 2, 3]) == PartialHit(0, 2)
    assert find_part(cache, [1]) == PartialHit(0, 1)
    assert find_part(cache, [2, 1]) is None
    assert find_part(cache, [1, 2], b"other") is None


def test_a_page_that_grows_is_noted_once():
    cache = PrefixCache(4)
    add_part(cache, 0, [1, 2])
    add_part(cache, 0, [1, 2, 3])
    add_full(cache, 0, [1, 2, 3, 4])
    cache.settle()
    assert len(cache) == 1
    assert find_part(cache, [1, 2, 3, 4]) == PartialHit(0, 4)
    cache.forget(0)
    assert len(cache) == 0 and find_part(cache, [1, 2]) is None


def test_a_part_that_another_page_holds_is_not_noted():
    cache = PrefixCache(4)
    add_part(cache, 0, [1, 2, 3])
    add_part(cache, 1, [1, 2])
    add_part(cache, 2, [1, 2, 3])
    add_part(cache, 3, [1, 2, 4])
    assert [page in cache for page in range(4)] == [True, False, False, True]


def test_few_tokens_are_not_worth_a_copy():
    cache = PrefixCache(64)
    assert cache.min_shared_tokens == 8
    add_part(cache, 0, list(range(7)))
    assert 0 not in cache
    add_part(cache, 0, list(range(20)))
    assert find_part(cache, [*range(7), 99, 99]) is None
    assert find_part(cache, [*range(8), 99, 99]) == PartialHit(0, 8)
    assert find_part(cache, list(range(7))) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_page_found_shares_the_most(seed: int):
    """Against a search of all pages; ids of more than one byte, so that the order of bytes is not that of numbers."""
    rng = random.Random(seed)
    cache = PrefixCache(8)
    held: dict[int, list[int]] = {}
    for page in range(300):
        tokens = rng.choices([1, 256, 257, 65536], k=rng.randint(1, 8))
        if rng.random() < 0.3 and held:
            cache.forget(gone := rng.choice(list(held)))
            del held[gone]
        add_part(cache, page, tokens)
        if page in cache:
            held[page] = tokens
        wanted = rng.choices([1, 256, 257, 65536], k=rng.randint(1, 8))
        most = max(num_common(wanted, tokens) for tokens in held.values()) if held else 0
        found = find_part(cache, wanted)
        assert (0 if found is None else found.num_tokens) == most
        assert found is None or num_common(wanted, held[found.page]) == most


def num_common(one: list[int], other: list[int]) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def test_forgetting_a_context_lets_others_be():
    cache = PrefixCache(4)
    key = add_full(cache, 0, [1, 2, 3, 4])
    add_part(cache, 1, [1, 2, 5])
    add_part(cache, 2, [1, 2, 3, 4], b"other")
    add_part(cache, 3, [5], key)
    cache.forget_context(ROOT, pack_tokens([1, 2, 3, 4]))
    assert [page in cache for page in range(4)] == [False, True, True, True]
    cache.forget_context(ROOT, pack_tokens([1, 2, 5, 6]))
    assert 1 not in cache


def test_reset_changes_the_roots():
    cache = PrefixCache(4)
    before = cache.root_key(b"")
    add_full(cache, 0, [1, 2, 3, 4], before)
    cache.settle()
    add_part(cache, 1, [1, 2], before)
    cache.reset()
    assert len(cache) == 0
    assert cache.root_key(b"") != before
    assert find_part(cache, [1, 2], before) is None
    cache.settle()
