"""The scheduler's part that gives decode rows drafts, and takes back what a step reserved for those that were wrong.

A draft is a token that may follow those a sequence has. A step verifies all drafts of a row at once, so that it samples
several tokens; only the device knows how many stay until the step completes. Till then ``Sequence.num_computed`` and
``Sequence.num_pending`` are the most they can be, and the sequence has pages for that many.
"""

from typing import Protocol, runtime_checkable

from jaxserve.scheduling.context_pages import ContextPages
from jaxserve.scheduling.plan import SchedulerLimits, StepPlan
from jaxserve.scheduling.plan_draft import Flight, PlanDraft
from jaxserve.scheduling.sequence import Sequence


@runtime_checkable
class DraftProposer(Protocol):
    """Guesses how sequences go on. What it guesses changes how many steps a sequence takes, never its tokens."""

    def propose(self, sequence: Sequence) -> list[int]:
        """Return tokens that may follow ``sequence.token_ids``, as many as it likes; it changes nothing there.

        Those before index ``sequence.num_pending - 1`` become no drafts: steps in flight may be sampling them.
        """
        ...


def takes_drafts(sequence: Sequence) -> bool:
    """Whether tokens may be sampled after drafts: not where the host makes the mask of each token from those before."""
    return sequence.constraint is None and not sequence.sampling.banned_ids


def add_drafts(
    draft: PlanDraft, num_decodes: int, proposer: DraftProposer, limits: SchedulerLimits, pages: ContextPages
) -> None:
    """Extend decode rows, the first ``num_decodes`` of a plan, by drafts.

    Drafts take what all else leaves: query tokens of the step, and free pages. Rows with drafts follow those of one
    token, which are cheapest at the front.
    """
    budget = limits.max_num_batched_tokens - sum(len(row.token_ids) for row in draft.rows)
    for index, sequence in enumerate(draft.sequences[:num_decodes]):
        if budget <= 0:
            break
        if not takes_drafts(sequence):
            continue
        num_in_flight = sequence.num_pending - 1  # all but the row's own
        drafts = proposer.propose(sequence)[num_in_flight:][: min(limits.max_draft_tokens, budget)]
        drafts = drafts[: _reserve(sequence, len(drafts), draft, pages)]
        if not drafts:
            continue
        row = draft.rows[index]
        draft.rows[index] = row._replace(token_ids=[*row.token_ids, *drafts], num_samples=1 + len(drafts))
        sequence.num_computed += len(drafts)
        sequence.num_pending += len(drafts)
        budget -= len(drafts)
    order = sorted(range(num_decodes), key=lambda index: draft.rows[index].num_samples > 1)
    draft.rows[:num_decodes] = [draft.rows[index] for index in order]
    draft.sequences[:num_decodes] = [draft.sequences[index] for index in order]


def drop_rejected(plan: StepPlan, flight: Flight, tokens: list[list[int]], pages: ContextPages) -> None:
    """Take back what a completed step reserved for drafts that were wrong; see ``Scheduler.complete``."""
    for row, sequence, new in zip(plan.rows, flight.sequences, tokens, strict=True):
        num_rejected = row.num_samples - max(len(new), 1)
        if num_rejected <= 0 or sequence.finish_reason is not None:
            continue
        sequence.num_pending -= num_rejected
        if sequence.slot >= 0:
            sequence.num_computed -= num_rejected
            pages.shrink(sequence)


def _reserve(sequence: Sequence, num_drafts: int, draft: PlanDraft, pages: ContextPages) -> int:
    """Get pages for the drafts of a sequence; return how many drafts have room in its pages and its length."""
    end = min(sequence.num_computed + num_drafts, sequence.max_length - 1)
    if end > sequence.decodes_until:
        pages.reach(sequence, end)
        draft.add_grants(pages.grants(sequence))
    return min(end, sequence.decodes_until) - sequence.num_computed
