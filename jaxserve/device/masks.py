"""Bit masks of the tokens that each slot may sample."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.scheduling.plan import Sampling, SlotSetup, StepPlan
from jaxserve.scheduling.row_starts import RowStarts, as_array


class _SlotMask(NamedTuple):
    """A slot's masks before and from position ``banned_until``; None allows all tokens."""

    early: np.ndarray | None
    late: np.ndarray | None
    banned_until: int


class MaskedRow(NamedTuple):
    """A row that may not sample every token, and its mask: int32 [V / 32]."""

    row: int
    words: np.ndarray


class TokenMasks:
    """Combines the static masks of slots with the constraint masks of a plan.

    If the static mask of a request leaves no token, the tokens banned until ``min_tokens`` are allowed, then bad words
    too. If the static and the constraint mask together leave no token, only the constraint mask applies.
    """

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._all = self._pack(np.ones(vocab_size, bool))
        self._slots: dict[int, _SlotMask] = {}

    @property
    def has_static_masks(self) -> bool:
        """Whether any slot has a static mask."""
        return bool(self._slots)

    def apply(self, setups: Iterable[SlotSetup]) -> None:
        """Set the static masks of newly assigned slots."""
        for setup in setups:
            sampling = setup.sampling
            if sampling.banned_ids or sampling.bad_ids or sampling.allowed_ids is not None:
                self._slots[setup.slot] = self._slot_mask(sampling)
            else:
                self._slots.pop(setup.slot, None)

    def rows(self, plan: StepPlan, starts: RowStarts, failed: dict[int, Exception] | None = None) -> list[MaskedRow]:
        """Return the sampling rows of a plan that may not sample every token.

        A row whose mask cannot be made is left out, and its slot is added to ``failed`` with the exception; without
        ``failed`` the exception is raised.
        """
        if not self._slots and not plan.masks:
            return []
        constrained = {mask.slot: mask.words for mask in plan.masks}
        masked = self._slots.keys() | constrained.keys()
        found = []
        last_positions = (starts.of(plan) + as_array(plan.lengths) - 1).tolist()
        rows = zip(plan.slots, plan.num_samples, last_positions, strict=True)
        for index, (slot, num_samples, position) in enumerate(rows):
            if num_samples and slot in masked:
                try:
                    found.append(MaskedRow(index, self._row_words(slot, position, constrained)))
                except Exception as error:
                    if failed is None:
                        raise
                    failed[slot] = error
        return [row for row in found if row.words is not self._all]

    def array(self, rows: Sequence[MaskedRow], num_rows: int) -> np.ndarray:
        """Return the masks of all rows of a step: int32 [num_rows, V / 32]."""
        mask = np.full((num_rows, self._words), -1, np.int32)
        for row, words in rows:
            mask[row] = words
        return mask

    def _row_words(self, slot: int, position: int, constrained: dict[int, bytes]) -> np.ndarray:
        own = self._slots.get(slot)
        words = None
        if own is not None:
            words = own.early if position + 1 < own.banned_until else own.late
        if slot not in constrained:
            return self._all if words is None else words
        given = np.frombuffer(constrained[slot], np.int32)[: self._words]
        constraint = np.zeros(self._words, np.int32)
        constraint[: len(given)] = given
        both = constraint & (self._all if words is None else words)
        return both if both.any() else constraint

    def _slot_mask(self, sampling: Sampling) -> _SlotMask:
        late = np.ones(self._vocab_size, bool)
        if sampling.allowed_ids is not None:
            late[:] = False
            late[list(sampling.allowed_ids)] = True
        late = _without(late, sampling.bad_ids)
        early = _without(late, sampling.banned_ids)
        return _SlotMask(self._pack(early), None if late.all() else self._pack(late), sampling.banned_until)

    def _pack(self, allowed: np.ndarray) -> np.ndarray:
        padded = np.zeros(self._words * 32, bool)
        padded[: self._vocab_size] = allowed
        return np.packbits(padded, bitorder="little").view(np.int32)


def _without(allowed: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """Return ``allowed`` without some tokens, or unchanged if no token would be left."""
    fewer = allowed.copy()
    fewer[list(token_ids)] = False
    return fewer if fewer.any() else allowed
