"""Which drafts the scheduler gives to which rows, and what becomes of them; the model is left out."""

import itertools
from typing import Any
from unittest import mock

import pytest

from jaxserve.device.runner_interface import Runner, StepResult
from jaxserve.engine.replica import Replica
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import ON_DEVICE, Sampling, SchedulerLimits, StepPlan
from jaxserve.scheduling.proposers.grammar import GrammarProposer
from jaxserve.scheduling.proposers.proposer import DraftProposer
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from tests.plan_rows import Row, rows_of
from tests.sequences import STOP_STRING, NoState, StopAfter, Taken, make_sequence, name_of


class Counting(NoState):
    """Proposes 100, 101, ... : the number of each token's place after the prompt."""

    def follow(self, sequence: Sequence) -> list[int]:
        """Twenty tokens."""
        return list(range(100 + sequence.num_output_tokens, 120 + sequence.num_output_tokens))


class Script(Taken):
    """A constraint that allows some of the tokens up to 127 at each position, forces a lone one, and may end."""

    def __init__(self, *allowed: str, forces: bool = False, last: int = -1, fails_at: int = -1):
        super().__init__()
        self.allowed, self.forces, self.last, self.fails_at = allowed, forces, last, fails_at

    def mask(self) -> bytes | None:
        """The tokens are characters; all where nothing is said."""
        if len(self.taken) == self.fails_at:
            raise RuntimeError("no mask")
        allowed = self.allowed[len(self.taken)] if len(self.taken) < len(self.allowed) else ""
        return sum(1 << ord(token) for token in allowed).to_bytes(16, "little") if allowed else None

    def forced(self) -> list[int]:
        """All lone tokens from here on."""
        rest = itertools.takewhile(lambda tokens: len(tokens) == 1, self.allowed[len(self.taken) :])
        return [ord(token) for token in rest] if self.forces else []

    def accept(self, token: int) -> bool:
        """Notes it."""
        self.taken.append(token)
        return token == self.last


def make_scheduler(
    num_pages: int = 32, max_tokens: int = 32, proposer: DraftProposer | None = None, max_samples: int | None = None
) -> Scheduler:
    """Pages of four tokens, three drafts a row."""
    limits = SchedulerLimits(4, max_tokens, max_draft_tokens=3, max_step_samples=max_samples)
    return Scheduler(limits, PageAllocator(num_pages, 4), proposer or Counting())


def add(scheduler: Scheduler, name: str, num_prompt_tokens: int = 5, new: int = 20, **fields: Any) -> Sequence:
    """A sequence whose prompt is computed, and whose first token, 100, is known."""
    prompt = [ord(name)] * num_prompt_tokens
    sequence = make_sequence(name, prompt, num_prompt_tokens, num_prompt_tokens + new, **fields)
    scheduler.add(sequence)
    return sequence


def start(scheduler: Scheduler) -> None:
    """Computes all prompts; each sequence gets its first token, 100."""
    plan = scheduler.schedule()
    assert plan is not None and all(row.num_samples == 1 for row in rows_of(plan)), "prompts carry no drafts"
    scheduler.complete(plan, [[100] for _ in rows_of(plan)])


def scheduled(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def test_a_row_samples_after_its_token_and_each_draft() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a")
    start(scheduler)
    plan = scheduled(scheduler)
    assert rows_of(plan) == [Row(sequence.slot, 5, [100, 101, 102, 103], 4)]
    completion = scheduler.complete(plan, [[101, 102, 7]])
    assert (completion.sampled, completion.num_new_tokens) == ([sequence], 3)
    assert sequence.token_ids[-3:] == [101, 102, 7]
    assert sequence.token_ids[5:] == [100, 101, 102, 7] and (sequence.num_computed, sequence.num_pending) == (8, 0)
    assert rows_of(scheduled(scheduler)) == [Row(sequence.slot, 8, [7, 104, 105, 106], 4)]


def test_the_samples_of_a_step_are_bounded() -> None:
    scheduler = make_scheduler(max_samples=6)
    for name in "abc":
        add(scheduler, name)
    start(scheduler)
    assert [row.num_samples for row in rows_of(scheduled(scheduler))] == [1, 1, 4]


def test_drafts_of_a_pending_row_follow_those_in_flight() -> None:
    """Where the row starts is left to the device; its bounds are one token and all drafts further."""
    scheduler = make_scheduler()
    sequence = add(scheduler, "a")
    start(scheduler)
    first, second = scheduled(scheduler), scheduled(scheduler)
    assert rows_of(second) == [Row(sequence.slot, ON_DEVICE, [ON_DEVICE, 105, 106, 107], 4)]
    assert (sequence.num_computed, sequence.num_pending, len(sequence.tables[0].pages)) == (13, 8, 4)
    scheduler.complete(first, [[3]])
    assert sequence.token_ids[5:] == [100, 3]
    assert (sequence.num_computed, sequence.num_pending) == (10, 4)
    assert len(sequence.tables[0].pages) == 3, "a page goes back"
    scheduler.complete(second, [[4, 105]])
    assert sequence.token_ids[5:] == [100, 3, 4, 105] and (sequence.num_computed, sequence.num_pending) == (8, 0)


def test_a_step_waits_for_the_tokens_of_one_with_drafts() -> None:
    """Without drafts, the next step is launched ahead."""

    class Early(Counting):
        def follow(self, sequence: Sequence) -> list[int]:
            return super().follow(sequence) if sequence.num_output_tokens < 9 else []

    plans, in_flight, next_token = list[StepPlan](), list[int](), iter(range(100, 200))
    runner = mock.create_autospec(Runner)
    runner.launch.side_effect = plans.extend
    scheduler = make_scheduler(proposer=Early())
    replica = Replica([scheduler], runner, depth=2)
    add(scheduler, "a", new=13)
    while scheduler.num_unfinished:
        is_launched, num_collected = replica.launch(), runner.collect.call_count
        in_flight += [len(plans) - num_collected] * is_launched
        if plans[num_collected:]:
            tokens = [next(next_token) for _ in range(plans[num_collected].num_samples[0])]
            runner.collect.side_effect = [[StepResult([tokens], None, None)]]
            replica.collect(not is_launched)
    assert [plan.num_samples[0] for plan in plans] == [1, 4, 4, 1, 1, 1, 1]
    assert in_flight == [1, 2, 1, 1, 2, 2, 2], "each launch, itself included"


@pytest.mark.parametrize(
    ("allowed", "drafts"),
    [
        (["d", "def", "ef", "xyz", "g"], [101, 102]),
        (["d", "x"], []),
        (["d", "", "f", "", "g"], [101, 102, 103]),
        (["d"], [101, 102, 103]),
    ],
)
def test_drafts_end_where_a_constraint_forbids_one(allowed: list[str], drafts: list[int]) -> None:
    """Each sample has the mask of its position, and what the device kept decides what the constraint takes in."""
    scheduler, constraint = make_scheduler(), Script(*allowed)
    sequence = add(scheduler, "a", constraint=constraint)
    start(scheduler)
    plan = scheduled(scheduler)
    assert rows_of(plan) == [Row(sequence.slot, 5, [100, *drafts], 1 + len(drafts))]
    expected = [(index - 1, tokens) for index, tokens in enumerate(allowed) if tokens and 1 <= index <= 1 + len(drafts)]
    assert [(sample, tokens_of(words)) for _, words, sample in plan.masks] == expected
    assert constraint.taken == [100] and scheduler.schedule() is None, "its next masks need the tokens"
    kept = [*drafts[:1], 7]
    scheduler.complete(plan, [kept])
    assert constraint.taken == [100, *kept] and sequence.token_ids[5:] == [100, *kept]
    assert scheduler.draft_counts.num_tokens == len(drafts), "what a constraint forbids is not drafted"


def tokens_of(words: bytes) -> str:
    """The tokens of a mask as characters."""
    bits = int.from_bytes(words, "little")
    return "".join(chr(token) for token in range(128) if bits >> token & 1)


def test_forced_tokens_are_drafts() -> None:
    """Before proposals, which follow where they agree; by themselves too."""
    plans = []
    for proposer in (Counting(), GrammarProposer({})):
        scheduler = make_scheduler(proposer=proposer)
        add(scheduler, "a", constraint=Script("d", "e", "xyz", forces=True))
        add(scheduler, "b", constraint=Script("d", "xf", "z", "q", "xy", forces=True))
        add(scheduler, "c", constraint=Script("d", "Q", "R", "S", "T", "U", forces=True))
        add(scheduler, "d")
        start(scheduler)
        plans.append(sorted(row.token_ids for row in rows_of(scheduled(scheduler))))
    assert plans[0] == [[100], [100, 81, 82, 83], [100, 101], [100, 101, 102, 103]]
    assert plans[1] == [[100], [100], [100, 81, 82, 83], [100, 101]]


def test_drafts_end_before_the_last_token_of_a_sequence() -> None:
    """A token that completes a constraint, or a stop token; below the minimum, it is another token."""
    scheduler = make_scheduler()
    add(scheduler, "a", constraint=Script(last=102))
    add(scheduler, "b", constraint=Script(), stop_ids={103: None})
    add(scheduler, "c", constraint=Script(), stop_ids={101: None}, min_tokens=3)
    start(scheduler)
    rows = {row.slot: row.token_ids[1:] for row in rows_of(scheduled(scheduler))}
    assert [rows[sequence.slot] for sequence in scheduler.running] == [[101], [101, 102], [101, 102, 103]]


def test_drafts_end_where_a_constraint_fails() -> None:
    """It may never get there; if it cannot go back, its sequence fails, and no other."""

    class Stuck(Script):
        def restore(self, state: int) -> None:
            raise RuntimeError("no way back")

    scheduler = make_scheduler()
    one, other = add(scheduler, "a", constraint=Script(fails_at=3)), add(scheduler, "b", constraint=Stuck())
    start(scheduler)
    plan = scheduled(scheduler)
    assert {row.slot: len(row.token_ids) for row in rows_of(plan)} == {one.slot: 2, other.slot: 1}
    scheduler.complete(plan, [[9], [101, 9]])
    assert one.finish_reason is None and other.finish_reason == "error" and "no way back" in str(other.error)


def test_below_min_tokens_a_row_waits_for_those_in_flight() -> None:
    """Whether its samples are bound to the minimum depends on how many are kept; past it, nothing waits."""
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", new=40, sampling=Sampling(banned_ids=(2,), banned_until=12))
    start(scheduler)
    first = scheduled(scheduler)
    assert len(rows_of(first)[0].token_ids) == 4 and scheduler.schedule() is None
    scheduler.complete(first, [[101, 102, 103, 104]])
    second = scheduled(scheduler)
    assert rows_of(second)[0].start == 9 and scheduler.schedule() is None
    scheduler.complete(second, [[105, 9]])
    third, fourth = scheduled(scheduler), scheduled(scheduler)
    assert [rows_of(plan)[0].start for plan in (third, fourth)] == [11, ON_DEVICE] and len(sequence.token_ids) == 12


def test_rows_with_drafts_follow_those_of_one_token() -> None:
    class Some(NoState):
        def follow(self, sequence: Sequence) -> list[int]:
            return [] if name_of(sequence) in "bd" else [1]

    scheduler = make_scheduler(proposer=Some())
    sequences = [add(scheduler, name) for name in "abcd"]
    start(scheduler)
    plan = scheduled(scheduler)
    a, b, c, d = (sequence.slot for sequence in sequences)
    assert [(row.slot, row.num_samples) for row in rows_of(plan)] == [(b, 1), (d, 1), (a, 2), (c, 2)]
    assert list(plan.first_samples) == [0, 1, 2, 4]
    completion = scheduler.complete(plan, [[5], [6], [1, 8], [9]])
    assert (
        [name_of(one) for one in completion.sampled] == [name_of(one) for one in completion.sequences] == list("bdac")
    )
    assert [one.token_ids[6:] for one in completion.sequences] == [[5], [6], [1, 8], [9]]
    assert list(completion.plan.first_samples) == [0, 1, 2, 4] and completion.num_new_tokens == 5


def test_drafts_take_the_tokens_that_prompts_leave() -> None:
    scheduler = make_scheduler(max_tokens=12)
    add(scheduler, "a")
    start(scheduler)
    add(scheduler, "b", num_prompt_tokens=9)
    plan = scheduled(scheduler)
    assert [(len(row.token_ids), row.num_samples) for row in rows_of(plan)] == [(3, 3), (9, 1)]
    add(scheduler, "c", num_prompt_tokens=30)
    assert [len(row.token_ids) for row in rows_of(scheduled(scheduler))] == [1, 1, 10], "no tokens are left for drafts"


def test_drafts_take_free_pages_only() -> None:
    """Both sequences need a page each for their drafts; one is free, and nobody is preempted for the other."""
    scheduler = make_scheduler(num_pages=5)
    one, other = add(scheduler, "a", 6, 4), add(scheduler, "b", 6, 4)
    start(scheduler)
    plan = scheduled(scheduler)
    assert [len(row.token_ids) for row in rows_of(plan)] == [3, 2], "up to the end; room in the pages there are"
    assert [len(sequence.tables[0].pages) for sequence in (one, other)] == [3, 2] and scheduler.num_preemptions == 0


def test_drafts_end_where_the_sequence_does() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", new=4)
    start(scheduler)
    first = scheduled(scheduler)
    assert [len(row.token_ids) for row in rows_of(first)] == [3]
    assert scheduler.schedule() is None, "it may have all its tokens"
    scheduler.complete(first, [[101, 7]])
    second = scheduled(scheduler)
    assert rows_of(second) == [Row(sequence.slot, 7, [7], 1)]
    scheduler.complete(second, [[8]])
    assert sequence.finish_reason == "length" and sequence.token_ids[5:] == [100, 101, 7, 8]


def test_a_stop_token_among_accepted_drafts_ends_the_sequence() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", stop_ids={102: 102})
    start(scheduler)
    completion = scheduler.complete(scheduled(scheduler), [[101, 102, 103, 104]])
    assert (completion.sampled, completion.num_new_tokens) == ([sequence], 2)
    assert sequence.token_ids[-2:] == [101, 102]
    assert (sequence.finish_reason, sequence.stop_reason, sequence.token_ids[5:]) == ("stop", 102, [100, 101, 102])
    assert scheduler.allocator.num_free == scheduler.allocator.num_pages


def test_a_row_without_a_token_fails_its_sequence() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a")
    start(scheduler)
    completion = scheduler.complete(scheduled(scheduler), [[]])
    assert completion.finished == [sequence] and sequence.finish_reason == "error"
    assert scheduler.allocator.num_free == scheduler.allocator.num_pages


def test_a_stop_string_among_accepted_drafts_ends_the_sequence() -> None:
    """It wins over the limit that a later token reaches, and over a stop token after it, and neither is kept."""
    for accepted in ([101, 102, 103, 104], [101, 102, 9]):
        scheduler = make_scheduler()
        text = StopAfter(2)
        sequence = add(scheduler, "a", new=5, stop_ids={9: None}, stop_strings=text)
        start(scheduler)
        assert text.num_pushed == 1
        completion = scheduler.complete(scheduled(scheduler), [accepted], now=3.0)
        assert (completion.sampled, completion.finished, completion.num_new_tokens) == ([sequence], [sequence], 1)
        assert (sequence.finish_reason, sequence.stop_reason) == ("stop", STOP_STRING)
        assert sequence.token_ids[5:] == [100, 101]
        assert scheduler.allocator.num_free == scheduler.allocator.num_pages
        known = scheduler.pages.num_cached_tokens(add(scheduler, "b"))
        same = add(scheduler, "a", new=1)
        same.token_ids += [100, 101, 102, 103]
        assert known == 0 and scheduler.pages.num_cached_tokens(same) == 4, "one full page, of kept tokens"
