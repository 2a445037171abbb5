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
from collections.abc import Sequence as Items

from jaxserve.scheduling.constrained_drafts import constrained_drafts, masked_drafts
from jaxserve.scheduling.context_pages import ContextPages
from jaxserve.scheduling.draft_lengths import DraftLengths, Proposed
from jaxserve.scheduling.draft_passes import DraftPasses, MeasuredStep
from jaxserve.scheduling.draft_states import restore_states
from jaxserve.scheduling.plan import SchedulerLimits
from jaxserve.scheduling.proposers.proposer import DraftProposer
from jaxserve.scheduling.sequence import Constraint, Sequence
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


def add_drafts(
    step: Step,
    num_decodes: int,
    proposer: DraftProposer | None,
    chooser: DraftLengths,
    limits: SchedulerLimits,
    pages: ContextPages,
) -> DraftProposer | None:
    """Add drafts to the decode rows, which are the first ``num_decodes`` rows of a plan, if there is a proposer.

    Drafts use only the query tokens and pages that are left over. Rows with drafts are moved after rows of one token,
    which are cheapest at the front. Return the proposer if it works; if it fails, rows stay without drafts.
    """
    works = proposer is not None and _add_proposed(step, num_decodes, proposer, chooser, limits, pages)
    if pages.states is not None:
        restore_states(step, num_decodes)
    return proposer if works else None


def _add_proposed(
    step: Step,
    num_decodes: int,
    proposer: DraftProposer,
    chooser: DraftLengths,
    limits: SchedulerLimits,
    pages: ContextPages,
) -> bool:
    """Add the drafts of a proposer; return whether it works."""
    budget = limits.max_num_batched_tokens - step.plan.num_tokens - step.num_again
    if limits.max_step_samples is not None:
        budget = min(budget, limits.max_step_samples - step.plan.num_rows)
    sequences = step.sequences[:num_decodes]
    step.is_ahead = any(sequence.num_pending > 1 for sequence in sequences)
    found = _ask(proposer, sequences) if budget > 0 and not step.preempts else []
    if found:
        most = limits.max_draft_tokens
        drafts = [_usable(sequence, tokens, most) for sequence, tokens in zip(sequences, found, strict=True)]
        proposed = [
            Proposed(len(tokens), sequence.constraint is not None, sequence.num_pending > 1)
            for sequence, tokens in zip(sequences, drafts, strict=True)
        ]
        lengths, step.waits = chooser.choose(proposed, budget)
        if any(lengths) or limits.num_lookahead:
            step.proposed = dict(zip(sequences, proposed, strict=True))
            drafts = [tokens[:length] for tokens, length in zip(drafts, lengths, strict=True)]
            masks = _make_masks(sequences, drafts)
            for row, sequence in enumerate(sequences):
                drafts[row] = _reserve(sequence, drafts[row], step, pages)
            for row, made in masks.items():
                step.add_draft_masks(sequences[row].slot, made[: len(drafts[row])])
            if any(drafts):
                _write(step, drafts)
    if chooser.passes is not None:
        _plan_passes(step, chooser.passes, limits)
    return found is not None


def _plan_passes(step: Step, passes: DraftPasses, limits: SchedulerLimits) -> None:
    """Choose how many drafts the device makes after a step, for the next row of each sequence that samples."""
    rows = [each for each, count in zip(step.sequences, step.plan.num_samples, strict=True) if count]
    if any(sequence.constraint is None for sequence in rows):
        budget = min(limits.max_num_batched_tokens, limits.max_step_samples or limits.max_num_batched_tokens)
        step.plan.num_drafts = passes.choose(len(rows), budget - len(rows))
    for sequence in rows:
        sequence.num_next_drafts = step.plan.num_drafts


def _write(step: Step, drafts: list[list[int]]) -> None:
    """Add the drafts of the first rows to a plan, and move those with drafts after those of one token."""
    plan, num_rows = step.plan, len(drafts)
    if not all(drafts):
        order = sorted(range(num_rows), key=lambda row: bool(drafts[row]))
        drafts = [drafts[row] for row in order]
        step.sequences[:num_rows] = [step.sequences[row] for row in order]
        for column in (plan.slots, plan.starts, plan.token_ids):
            column[:num_rows] = array("i", [column[row] for row in order])
    lengths = array("i", [1 + len(tokens) for tokens in drafts])
    plan.lengths[:num_rows] = plan.num_samples[:num_rows] = lengths
    tokens = itertools.chain.from_iterable(
        (first, *others) for first, others in zip(plan.token_ids, drafts, strict=False)
    )
    plan.token_ids[:num_rows] = array("i", tokens)


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


def drop_rejected(
    step: Step, tokens: list[list[int]], pages: ContextPages, counts: DraftCounts, chooser: DraftLengths
) -> None:
    """Count the drafts of a completed step, and undo what rejected ones reserved; see ``Scheduler.complete``."""
    verified = list[tuple[Proposed, int, int]]()
    for num_samples, sequence, new in zip(step.plan.num_samples, step.sequences, tokens, strict=True):
        if num_samples <= 1 or sequence.finish_reason is not None:
            continue
        num_drafts, num_accepted = num_samples - 1, len(new) - 1 if new else 0
        sequence.drafted.append(num_drafts)
        sequence.accepted.append(num_accepted)
        sequence.num_draft_tokens += num_drafts
        sequence.num_accepted_tokens += num_accepted
        verified.append((step.proposed[sequence], num_drafts, num_accepted))
        num_rejected = num_drafts - num_accepted
        if not num_rejected:
            continue
        sequence.num_pending -= num_rejected
        if sequence.slot >= 0:
            sequence.num_computed -= num_rejected
            sequence.restart = sequence.draft_length if sequence.draft_page >= 0 else -1
            pages.shrink(sequence)
    for (proposed, num_drafts, num_accepted), num_rows in collections.Counter(verified).items():
        counts.num_drafts += num_rows
        counts.num_tokens += num_rows * num_drafts
        for position in range(num_accepted):
            counts.num_accepted[position] += num_rows
        chooser.add_row(proposed, num_drafts, num_accepted, num_rows)


def measure_step(step: Step, chooser: DraftLengths) -> None:
    """Measure how long after the tokens before it a step of decode rows alone has completed."""
    plan, passes = step.plan, chooser.passes
    if not (passes or chooser).is_adaptive or not step.previous_s or step.started or not plan.is_decode_only:
        return
    num_rows, num_drafts = plan.num_rows, plan.num_tokens - plan.num_rows
    seconds = step.completed_s - max(step.previous_s)
    if passes is None:
        chooser.add_step(num_rows, step.is_ahead, num_drafts, seconds)
    else:
        passes.add_step(MeasuredStep(plan.number, num_rows, num_drafts, plan.num_drafts, seconds))


def _usable(sequence: Sequence, proposed: list[int], most: int) -> list[int]:
    """Return the drafts that fit into a sequence's maximum length and that its constraint allows, at most ``most``.

    Args:
        sequence: The sequence.
        proposed: What was proposed, from the tokens that steps in flight sample on.
        most: Most drafts.
    """
    num_in_flight = sequence.num_pending - 1  # excludes this row's token
    num_left = sequence.max_length - 1 - sequence.num_computed
    if num_left < most:
        most = num_left
    if sequence.constraint is None:
        return proposed[num_in_flight : num_in_flight + most]
    if sequence.error is not None:
        return []
    drafts = constrained_drafts(sequence, proposed, most)
    sequence.error = drafts.error
    return drafts.token_ids


def _make_masks(sequences: list[Sequence], drafts: list[list[int]]) -> dict[int, Items[bytes | None]]:
    """Return the masks after the drafts of constrained rows; cut drafts after which there is no mask."""
    rows, constrained = list[int](), list[tuple[Constraint, list[int]]]()
    for row, sequence in enumerate(sequences):
        if sequence.constraint is not None and drafts[row]:
            rows.append(row)
            constrained.append((sequence.constraint, drafts[row]))
    masks = dict[int, Items[bytes | None]]()
    for row, found in zip(rows, masked_drafts(constrained), strict=True):
        drafts[row], masks[row], sequences[row].error = found
    return masks


def _reserve(sequence: Sequence, drafts: list[int], step: Step, pages: ContextPages) -> list[int]:
    """Return the drafts that fit into a sequence's pages, and reserve these."""
    start = sequence.num_computed
    end = start + len(drafts)
    if end + pages.num_lookahead > sequence.decode_limit:
        pages.grow_to(sequence, pages.with_lookahead(sequence, end))
        step.plan.grants += pages.grants(sequence)
        if end > sequence.decode_limit:
            end = sequence.decode_limit
            drafts = drafts[: end - start]
    sequence.num_computed = end
    sequence.num_pending += len(drafts)
    return drafts


def _log_failure(proposer: DraftProposer) -> None:
    """Log the exception that is handled; the proposer is not asked again."""
    logger.exception("%s failed; speculative decoding is off from now on", type(proposer).__name__)
