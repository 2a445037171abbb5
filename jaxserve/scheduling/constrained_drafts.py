"""Choose the drafts of rows with a constraint, and make the token mask after each of them."""

from collections.abc import Sequence as Items
from typing import NamedTuple

from jaxserve.api.errors import own_failure
from jaxserve.scheduling.endings import constraint_failure
from jaxserve.scheduling.sequence import Constraint, Sequence


class ConstrainedDrafts(NamedTuple):
    """Drafts that a constraint allows.

    Attributes:
        token_ids: The drafts.
        masks: Mask of the token after each draft (see ``SlotMask``); None allows all.
        error: Why the constraint could not return to its state, which fails the sequence.
    """

    token_ids: list[int]
    masks: list[bytes | None]
    error: Exception | None = None


def constrained_drafts(sequence: Sequence, proposed: Items[int], most: int) -> ConstrainedDrafts:
    """Return the drafts that follow a sequence's last token, of which the host knows all.

    They are the proposed ones until one is not allowed or ends the sequence. Tokens that the constraint forces are
    drafts by themselves, and replace proposed ones that differ. The constraint returns to its state.

    Args:
        sequence: The sequence, which has a constraint.
        proposed: Proposed drafts.
        most: Most drafts.
    """
    constraint, found = sequence.constraint, ConstrainedDrafts([], [])
    assert constraint is not None
    try:
        state = constraint.save()
        try:
            _follow(sequence, constraint, [*proposed], most, found)
        except BaseException as error:
            own_failure(error)  # where the constraint fails, the drafts end: it may never get there
        constraint.restore(state)
    except BaseException as error:  # a failing constraint must not stop the other sequences
        return ConstrainedDrafts([], [], constraint_failure(error))
    return found


def _follow(sequence: Sequence, constraint: Constraint, ahead: list[int], most: int, found: ConstrainedDrafts) -> None:
    """Advance a constraint by the tokens ``ahead`` and those that it forces; add the drafts to ``found``."""
    mask, num_forced = constraint.mask(), 0
    for index in range(most):
        if index >= num_forced:
            forced = constraint.forced()
            num_forced = index + len(forced)
            if ahead[index:num_forced] != forced:
                ahead[index:] = forced
        if index >= len(ahead):
            return
        token, length = ahead[index], len(sequence.token_ids) + index + 1
        is_last = token in sequence.stop_ids and length >= sequence.min_length
        if is_last or not _allows(mask, token) or constraint.accept(token):
            return
        mask = constraint.mask()
        found.token_ids.append(token)
        found.masks.append(mask)


def _allows(mask: bytes | None, token: int) -> bool:
    return mask is None or bool(mask[token >> 3] >> (token & 7) & 1)
