"""Choose the drafts of rows with a constraint, and make the token mask after each of them."""

from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from jaxserve.api.errors import own_failure
from jaxserve.scheduling.endings import constraint_failure
from jaxserve.scheduling.sequence import BatchedConstraint, Constraint, Sequence


class ConstrainedDrafts(NamedTuple):
    """Drafts that a constraint allows.

    Attributes:
        token_ids: The drafts.
        masks: Mask of the token after each draft (see ``SlotMask``); None allows all. Empty until they are made.
        error: Why the constraint could not return to its state, which fails the sequence.
    """

    token_ids: list[int]
    masks: Items[bytes | None] = ()
    error: Exception | None = None


def constrained_drafts(sequence: Sequence, proposed: Items[int], most: int) -> ConstrainedDrafts:
    """Return the drafts that follow a sequence's last token, of which the host knows all, without their masks.

    They are the proposed ones until one is not allowed or ends the sequence. Tokens that the constraint forces are
    drafts by themselves, and replace proposed ones that differ. The constraint returns to its state.

    Args:
        sequence: The sequence, which has a constraint.
        proposed: Proposed drafts.
        most: Most drafts.
    """
    constraint, found = sequence.constraint, list[int]()
    assert constraint is not None
    try:
        state = constraint.save()
        try:
            _follow(sequence, constraint, [*proposed], most, found)
        except BaseException as error:
            own_failure(error)  # where the constraint fails, the drafts end: it may never get there
        constraint.restore(state)
    except BaseException as error:  # a failing constraint must not stop the other sequences
        return ConstrainedDrafts([], error=constraint_failure(error))
    return ConstrainedDrafts(found)


def masked_drafts(rows: Items[tuple[Constraint, list[int]]]) -> list[ConstrainedDrafts]:
    """Return the drafts of rows with their masks, up to the first draft after which there is no mask.

    Args:
        rows: For each row its constraint, which returns to its state, and drafts that it allows.
    """
    together: dict[type[Constraint], list[int]] = {}
    for index, (constraint, tokens) in enumerate(rows):
        if tokens:
            together.setdefault(type(constraint), []).append(index)
    found = [ConstrainedDrafts([])] * len(rows)
    for kind, indices in together.items():
        members: list[tuple[Any, list[int]]] = [rows[index] for index in indices]
        is_batched = issubclass(kind, BatchedConstraint)
        masks = kind.masks_after(members) if is_batched else [None] * len(members)
        for index, made in zip(indices, masks, strict=True):
            constraint, tokens = rows[index]
            found[index] = _masked(constraint, tokens) if made is None else ConstrainedDrafts(tokens, made)
    return found


def _masked(constraint: Constraint, tokens: list[int]) -> ConstrainedDrafts:
    """Make the masks of one row."""
    masks = list[bytes | None]()
    try:
        state = constraint.save()
        try:
            for token in tokens:
                constraint.accept(token)
                masks.append(constraint.mask())
        except BaseException as error:
            own_failure(error)
        constraint.restore(state)
    except BaseException as error:
        return ConstrainedDrafts([], error=constraint_failure(error))
    return ConstrainedDrafts(tokens[: len(masks)], masks)


def _follow(sequence: Sequence, constraint: Constraint, ahead: list[int], most: int, found: list[int]) -> None:
    """Advance a constraint by the tokens ``ahead`` and those that it forces; add the drafts to ``found``."""
    num_forced = 0
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
        if is_last or not constraint.allows(token) or constraint.accept(token):
            return
        found.append(token)
