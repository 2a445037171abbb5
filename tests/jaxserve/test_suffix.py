"""Drafts from a request's own tokens and past outputs: which are proposed, and of whom they know."""

import ctypes
import itertools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.speculation import SHORTCUTS, check_speculation
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import SchedulerLimits
from jaxserve.scheduling.proposers.suffix import PastOutputs, SuffixProposer
from jaxserve.scheduling.proposers.token_index import SIZES, TokenIndex, find_library
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from tests.native_build import build_library
from tests.sequences import make_sequence, proposed

PAST = [*range(100, 140)]
"""An output without repetition."""


LIBRARY = find_library()
LIBRARIES = [None] if LIBRARY is None else [None, LIBRARY]
each_library = pytest.mark.parametrize("library", LIBRARIES, ids=["python", "native"][: len(LIBRARIES)])


def make(library: ctypes.CDLL | None = LIBRARY, **keys: Any) -> SuffixProposer:
    """A proposer with these keys besides vLLM's defaults."""
    given = {key if key == "num_speculative_tokens" else f"suffix_decoding_{key}": value for key, value in keys.items()}
    config = check_speculation({"method": "suffix", **given}, dict.fromkeys(SHORTCUTS))
    assert config is not None
    return SuffixProposer(config, library)


def decoding(tokens: list[int], num_prompt_tokens: int = 1, num_in_flight: int = 0, root: bytes = b"") -> Sequence:
    """A sequence with a row in the step that is being planned."""
    return make_sequence("s", tokens, num_prompt_tokens, 1000, num_pending=1 + num_in_flight, cache_root=root)


def add_past(proposer: SuffixProposer, tokens: list[int], root: bytes = b"") -> None:
    """A sequence that has been decoding, and finishes."""
    sequence = decoding([*tokens], root=root)
    proposed(proposer, sequence)
    proposer.finish(sequence)


# ---------------------------------------------------------------- the index


def longest_before(tokens: list[int], depth: int) -> tuple[set[int], int]:
    """Where the longest known end of a text ended before, among the ends that are indexed."""
    for length in range(min(depth, len(tokens) - 1), min(SIZES) - 1, -1):
        run = tokens[-length:]
        places = {end for end in range(length, len(tokens)) if tokens[end - length : end] == run}
        if places:
            return places, length
    return set(), 0


@each_library
@given(st.lists(st.lists(st.integers(1, 3), max_size=40), min_size=1, max_size=8), st.integers(2, 24))
def test_the_index_finds_what_a_search_finds(library: ctypes.CDLL | None, parts: list[list[int]], depth: int) -> None:
    """Written one token at a time or many at once; but for the places that many others hide."""
    index, tokens = TokenIndex(512, library), list[int]()
    for part in parts:
        index.write(len(tokens), part)
        tokens += part
        expected, expected_length = longest_before(tokens, depth)
        places, length = index.places(tokens[-depth:])
        assert places == sorted(places, reverse=True) and len(places) <= 16
        if len(expected) <= 16 and len(tokens) <= 32:
            assert (set(places), length) == (expected, expected_length)
        assert all(tokens[place - length : place] == tokens[len(tokens) - length :] for place in places)
        assert bool(places) == bool(expected)


@each_library
def test_all_ways_of_writing_make_the_same_index(library: ctypes.CDLL | None) -> None:
    tokens, offset = [1 + number * number % 7 for number in range(200)], 5 << 32
    whole, single = TokenIndex(256), TokenIndex(256, library)
    whole.write(0, tokens, offset)
    for slot, token in enumerate(tokens):
        single.write(slot, [token], offset)
    for one, other in itertools.chain(zip(whole._latest, single._latest), zip(whole._earlier, single._earlier)):  # noqa: B905
        assert one.tolist() == other.tolist()
    assert single.following(0, 256) == whole.following(0, 256) == [*(token + offset for token in tokens), *[0] * 56]
    assert whole.num_bytes == 32 * 256 and whole.end == single.end == 200


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=30), max_size=30), st.integers(1, 6))
def test_past_outputs_are_whole_or_gone(texts: list[list[int]], max_texts: int) -> None:
    """The latest are there, and nothing of the others is found."""
    partitions = make()._partitions
    assert partitions.enter(b"") == 0, "tokens are raised by 1"
    past = PastOutputs(max_texts, partitions, LIBRARY, num_slots=64)
    for text in texts:
        past.add(b"", text)
    assert len(past) <= max_texts and (not texts or len(past))
    values = [[token + 1 for token in text] for text in texts]
    kept = [each[-62:] for each in values[len(texts) - len(past) :]]
    assert [past.index.following(each.start, each.end - each.start) for each in past._texts] == kept
    assert past.index.end < past.index.num_slots, "a text ends in the ring"
    for text in values:
        places, length = past.index.places(text[-24:])
        run = text[len(text) - length :]
        assert all(past.index.following(place - length, length) == run for place in places)
        found = [each for each in past._texts for place in places if each.start <= place - length < place <= each.end]
        assert len(found) == len(places)


# ---------------------------------------------------------------- proposals


def compare_forms(libraries: Items[ctypes.CDLL | None], seed: int) -> None:
    """Texts of few tokens in two partitions, several of them in each step; most have more places than count."""
    rng = random.Random(seed)
    num_in_flight, keys = rng.randrange(5), {"max_spec_factor": rng.choice([0.5, 1.0, 4.0])}
    keys |= {"min_token_prob": rng.choice([0.0, 0.1, 0.4, 1.0]), "max_cached_requests": rng.choice([0, 3, 100])}
    both = [make(library, **keys) for library in libraries]
    for _ in range(12):
        pattern = rng.choices(range(rng.choice([1, 3, 50])), k=rng.randrange(1, 12))
        sequences = [
            decoding(pattern * rng.randrange(1, 30), 2, num_in_flight, rng.choice([b"", b"salt"])) for _ in range(3)
        ]
        for _ in range(4):
            one, *other = [proposer.propose(sequences) for proposer in both]
            assert other in ([one], [])
            for sequence in sequences:
                sequence.token_ids += rng.choices(pattern, k=rng.randrange(1, 4))
        for proposer in both:
            for sequence in sequences:
                proposer.finish(sequence)


@settings(max_examples=25)
@given(st.integers(0, 1 << 32))
def test_both_forms_propose_the_same(seed: int) -> None:
    compare_forms(LIBRARIES, seed)


CHECKED = """
import ctypes, sys
from unittest import mock
from jaxserve.scheduling.proposers import suffix
from jaxserve.scheduling.proposers.token_index import declared
from tests.jaxserve.test_suffix import compare_forms
library = declared(ctypes.CDLL(sys.argv[1]))
with mock.patch.object(suffix, "MAX_OWN_SLOTS", 512), mock.patch.object(suffix, "MAX_PAST_SLOTS", 1024):
    for seed in range(100):
        compare_forms([None, library], seed)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc with its sanitizers")
def test_no_undefined_behaviour_and_no_access_outside_arrays(tmp_path: Path) -> None:
    """With small indexes, which are full, and whose texts are overwritten."""
    library, source = tmp_path / "libchecked.so", build_library.SOURCES / "token_index.c"
    checks = ("-fsanitize=address,undefined,bounds-strict", "-fno-sanitize-recover=all", "-O1", "-g")
    command = ["gcc", *build_library.FLAGS, *checks, "-shared", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout
    done = subprocess.run(
        [sys.executable, "-c", CHECKED, str(library)],
        env={**os.environ, "LD_PRELOAD": runtime.strip(), "ASAN_OPTIONS": "detect_leaks=0", "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@each_library
def test_a_longer_match_proposes_more(library: ctypes.CDLL | None) -> None:
    """As many tokens as match, and both together at most the depth."""
    proposer = make(library)
    add_past(proposer, PAST)
    for match, expected in ((1, 0), (2, 2), (3, 3), (7, 7), (12, 12), (15, 12)):
        drafts = proposed(proposer, decoding([1, *PAST[:match]]))
        assert drafts == PAST[match : match + expected], match
    assert len(proposed(make(library, max_spec_factor=0.0), decoding([1, 2, 3, 1, 2]))) == 0


@each_library
def test_keys_limit_the_length(library: ctypes.CDLL | None) -> None:
    for keys, expected in (
        ({"num_speculative_tokens": 4}, 4),
        ({"max_spec_factor": 2.0}, 16),
        ({"max_tree_depth": 8}, 4),
        ({"max_spec_factor": 0.5}, 5),
    ):
        proposer = make(library, **keys)
        add_past(proposer, PAST)
        assert proposed(proposer, decoding([1, *PAST[:11]])) == PAST[11 : 11 + expected], keys


@each_library
def test_drafts_come_from_the_prompt_too_and_reach_past_steps_in_flight(library: ctypes.CDLL | None) -> None:
    tokens = [*PAST[:20], *PAST[:5]]
    assert proposed(make(library, max_cached_requests=0), decoding(tokens, len(tokens), num_in_flight=6)) == PAST[5:16]


@each_library
def test_a_loop_goes_on_with_its_drafts(library: ctypes.CDLL | None) -> None:
    assert proposed(make(library), decoding([5, 7, 7, 7, 7])) == [7, 7, 7]
    assert proposed(make(library), decoding([5, *[1, 2, 3] * 4])) == [1, 2, 3] * 3


@each_library
def test_a_text_that_comes_again_is_followed_through_a_loop_that_many_texts_have(library: ctypes.CDLL | None) -> None:
    proposer, loop = make(library, num_speculative_tokens=8), [1, 2] * 20
    texts = [[*range(1000 * i, 1000 * i + 24), *loop, *range(1000 * i + 100, 1000 * i + 110)] for i in range(1, 31)]
    for text in texts:
        add_past(proposer, text)
    for text in texts[::7]:
        sequence = decoding(text[:24])
        for length in range(24, len(text) - 8):
            sequence.token_ids[:] = text[:length]
            assert proposed(proposer, sequence) == text[length : length + 8]


@each_library
def test_a_draft_ends_where_the_share_of_texts_that_go_on_so_is_too_small(library: ctypes.CDLL | None) -> None:
    texts = [[1, 2, 3, 4, 7, number] for number in range(10, 18)] + [[1, 2, 3, 4, 9, 9]] * 2
    for least, expected in ((0.1, [7, 17]), (0.2, [7]), (0.9, [])):
        proposer = make(library, min_token_prob=least)
        for text in texts:
            add_past(proposer, text)
        assert proposed(proposer, decoding([0, 2, 3, 4])) == expected, least


def test_drafts_never_come_from_another_partition() -> None:
    proposer = make()
    add_past(proposer, PAST, root=b"salt")
    assert proposed(proposer, decoding(PAST[:6], root=b"other")) == []
    assert proposed(proposer, decoding(PAST[:6], root=b"")) == []
    assert proposed(proposer, decoding(PAST[:6], root=b"salt")) == PAST[6:12]


def test_forgotten_sequences_leave_nothing_and_old_outputs_leave_first() -> None:
    proposer = make(max_cached_requests=2)
    failed = decoding([*PAST])
    proposed(proposer, failed)
    proposer.forget(failed)
    proposer.finish(decoding(PAST))
    assert proposed(proposer, decoding(PAST[:6])) == []
    proposer = make(max_cached_requests=2)
    for start in (0, 200, 400):
        add_past(proposer, [start + token for token in PAST], root=str(start).encode())
    assert len(proposer._past) == 2 and not proposer._texts
    assert set(proposer._partitions._numbers) == {b"200", b"400"}
    assert proposed(proposer, decoding(PAST[:6], root=b"0")) == []


def test_a_long_sequence_is_searched_in_its_latest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.scheduling.proposers.suffix.MAX_OWN_SLOTS", 256)
    proposer, sequence = make(), decoding([])
    for number in range(100):
        sequence.token_ids += [*range(10 * number, 10 * number + 10)]
        assert proposed(proposer, sequence) == []
    assert proposer._texts[sequence].index.num_bytes == 32 * 256
    for start, is_known in ((0, False), (900, True)):
        sequence.token_ids += [*range(start, start + 5)]
        assert bool(proposed(proposer, sequence)) == is_known


def test_a_scheduler_tells_of_the_end_of_sequences_and_hands_its_proposer_on() -> None:
    proposer = make()
    scheduler = Scheduler(SchedulerLimits(4, 32, max_draft_tokens=4), PageAllocator(32, 4), proposer)
    sequences = [make_sequence(name, [1, 2, 3, 1, 2], 5, 20) for name in "abc"]
    for sequence in sequences:
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.complete(plan, [[3] for _ in sequences])
    assert scheduler.schedule() is not None and len(proposer._texts) == 3
    scheduler.finish(sequences[0], "abort")
    scheduler.finish(sequences[1], "error")
    assert len(proposer._texts) == 1 and len(proposer._past) == 1, "the one that failed is not kept"
    made = scheduler.renewed()
    assert made.proposer is proposer and not proposer._texts and len(proposer._past) == 1
