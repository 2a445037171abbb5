"""Which drafts the scheduler gives to which rows, and what becomes of them; the model is left out."""

from typing import Any

from jaxserve.api.sampling_options import OptionValues
from jaxserve.scheduling.page_allocator import PageAllocator
from jaxserve.scheduling.plan import ON_DEVICE, Sampling, SchedulerLimits, StepPlan
from jaxserve.scheduling.proposers.proposer import DraftProposer
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from tests.plan_rows import Row, rows_of
from tests.sequences import STOP_STRING, NoState, StopAfter, make_sequence, name_of


class Counting(NoState):
    """Proposes 100, 101, ... : the number of each token's place after the prompt."""

    def follow(self, sequence: Sequence) -> list[int]:
        """Twenty tokens."""
        return list(range(100 + sequence.num_output_tokens, 120 + sequence.num_output_tokens))


class AllowsAll:
    """A constraint that never says anything."""

    def mask(self) -> bytes | None:
        """Everything."""
        return None

    def accept(self, token: int) -> bool:
        """Goes on."""
        return False


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


def test_sequences_whose_masks_the_host_makes_get_no_drafts() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", constraint=AllowsAll())
    add(scheduler, "b", sampling=Sampling(banned_ids=(2,), banned_until=9))
    add(scheduler, "c", sampling=Sampling(OptionValues(presence_penalty=1.0), bad_ids=(2,)))
    start(scheduler)
    assert [row.num_samples for row in rows_of(scheduled(scheduler))] == [1, 1, 4]


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
