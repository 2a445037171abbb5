"""What the host knows of the slots of one lane: their pages, sampling parameters and token masks.

Plans carry a slot's parameters and pages only when they change, so they are kept here between steps.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.device.runner_interface import RowError
from jaxserve.device.sampler_batch import FLOAT_FIELDS, SLOT_PARAMS
from jaxserve.device.state_updates import slot_row
from jaxserve.device.step_batch import BatchShape
from jaxserve.scheduling.plan import Sampling, SlotSetup, StepPlan
from jaxserve.scheduling.row_starts import RowStarts, as_array

_NEVER = np.iinfo(np.int32).max


class Slots:
    """The slots of one lane, from which ``batch.build`` makes the buffers of steps.

    Args:
        num_slots: Number of slots.
        table_pages: M, pages of the longest context.
        page_size: Tokens per page.
        num_pages: Usable pages; the null page follows them.
        vocab_size: Number of tokens of the vocabulary.
        default_arguments: Default arguments of the logits processors.
        num_tables: Number of page tables per slot.

    Attributes:
        starts: Position of each slot's next row.
        page_tables: Pages of each slot in each page table, in order.
        state_pages: State page of each slot; of no meaning for a model without recurrent layers.
        lengths: Most tokens that each slot's request can reach.
        params: Sampling parameters of each slot, a row for each of ``SLOT_PARAMS`` and each argument.
        default_params: Those of a slot without a request.
        counted_from: Position from which each slot's tokens count for penalties.
        masks: Masks of the tokens that each slot may sample.
        failed: Why the inputs of a slot's rows could not be built. Its rows run without them, and the others are not
            affected.
        paddings: The buffer of an empty step of each shape; see ``batch.build``.
    """

    def __init__(
        self,
        num_slots: int,
        table_pages: int,
        page_size: int,
        num_pages: int,
        vocab_size: int,
        default_arguments: Sequence[float] = (),
        num_tables: int = 1,
    ):
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.starts = RowStarts(num_slots)
        self.page_tables = np.full((num_tables, num_slots, table_pages), num_pages, np.int32)
        self.state_pages = np.arange(num_slots, dtype=np.int32)
        self.lengths = np.zeros(num_slots, np.int32)
        self._default_arguments = tuple(default_arguments)
        self.params = np.zeros((len(SLOT_PARAMS) + len(self._default_arguments), num_slots), np.int32)
        floats = self.params.view(np.float32)
        self._param_rows = {
            name: (floats if name in FLOAT_FIELDS else self.params)[i] for i, name in enumerate(SLOT_PARAMS)
        }
        self._arguments = floats[len(SLOT_PARAMS) :]
        self._set_params(0, Sampling())
        self.default_params = self.params[:, :1].copy()
        self.params[...] = self.default_params
        self._is_random = np.zeros(num_slots, bool)
        self._needs_full = np.zeros(num_slots, bool)
        self.counted_from = np.full(num_slots, _NEVER, np.int32)
        self.masks = TokenMasks(vocab_size)
        self._vocab_size = vocab_size
        self._special: set[int] = set()  # slots whose last request was not simple
        self._biased: set[int] = set()  # those that may have a bias on the device
        self.failed: dict[int, Exception] = {}
        self.paddings: dict[BatchShape, np.ndarray] = {}

    def apply(self, plan: StepPlan) -> list[np.ndarray]:
        """Apply a plan's slot assignments and page table updates; return the rows of slots (see ``slot_row``) to write
        on the device.

        A slot that cannot be set up as planned gets neutral parameters, and its rows fail; see ``errors``.
        """
        rows: list[np.ndarray] = []
        for setup in plan.setups:
            self.failed.pop(setup.slot, None)
            try:
                row = self._set_up(setup)
            except Exception as error:
                self._special.add(setup.slot)
                self._biased.add(setup.slot)
                row = self._set_up(setup._replace(sampling=Sampling(), token_ids=(), num_prompt_tokens=0))
                self.failed[setup.slot] = error
            if row is not None:
                rows.append(row)
        for slot, first, pages, table in plan.grants:
            self.page_tables[table, slot, first : first + len(pages)] = pages
        return rows

    def variant(self, plan: StepPlan, is_masked: bool = False) -> str:
        """Return the simplest sampler variant that supports every row; ``is_masked`` if a row has a token mask."""
        slots = as_array(plan.slots)[as_array(plan.num_samples) > 0]
        if is_masked or self._needs_full[slots].any():
            return "full"
        return "sampled" if self._is_random[slots].any() else "greedy"

    def errors(self, plan: StepPlan) -> tuple[RowError, ...]:
        """Return the rows of a plan whose inputs could not be built."""
        failed = self.failed
        return tuple(RowError(row, failed[slot]) for row, slot in enumerate(plan.slots) if slot in failed)

    def masked_samples(self, plan: StepPlan) -> list["MaskedSample"]:
        """Return the samples of a plan that may not be every token."""
        return self.masks.samples(plan, self.starts, self.failed)

    @contextlib.contextmanager
    def alone(self, slot: int) -> Iterator[None]:
        """Let an exception in the block fail this slot's rows only."""
        try:
            yield
        except Exception as error:
            self.failed[slot] = error

    def _set_up(self, setup: SlotSetup) -> np.ndarray | None:
        """Assign a slot; return its row if it must be written: its request uses it, or the previous one did."""
        slot, sampling = setup.slot, setup.sampling
        self.page_tables[:, slot] = self.num_pages
        self.state_pages[slot] = max(setup.state_page, 0)
        self.lengths[slot] = setup.final_length
        self._set_params(slot, sampling)
        self._is_random[slot] = sampling.options.temperature > 0
        if sampling.is_simple and slot not in self._special:
            return None
        return self._set_up_special(setup)

    def _set_up_special(self, setup: SlotSetup) -> np.ndarray | None:
        """Set what only requests that are not simple need, and what one of them has left; return the slot's row."""
        slot, sampling = setup.slot, setup.sampling
        self.counted_from[slot] = len(setup.token_ids) if sampling.has_penalties else _NEVER
        self._needs_full[slot] = (
            sampling.num_logprobs >= 0
            or sampling.changes_logits
            or len(sampling.tracked_ids) > 0
            or sampling.arguments not in ((), self._default_arguments)
        )
        self.masks.apply([setup])
        is_needed = slot in self._biased or bool(sampling.logit_bias or sampling.tracked_ids)
        row = slot_row(setup, self._vocab_size) if is_needed or sampling.has_penalties else None
        for slots, is_member in ((self._special, not sampling.is_simple), (self._biased, bool(sampling.logit_bias))):
            if is_member:
                slots.add(slot)
            else:
                slots.discard(slot)
        return row

    def _set_params(self, slot: int, sampling: Sampling) -> None:
        """Store a slot's sampling parameters."""
        seed = sampling.seed if sampling.seed < 1 << 31 else sampling.seed - (1 << 32)
        self._param_rows["seeds"][slot] = seed
        for name, value in sampling.options._asdict().items():
            self._param_rows[name][slot] = value
        if self._default_arguments:
            arguments = sampling.arguments or self._default_arguments
            assert len(arguments) == len(self._default_arguments), "wrong number of logits processor arguments"
            self._arguments[:, slot] = arguments


class _SlotMask(NamedTuple):
    """A slot's masks before and from position ``banned_until``; None allows all tokens."""

    early: np.ndarray | None
    late: np.ndarray | None
    banned_until: int


class MaskedSample(NamedTuple):
    """A sample that may not be every token, by its index in the step, and its mask: int32 [V / 32]."""

    sample: int
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

    def samples(self, plan: StepPlan, starts: RowStarts, failed: dict[int, Exception]) -> list[MaskedSample]:
        """Return the samples of a plan that may not be every token.

        Samples of a row whose masks cannot be made are left out, and its slot is added to ``failed`` with the
        exception.
        """
        if not self._slots and not plan.masks:
            return []
        constrained = dict[int, dict[int, bytes]]()
        for slot, words, sample in plan.masks:
            constrained.setdefault(slot, {})[sample] = words
        masked = self._slots.keys() | constrained.keys()
        samples = list[MaskedSample]()
        ends = (starts.of(plan) + as_array(plan.lengths)).tolist()
        columns = zip(plan.slots, plan.num_samples, plan.first_samples, ends, strict=True)
        for slot, num_samples, first, end in columns:
            if num_samples and slot in masked:
                try:
                    rows = self._row_words(slot, range(end - num_samples + 1, end + 1), constrained.get(slot, {}))
                    samples += map(MaskedSample, range(first, first + num_samples), rows)
                except Exception as error:
                    failed[slot] = error
        return [sample for sample in samples if sample.words is not self._all]

    def array(self, samples: Sequence[MaskedSample], num_samples: int) -> np.ndarray:
        """Return the masks of all samples of a step: int32 [num_samples, V / 32]."""
        mask = np.full((num_samples, self._words), -1, np.int32)
        for sample, words in samples:
            mask[sample] = words
        return mask

    def _row_words(self, slot: int, positions: Sequence[int], constrained: Mapping[int, bytes]) -> list[np.ndarray]:
        """Return the masks of a row.

        Args:
            slot: The row's slot.
            positions: Positions of its sampled tokens.
            constrained: Masks of its constraint by sample.
        """
        own = self._slots.get(slot)
        return [
            self._combined(
                None if own is None else own.early if position < own.banned_until else own.late, constrained.get(sample)
            )
            for sample, position in enumerate(positions)
        ]

    def _combined(self, words: np.ndarray | None, constrained: bytes | None) -> np.ndarray:
        """Return a static mask together with a constraint's; None allows all."""
        if constrained is None:
            return self._all if words is None else words
        constraint = np.frombuffer(constrained, np.int32)[: self._words]
        if len(constraint) < self._words:
            constraint = np.pad(constraint, (0, self._words - len(constraint)))
        if words is None:
            return constraint
        both = constraint & words
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
