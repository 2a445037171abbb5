"""Random events through scheduler, page allocator and prefix cache, against a plain model of what the pages hold."""

import collections
import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxserve.scheduling.page_allocator import KVWindow, PageAllocator, max_held_pages
from jaxserve.scheduling.plan import ON_DEVICE, SchedulerLimits, StepPlan
from jaxserve.scheduling.prefix_cache import TOKEN_BYTES
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import HeldPages, Sequence
from tests.plan_rows import Row, rows_of
from tests.sequences import STOP_STRING, NoState, StopAfter, make_sequence, name_of

STOP = 4
Context = tuple[int, ...]


@dataclasses.dataclass
class Slot:
    """What a device keeps of the sequence in a slot: its page tables, its latest token and where that stands."""

    sequence: Sequence
    tables: list[list[int]]
    token: int = -1
    position: int = -1
    sampled_by: int = -1


class Pages:
    """A device whose pages hold, at each offset, the whole context that keys and values there were computed from.

    Rows take what came before them from the pages, never from the scheduler; a token is drawn from its context.

    Args:
        num_pages: Pages there are.
        page_size: Tokens a page.
        windows: For each page table, the latest tokens that are seen; None for all.
        num_stages: Stages; a token is on the device for plans that many later than the one that samples it.
    """

    def __init__(self, num_pages: int, page_size: int, windows: list[int | None], num_stages: int = 1):
        self.num_stages = num_stages
        self.page_size = page_size
        self.windows = windows
        self.held: list[list[Context]] = [[()] * page_size for _ in range(num_pages)]
        self.written_by = [[-1] * page_size for _ in range(num_pages)]
        self.slots: dict[int, Slot] = {}

    def draw(self, context: Context) -> int:
        """The next token."""
        bits = zlib.crc32(repr(context).encode())
        return STOP if bits % 29 == 0 else 1 + bits % 3

    def run(self, plan: StepPlan, running: list[Sequence]) -> list[list[int]]:
        """The tokens of each row: all rows write before any reads."""
        owners = {sequence.slot: sequence for sequence in running}
        for setup in plan.setups:
            self.slots[setup.slot] = Slot(owners[setup.slot], [[] for _ in self.windows])
        for slot, first, pages, table in plan.grants:
            self.slots[slot].tables[table][first:] = pages
        for copy in plan.copies:
            self.held[copy.target] = list(self.held[copy.source])
            self.written_by[copy.target] = list(self.written_by[copy.source])
        rows = rows_of(plan)
        for row in rows:
            if ON_DEVICE in (row.start, row.token_ids[0]):
                assert plan.number >= self.slots[row.slot].sampled_by + self.num_stages, "a token still in the stages"
        contexts = [self._write(row, self.slots[row.slot]) for row in rows]
        for row in rows:
            if row.num_samples:
                self.slots[row.slot].sampled_by = plan.number
        return [self._sample(row, self.slots[row.slot], context) for row, context in zip(rows, contexts, strict=True)]

    def _write(self, row: Row, slot: Slot) -> Context:
        start = slot.position if row.start == ON_DEVICE else row.start
        first, *others = row.token_ids
        tokens = (slot.token if first == ON_DEVICE else first, *others)
        before = self.at(slot.tables[0], start - 1) if start else ()
        assert len(before) == start
        context = before + tokens
        for table, pages in enumerate(slot.tables):
            for position in range(start, len(context)):
                page, offset = divmod(position, self.page_size)
                self.held[pages[page]][offset] = context[: position + 1]
                self.written_by[pages[page]][offset] = table
        return context

    def _sample(self, row: Row, slot: Slot, context: Context) -> list[int]:
        """Check what the row reads; draw after each of its last tokens while the one before it is what was drawn."""
        first = len(context) - len(row.token_ids)  # where the row starts
        for table, pages in enumerate(slot.tables):
            for position in range(self.first_seen(table, first), len(context)):
                assert self.at(pages, position) == context[: position + 1], "a row reads another context"
                assert self.writer(pages, position) == table, "keys and values of other layers"
        drawn: list[int] = []
        for end in range(len(context) + 1 - row.num_samples, len(context) + 1):
            if drawn and context[end - 1] != drawn[-1]:
                break
            drawn.append(self.draw(context[:end]))
            slot.token, slot.position = drawn[-1], end
        return drawn

    def first_seen(self, table: int, position: int) -> int:
        """The first position that a query at a position sees."""
        window = self.windows[table]
        return 0 if window is None else max(0, position + 1 - window)

    def at(self, pages: list[int], position: int) -> Context:
        """What the pages of a context hold at a position of it."""
        page, offset = divmod(position, self.page_size)
        return self.held[pages[page]][offset]

    def writer(self, pages: list[int], position: int) -> int:
        """Of which table the layers are whose keys and values these are."""
        page, offset = divmod(position, self.page_size)
        return self.written_by[pages[page]][offset]


class Events(NoState):
    """One random run. Prompts are of few different tokens and often go on from an earlier text, so that many meet."""

    def __init__(self, seed: int, depth: int, num_stages: int = 1):
        rng = self.rng = np.random.default_rng(seed)
        max_num_seqs = int(rng.integers(1, 6))
        num_pages, page_size = int(rng.integers(6, 24)), int(rng.choice([1, 2, 4]))
        self.allocator = PageAllocator(num_pages, page_size, keeps_free_pages=rng.random() < 0.8)
        max_tokens, max_drafts = max_num_seqs + int(rng.integers(0, 16)), int(rng.choice([0, 1, 4]))
        self.max_pending = (depth if num_stages == 1 else 2) * (1 + max_drafts)
        self.windows: list[KVWindow | None] = []
        for _ in range(int(rng.choice([1, 1, 2, 3]))):
            num_rows = 3 if num_stages == 1 else 2  # of a sequence in flight
            window = KVWindow(int(rng.integers(2, 12)), page_size, max_tokens + num_rows * (1 + max_drafts))
            self.windows.append(window if rng.random() < 0.5 else None)
        limits = SchedulerLimits(max_num_seqs, max_tokens, 0, max_drafts, tuple(self.windows), num_stages)
        self.scheduler = Scheduler(limits, self.allocator, self)
        self.pages = Pages(num_pages, page_size, [window and window.num_tokens for window in self.windows], num_stages)
        self.depth = depth
        self.num_stages = num_stages
        longest = 3 * num_pages
        while max_held_pages(longest, self.windows) > num_pages:
            longest -= 1
        self.room = longest * page_size
        self.sequences: list[Sequence] = []
        self.in_flight: list[tuple[StepPlan, list[list[int]]] | None] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def follow(self, sequence: Sequence) -> list[int]:
        """Drafts, right to a random length."""
        rng = self.rng
        context = list(sequence.token_ids)
        for _ in range(int(rng.integers(0, 12))):
            context.append(self.pages.draw(tuple(context)))
        if rng.random() < 0.7:
            context += rng.integers(1, STOP + 1, 3).tolist()
        return context[len(sequence.token_ids) :]

    def run(self, num_events: int) -> None:
        """Random events, checked after each; then everything runs to its end."""
        for _ in range(num_events):
            self._event()
            self.check()
        for _ in range(10_000):
            if not self.scheduler.num_unfinished and not self.in_flight:
                break
            self._step()
            self.check()
        assert self.allocator.num_free == self.allocator.num_pages
        assert all(sequence.finish_reason is not None for sequence in self.sequences)
        for sequence in self.sequences:
            text = sequence.token_ids
            expected = [self.pages.draw(tuple(text[:end])) for end in range(sequence.num_prompt_tokens, len(text))]
            assert text[sequence.num_prompt_tokens :] == expected

    def _event(self) -> None:
        kind = self.rng.random()
        unfinished = [sequence for sequence in self.sequences if sequence.finish_reason is None]
        if kind < 0.2 and len(unfinished) < 12:
            self._arrive()
        elif kind < 0.23 and unfinished:
            self.scheduler.finish(self._pick(unfinished), "error" if self.rng.random() < 0.3 else "abort")
        else:
            self._step()

    def _pick(self, sequences: list[Sequence]) -> Sequence:
        return sequences[int(self.rng.integers(len(sequences)))]

    def _arrive(self) -> None:
        rng = self.rng
        prompt: list[int] = []
        if self.sequences and rng.random() < 0.7:
            earlier = self._pick(self.sequences).token_ids
            prompt = earlier[: int(rng.integers(0, len(earlier) + 1))]
        prompt = prompt + rng.integers(1, 4, int(rng.choice([0, 1, 3, 12]))).tolist() or [1]
        prompt = prompt[: int(rng.integers(1, self.room))]
        length = min(self.room, len(prompt) + int(rng.choice([1, 3, 10, 30])))
        fields: dict[str, Any] = {"stop_ids": {STOP: None}, "cache_root": b"", "reads_cache": rng.random() < 0.9}
        samples = [
            make_sequence(
                f"{len(self.sequences)}-{i}",
                list(prompt),
                len(prompt),
                length,
                stop_strings=StopAfter(int(rng.integers(1, 20))) if rng.random() < 0.4 else None,
                **fields,
            )
            for i in range(int(rng.choice([1, 1, 1, 3])))
        ]
        samples[0].followers = samples[1:]
        self.sequences += samples
        self.scheduler.add(samples[0])

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            assert plan.num_tokens <= self.scheduler.limits.max_num_batched_tokens
            self.in_flight.append((plan, self.pages.run(plan, self.scheduler.running)))
        elif self.in_flight and self.num_stages > 1:
            self.in_flight.append(None)
            self.counts["bubbles"] += 1
        if self.in_flight and (len(self.in_flight) >= self.depth or (plan is None and self.num_stages == 1)):
            oldest = self.in_flight.pop(0)
            assert oldest is not None
            self._complete(*oldest)
        while self.in_flight and self.in_flight[0] is None:
            self.in_flight.pop(0)

    def _complete(self, plan: StepPlan, tokens: list[list[int]]) -> None:
        before = {sequence: len(sequence.token_ids) for sequence in self.sequences}
        completion = self.scheduler.complete(plan, tokens)
        assert len(set(completion.sampled)) == len(completion.sampled), "a row for a sequence"
        for row, new in zip(rows_of(plan), tokens, strict=True):
            self.counts["accepted"] += max(len(new) - 1, 0)
            self.counts["rejected"] += row.num_samples - len(new)
            self.counts["device start"] += row.start == ON_DEVICE and row.num_samples > 1
        for sequence, new in zip(completion.sequences, tokens, strict=True):
            kept = sequence.token_ids[before[sequence] :]
            assert kept == new[: len(kept)] and bool(kept) == (sequence in completion.sampled)
            self.counts["cut"] += 0 < len(kept) < len(new)
            if sequence in completion.finished and sequence.stop_reason == STOP_STRING:
                self.counts["stop strings"] += 1
                self.counts["in flight"] += sequence.num_pending > 0
        assert completion.num_new_tokens == sum(len(one.token_ids) - before[one] for one in completion.sampled)

    def check(self) -> None:
        """Pages hold what their owners and the cache say, and have as many holders as owners."""
        holders = [0] * self.allocator.num_pages
        for sequence in self.scheduler.running:
            assert sequence.num_pending <= self.max_pending, name_of(sequence)
            num_final = min(sequence.num_computed, len(sequence.token_ids))
            most = max(sequence.num_computed + 1, len(sequence.token_ids))
            for index, table in enumerate(sequence.tables):
                first = self.pages.first_seen(index, min(sequence.num_computed, len(sequence.token_ids) - 1))
                for position in range(first, num_final):
                    held = self.pages.at(table.pages, position)
                    assert list(held) == sequence.token_ids[: position + 1], name_of(sequence)
                    assert self.pages.writer(table.pages, position) == index
                self._check_table(table, self.windows[index], self.allocator.pages_for(most))
                for page in table.held:
                    holders[page] += 1
        assert all(not sequence.tables and not sequence.num_computed for sequence in self.scheduler.waiting)
        assert [self.allocator.num_holders(page) for page in range(len(holders))] == holders
        assert self.allocator.num_free == holders.count(0)
        self._check_cache()
        for sequence in self.sequences:
            output = sequence.token_ids[sequence.num_prompt_tokens :]
            assert STOP not in output[:-1] and len(sequence.token_ids) <= sequence.max_length
            assert sequence.finish_reason == "stop" or STOP not in output

    def _check_table(self, table: HeldPages, window: KVWindow | None, num_pages: int) -> None:
        num_released = table.num_released
        assert table.pages[:num_released] == table.pages[num_released : num_released + 1] * num_released
        assert window is not None or not num_released
        assert window is None or len(table.held) <= window.max_pages
        assert len(table.pages) <= num_pages, "pages past all tokens"
        self.counts["released"] += num_released

    def _check_cache(self) -> None:
        """A page's content and the key before it are those of the context in the page."""
        cache = self.allocator.cache
        for page, record in cache._records.items():
            num_tokens = len(record.content) // TOKEN_BYTES
            context = self.pages.held[page][num_tokens - 1]
            start = len(context) - num_tokens
            tokens = np.array(context, "<i4").tobytes()
            assert record.content == tokens[start * TOKEN_BYTES :]
            assert self.pages.held[page][:num_tokens] == [context[: start + i + 1] for i in range(num_tokens)]
            key, size = cache.root_key(b""), self.allocator.page_size * TOKEN_BYTES
            for first in range(0, start * TOKEN_BYTES, size):
                key = cache.key(key, tokens[first : first + size])
            (table,) = set(self.pages.written_by[page][:num_tokens])
            tag = bytes([table] if table else [])
            assert record.parent == key + tag
            assert record.key == (cache.key(key, record.content) + tag if len(record.content) == size else b"")


def run_events(seed: int, num_events: int = 80) -> Events:
    """A run of its own for each seed, with one, two or three steps in flight."""
    events = Events(seed, depth=1 + seed % 3)
    events.run(num_events)
    return events


def run_staged_events(seed: int, num_events: int = 80) -> Events:
    """A run of its own for each seed, in two to four stages that are all busy, with and without another step."""
    num_stages = 2 + seed // 2 % 3
    events = Events(seed, num_stages + seed % 2, num_stages)
    events.run(num_events)
    return events


@pytest.mark.parametrize("group", range(4))
def test_pages_hold_what_their_owners_and_the_cache_say(group: int) -> None:
    for seed in range(group * 20, group * 20 + 20):
        run_events(seed)


def test_pages_in_several_stages_hold_what_their_owners_and_the_cache_say() -> None:
    for seed in range(100, 124):
        run_staged_events(seed)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_events, run_staged_events])
def test_many_random_events(run: Callable[[int, int], Events]) -> None:
    for seed in range(1000, 3000):
        run(seed, 300)


@pytest.mark.parametrize("run", [run_events, run_staged_events])
def test_random_events_meet_what_they_are_meant_to(run: Callable[[int], Events]) -> None:
    runs = [run(seed) for seed in range(30)]
    assert sum(each.scheduler.num_preemptions for each in runs) > 30
    assert sum(each.scheduler.pages.num_hit_tokens for each in runs) > 300
    counts = sum((each.counts for each in runs), collections.Counter())
    for name in ("accepted", "rejected", "device start"):
        assert counts[name] > 100, counts
    assert counts["released"] > 100, counts
    assert counts["stop strings"] > 40 and counts["in flight"] > 5 and counts["cut"] > 10, counts
    assert (counts["bubbles"] > 100) == (run is run_staged_events), counts
