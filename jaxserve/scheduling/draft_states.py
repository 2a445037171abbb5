"""Take rejected drafts out of the states of recurrent layers, which every token of a row overwrites.

A row with drafts also writes the state after the tokens before them, to a page of its own (``Sequence.draft_page``).
If all drafts are accepted, the state that the row left is right. If not, that page is copied back before the next row
of the sequence, which begins with the accepted drafts. The host knows all tokens then: such a model's steps are not
planned ahead.
"""

from array import array
from collections.abc import MutableSequence
from typing import NamedTuple

from jaxserve.scheduling.plan import PageCopy, StateSnapshot
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.step import Step


class _Row(NamedTuple):
    """A decode row with its drafts."""

    sequence: Sequence
    slot: int
    start: int
    token_ids: MutableSequence[int]
    num_samples: int


def restore_states(step: Step, num_rows: int) -> None:
    """Let the decode rows, the first ``num_rows`` of a plan, go on from the states of accepted tokens alone.

    Rows with further tokens follow those of one token, which are cheapest at the front.
    """
    plan, rows, first = step.plan, list[_Row](), 0
    for index, sequence in enumerate(step.sequences[:num_rows]):
        length, start = plan.lengths[index], plan.starts[index]
        assert start >= 0, "a step was planned ahead of drafts"
        token_ids = plan.token_ids[first : first + length]
        first += length
        if sequence.restart >= 0:
            plan.state_copies.append(PageCopy(sequence.draft_page, sequence.state_page))
            token_ids = array("i", sequence.token_ids[sequence.restart : start]) + array("i", token_ids)
            start, sequence.restart = sequence.restart, -1
        rows.append(_Row(sequence, plan.slots[index], start, token_ids, plan.num_samples[index]))
    if all(len(row.token_ids) == 1 for row in rows):
        return
    rows.sort(key=lambda row: len(row.token_ids) > 1)
    step.sequences[:num_rows] = [row.sequence for row in rows]
    plan.slots[:num_rows] = array("i", [row.slot for row in rows])
    plan.starts[:num_rows] = array("i", [row.start for row in rows])
    plan.lengths[:num_rows] = array("i", [len(row.token_ids) for row in rows])
    plan.num_samples[:num_rows] = array("i", [row.num_samples for row in rows])
    plan.token_ids[:first] = array("i", [token for row in rows for token in row.token_ids])
    for index, row in enumerate(rows):
        num_certain = len(row.token_ids) - row.num_samples + 1
        if row.num_samples > 1:
            row.sequence.draft_length = row.start + num_certain
            plan.snapshots.append(StateSnapshot(index, num_certain, row.sequence.draft_page))
