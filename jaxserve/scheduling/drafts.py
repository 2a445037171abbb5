"""Speculative decoding in the scheduler: add draft tokens to decode rows, and undo what rejected drafts reserved.

A step verifies all drafts of a row at once and so samples several tokens. Until it completes, only the device knows how
many were accepted: ``Sequence.num_computed`` and ``Sequence.num_pending`` are upper bounds, and the sequence has pages
for that many tokens.
"""

import collections
import dataclasses
import itertools
import logging
from array import array

from jaxserve.scheduling.context_pages import ContextPages
from jaxserve.scheduling.plan import SchedulerLimits
from jaxserve.scheduling.proposers.proposer import DraftProposer
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step import Step

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class DraftCounts:
    """Counts of verified drafts.

    Attributes:
        num_drafts: Number of rows with draft tokens.
        num_tokens: Number of their draft tokens.
        num_accepted: Number of accepted ones by position; the token sampled after them is not one.
    """

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter[int])

    def add(self, other: "DraftCounts") -> None:
        """Add other counts."""
        self.num_drafts += other.num_drafts
        self.num_tokens += other.num_tokens
        self.num_accepted += other.num_accepted


def takes_drafts(sequence: Sequence) -> bool:
    """Whether a sequence can use drafts: not if the host computes each token's mask from the tokens before it."""
    return sequence.constraint is None and not sequence.sampling.banned_ids


def add_drafts(
    step: Step, num_decodes: int, proposer: DraftProposer, limits: SchedulerLimits, pages: ContextPages
) -> bool:
    """Add drafts to the decode rows, which are the first ``num_decodes`` rows of a plan.

    Drafts use only the query tokens and pages that are left over. Rows with drafts are moved after rows of one token,
    which are cheapest at the front. Return whether the proposer works: if it fails, rows stay without drafts.
    """
    budget = limits.max_num_batched_tokens - step.plan.num_tokens
    if limits.max_step_samples is not None:
        budget = min(budget, limits.max_step_samples - step.plan.num_rows)
    asked = [index for index, one in enumerate(step.sequences[:num_decodes]) if takes_drafts(one)] if budget > 0 else []
    found = _ask(proposer, [step.sequences[index] for index in asked])
    proposed: list[list[int]] = [[] for _ in range(num_decodes)]
    for index, drafts in zip(asked, found or [], strict=False):
        sequence = step.sequences[index]
        num_in_flight = sequence.num_pending - 1  # excludes this row's token
        drafts = drafts[num_in_flight:][: min(limits.max_draft_tokens, budget)]
        if drafts:
            drafts = proposed[index] = drafts[: _reserve(sequence, len(drafts), step, pages, limits.num_lookahead)]
            sequence.num_computed += len(drafts)
            sequence.num_pending += len(drafts)
            budget -= len(drafts)
    plan, order = step.plan, sorted(range(num_decodes), key=lambda index: bool(proposed[index]))
    step.sequences[:num_decodes] = [step.sequences[index] for index in order]
    for column in (plan.slots, plan.starts):
        column[:num_decodes] = array("i", [column[index] for index in order])
    lengths = array("i", [1 + len(proposed[index]) for index in order])
    plan.lengths[:num_decodes] = plan.num_samples[:num_decodes] = lengths
    tokens = [(plan.token_ids[index], *proposed[index]) for index in order]
    plan.token_ids[:num_decodes] = array("i", itertools.chain.from_iterable(tokens))
    return found is not None


def _ask(proposer: DraftProposer, sequences: list[Sequence]) -> list[list[int]] | None:
    """Return the drafts that a proposer has for each sequence; None if it fails."""
    try:
        found = proposer.propose(sequences) if sequences else []
        assert len(found) == len(sequences), f"{len(found)} lists of drafts for {len(sequences)} sequences"
    except Exception:
        _log_failure(proposer)
        return None
    return found


def finish_drafts(proposer: DraftProposer, sequence: Sequence) -> bool:
    """Tell a proposer that a sequence has finished, or failed; return whether the proposer works."""
    try:
        if sequence.finish_reason == "error":
            proposer.forget(sequence)
        else:
            proposer.finish(sequence)
    except Exception:
        _log_failure(proposer)
        return False
    return True


def drop_rejected(step: Step, tokens: list[list[int]], pages: ContextPages | None, counts: DraftCounts) -> None:
    """Count the drafts of a completed step, and undo what rejected ones reserved; see ``Scheduler.complete``.

    Sequences keep all ``pages`` if that is None: a drafter on the device writes past them.
    """
    for num_samples, sequence, new in zip(step.plan.num_samples, step.sequences, tokens, strict=True):
        if num_samples <= 1 or sequence.finish_reason is not None:
            continue
        num_accepted = max(len(new), 1) - 1
        counts.num_drafts += 1
        counts.num_tokens += num_samples - 1
        counts.num_accepted.update(range(num_accepted))
        num_rejected = num_samples - 1 - num_accepted
        if not num_rejected:
            continue
        sequence.num_pending -= num_rejected
        if sequence.slot >= 0:
            sequence.num_computed -= num_rejected
            if pages is not None:
                pages.shrink(sequence)


def _reserve(sequence: Sequence, num_drafts: int, step: Step, pages: ContextPages, num_lookahead: int) -> int:
    """Allocate pages for a sequence's drafts and the tokens after them; return how many drafts fit into its pages and
    its maximum length."""
    end = min(sequence.num_computed + num_drafts, sequence.max_length - 1)
    if min(end + num_lookahead, sequence.max_length - 1) > sequence.decode_limit:
        pages.grow_to(sequence, min(end + num_lookahead, sequence.max_length - 1))
        step.plan.grants += pages.grants(sequence)
    return min(end, sequence.decode_limit) - sequence.num_computed


def _log_failure(proposer: DraftProposer) -> None:
    """Log the exception that is handled; the proposer is not asked again."""
    logger.exception("%s failed; speculative decoding is off from now on", type(proposer).__name__)
