"""Scheduler and real steps under random events: drafts, preemption, shared prefixes, steps in flight.

Tokens and the bits of every full page must be those of each text run alone, without drafts.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.api.sampling_options import OptionValues
from jaxserve.device.buckets import Buckets
from jaxserve.device.stage import Stage
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import ON_DEVICE, Sampling, SchedulerLimits, StepPlan
from jaxserve.scheduling.prefix_cache import pack_tokens
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from tests.plan_rows import rows_of
from tests.sequences import NoState, make_sequence, name_of
from tests.tiny_programs import make_program, make_runner, tiny_config

PAGE_SIZE, NUM_PAGES, NUM_TEXTS, MAX_DRAFTS = 8, 8, 16, 4
STOP = 11
SAMPLINGS = [
    Sampling(),
    Sampling(OptionValues(temperature=1.0, top_k=20), seed=7),
    Sampling(OptionValues(frequency_penalty=1.5, presence_penalty=0.5)),
    Sampling(OptionValues(temperature=0.8, repetition_penalty=1.3), seed=5),
]
Pages = dict[tuple[int, ...], list[np.ndarray]]


@functools.cache
def compiled_stage() -> Stage:
    """Deterministic programs of five samples a row."""
    program = make_program(tiny_config(), num_pages=NUM_PAGES, num_slots=8, row_tile=8)
    sizes = {"table_pages": 5, "multiple": 8, "max_samples": 1 + MAX_DRAFTS, "draft_rows": (8,)}
    buckets = Buckets((8,), (16, 32), max_num_seqs=8, **sizes)
    stage = Stage(program, buckets)
    stage.compile()
    return stage


def text(number: int) -> Sequence:
    """A request; prompts of every third begin alike."""
    rng = np.random.default_rng(number)
    prompt = [
        *np.random.default_rng(number % 3).integers(0, 53, 17).tolist(),
        *rng.integers(0, 53, number % 5).tolist(),
    ]
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    return make_sequence(str(number), prompt, len(prompt), 40, sampling=sampling, stop_ids={STOP: None})


class Load(NoState):
    """Texts on a scheduler and a runner, with up to ``depth`` steps in flight and drafts that ``follow`` makes."""

    def __init__(self, seed: int = 0, depth: int = 1, expected: list[list[int]] | None = None):
        self.rng = np.random.default_rng(seed)
        self.depth = depth
        self.expected = expected
        self.allocator = PageAllocator(NUM_PAGES, PAGE_SIZE)
        max_drafts = 0 if expected is None else MAX_DRAFTS
        self.scheduler = Scheduler(
            SchedulerLimits(4, 32, max_draft_tokens=max_drafts), self.allocator, None if expected is None else self
        )
        self.runner = make_runner(compiled_stage())
        self.in_flight: list[StepPlan] = []
        self.num_device_starts = self.num_kept = 0

    def follow(self, sequence: Sequence) -> list[int]:
        """What the text goes on with, up to a random place."""
        assert self.expected is not None
        future = self.expected[int(name_of(sequence))][len(sequence.token_ids) :]
        return [*future[: int(self.rng.integers(0, 10))], *self.rng.integers(0, 53, 3).tolist()]

    def step(self) -> None:
        """Launch a step, and take in one that is due."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.num_device_starts += sum(row.start == ON_DEVICE and row.num_samples > 1 for row in rows_of(plan))
            self.runner.launch([plan])
            self.in_flight.append(plan)
        if self.in_flight and (plan is None or len(self.in_flight) >= self.depth):
            plan = self.in_flight.pop(0)
            tokens = self.runner.collect()[0].tokens
            self.num_kept += sum(len(some) - 1 for some in tokens if some)
            self.scheduler.complete(plan, tokens)

    def pages(self, sequences: list[Sequence]) -> Pages:
        """Contents of full pages by the tokens up to their ends: of contexts, as far as these are final, and cached."""
        pools = [np.array(pool) for pool in jax.tree.leaves(self.runner._last.state.pools)]
        found: Pages = {}
        cache = self.allocator.cache
        for sequence in sequences:
            tokens, key = sequence.token_ids, cache.root_key(b"")
            for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
                key = cache.key(key, pack_tokens(tokens[end - PAGE_SIZE : end]))
                owned = [sequence.tables[0].pages[end // PAGE_SIZE - 1]] if end <= sequence.num_computed else []
                for page in {*owned, cache.find(key)} - {None}:
                    content = [pool[page] for pool in pools]
                    other = found.setdefault(tuple(tokens[:end]), content)
                    assert all(map(np.array_equal, content, other)), "a cached page differs from its owner's"
        return found


@functools.cache
def alone() -> tuple[list[list[int]], Pages]:
    """The whole text of each request, and its pages, without drafts and without others."""
    texts, pages = [], {}
    for number in range(NUM_TEXTS):
        load, sequence = Load(), text(number)
        load.scheduler.add(sequence)
        while sequence.finish_reason is None:
            load.step()
        texts.append(sequence.token_ids)
        pages |= load.pages([sequence])
        load.runner.close()
    assert sum(sequence[-1] == STOP for sequence in texts) >= 2
    return texts, pages


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_random_events_change_no_token_and_no_page(seed: int, depth: int) -> None:
    expected, expected_pages = alone()
    load = Load(seed, depth, expected)
    rng, scheduler = load.rng, load.scheduler
    coming, sequences = [text(number) for number in rng.permutation(NUM_TEXTS).tolist()], list[Sequence]()
    num_pages = 0
    for _ in range(600):
        kind = rng.random()
        running = [sequence for sequence in sequences if sequence.finish_reason is None]
        if kind < 0.5 and coming:
            sequences.append(coming.pop())
            scheduler.add(sequences[-1])
        elif not coming and not running and not load.in_flight:
            break
        else:
            load.step()
            if rng.random() < 0.5:
                found = load.pages(sequences)
                num_pages += len(found)
                for context, content in found.items():
                    if list(context) not in expected:  # alone, the last token of a text is never computed
                        assert all(map(np.array_equal, content, expected_pages[context]))
    for sequence in sequences:
        assert sequence.token_ids == expected[int(name_of(sequence))]
    assert len(sequences) == NUM_TEXTS and load.allocator.num_free == NUM_PAGES
    counts: dict[str, Any] = {
        "pages": num_pages,
        "kept drafts": load.num_kept,
        "preemptions": scheduler.num_preemptions,
        "cached": scheduler.pages.num_hit_tokens,
        "device starts": load.num_device_starts + (depth == 1),
    }
    assert all(counts.values()), counts
    load.runner.close()
