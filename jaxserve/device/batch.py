"""From a plan to the buffer of a step: the only padding code.

Facts of a slot are kept here between steps, since plans name them only when they change.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from jaxserve.device.sampler_batch import FLOATS, SLOT_NUMBERS
from jaxserve.device.step_batch import BatchShape
from jaxserve.scheduling.plan import RowColumns, RowStarts, Sampling, StepPlan, row_arrays

_NEVER = np.iinfo(np.int32).max


class BatchBuilder:
    """Facts of every slot, and the arrays of a step made from them and a plan.

    Args:
        num_slots: Sequences that can run at once.
        table_pages: M, pages of the longest context.
        page_size: Tokens per page.
        num_pages: Usable pages; the null page follows them.
        neutral_arguments: What the engine's logits processors read of requests that give them nothing.
        num_tables: Page tables of each slot.
    """

    def __init__(
        self,
        num_slots: int,
        table_pages: int,
        page_size: int,
        num_pages: int,
        neutral_arguments: Sequence[float] = (),
        num_tables: int = 1,
    ):
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.neutral_arguments = tuple(neutral_arguments)
        self.starts = RowStarts(num_slots)
        self.page_tables = np.full((num_tables, num_slots, table_pages), num_pages, np.int32)
        self.lengths = np.zeros(num_slots, np.int32)
        self.numbers = np.zeros((len(SLOT_NUMBERS) + len(self.neutral_arguments), num_slots), np.int32)
        floats = self.numbers.view(np.float32)
        self._lines = {name: (floats if name in FLOATS else self.numbers)[i] for i, name in enumerate(SLOT_NUMBERS)}
        self._arguments = floats[len(SLOT_NUMBERS) :]
        self._set_numbers(0, Sampling())
        self._neutral = self.numbers[:, :1].copy()
        self.numbers[...] = self._neutral
        self.is_random = np.zeros(num_slots, bool)
        self.needs_full = np.zeros(num_slots, bool)
        self.counted_from = np.full(num_slots, _NEVER, np.int32)
        self._paddings: dict[BatchShape, np.ndarray] = {}

    def apply(self, plan: StepPlan) -> None:
        """Takes over what the plan says of slots."""
        for slot, sampling, final_length, token_ids, _ in plan.setups:
            self.page_tables[:, slot] = self.num_pages
            self.lengths[slot] = final_length
            self._set_numbers(slot, sampling)
            has_penalties = sampling.has_penalties
            self.is_random[slot] = sampling.options.temperature > 0
            self.counted_from[slot] = len(token_ids) if has_penalties else _NEVER
            self.needs_full[slot] = (
                sampling.num_logprobs >= 0
                or sampling.changes_logits
                or len(sampling.tracked_ids) > 0
                or sampling.arguments not in ((), self.neutral_arguments)
            )
        for slot, first, pages, table in plan.grants:
            self.page_tables[table, slot, first : first + len(pages)] = pages

    def build(self, plan: StepPlan, shape: BatchShape, variant: int) -> np.ndarray:
        """The step's buffer, int32, padded to ``shape``."""
        buffer = self._padding(shape).copy()
        views = _views(buffer, shape)
        columns, num_rows, num_tokens = plan.columns, plan.num_rows, plan.num_tokens
        slots, first, lengths, num_samples, _ = row_arrays(columns)
        starts = self.starts.advance(plan)
        ends = lengths.cumsum()
        views["tokens"][:num_tokens] = list(itertools.chain.from_iterable(columns.token_ids))
        views["token_rows"][:num_tokens] = np.arange(num_rows).repeat(lengths)
        views["page_tables"][:, :num_rows] = self.page_tables[:, slots]
        views["starts"][:num_rows] = first
        views["row_limits"][:num_rows] = self.lengths[slots]
        views["query_starts"][:num_rows] = ends - lengths
        views["query_lens"][:num_rows] = lengths
        if shape.max_samples > 1:
            _fill_samples(views, np.maximum(num_samples, 1), ends)
        else:
            views["sampled_tokens"][:num_rows] = ends - 1
        views["slots"][:num_rows] = slots
        views["sampled_slots"][:num_rows] = np.where(num_samples, slots, self.num_slots)
        views["counted_slots"][:num_rows] = np.where(starts >= self.counted_from[slots], slots, self.num_slots)
        num_single = num_rows if num_tokens == num_rows else int((lengths != 1).argmax())
        single = slots[:num_single], starts[:num_single]
        views["num_shared_pages"][...] = [self._num_shared_pages(table, *single) for table in self.page_tables]
        if any(columns.targets):
            self._fill_targets(views, columns, ends.tolist())
        if any(columns.pooling):
            self._fill_pooling(views, columns, ends.tolist())
        start, stop, size, _ = shape.slot_numbers
        buffer[start:stop].reshape(size)[:, :num_rows] = self.numbers[:, slots]
        views["num_rows"][...] = num_rows
        views["variant"][...] = variant
        return buffer

    def variant(self, plan: StepPlan, is_masked: bool = False) -> str:
        """The simplest sampler that does what every row asks for; ``is_masked``: a row may not sample every token."""
        rows = row_arrays(plan.columns)
        slots = rows.slots[rows.num_samples > 0]
        if is_masked or self.needs_full[slots].any():
            return "full"
        return "sampled" if self.is_random[slots].any() else "greedy"

    def _set_numbers(self, slot: int, sampling: Sampling) -> None:
        """A slot's part of the buffer."""
        arguments = sampling.arguments or self.neutral_arguments
        assert len(arguments) == len(self.neutral_arguments), "as many arguments as the logits processors read"
        seed = sampling.seed if sampling.seed < 1 << 31 else sampling.seed - (1 << 32)
        self._lines["seeds"][slot] = seed
        for name, value in sampling.options._asdict().items():
            self._lines[name][slot] = value
        self._arguments[:, slot] = arguments

    def _padding(self, shape: BatchShape) -> np.ndarray:
        """A buffer of empty rows and padding tokens."""
        if shape not in self._paddings:
            buffer = np.zeros(shape.buffer_size, np.int32)
            views = _views(buffer, shape)
            views["token_rows"][...] = shape.num_rows
            views["targets"][...] = -1
            views["page_tables"][...] = self.num_pages
            views["slots"][...] = self.num_slots
            views["sampled_slots"][...] = self.num_slots
            views["counted_slots"][...] = self.num_slots
            views["query_starts"][...] = shape.num_tokens
            views["pooled_from"][...] = shape.num_tokens
            views["carried_slots"][...] = self.num_slots
            if shape.max_samples > 1:
                views["sample_rows"][...] = shape.num_rows
            start, stop, size, _ = shape.slot_numbers
            buffer[start:stop].reshape(size)[...] = self._neutral
            self._paddings[shape] = buffer
        return self._paddings[shape]

    def _num_shared_pages(self, page_table: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> int:
        """Return the number of leading pages that all rows of one token have in common in a table, full in each."""
        num_full = int(positions.min() + 1) // self.page_size if len(slots) else 0
        if not num_full or (page_table[slots, 0] != page_table[slots[0], 0]).any():
            return 0  # nearly always
        table = page_table[slots, :num_full]
        differs = (table != table[0]).any(0)
        return int(differs.argmax()) if differs.any() else num_full

    def _fill_targets(self, views: dict[str, np.ndarray], columns: RowColumns, ends: list[int]) -> None:
        for targets, end in zip(columns.targets, ends, strict=True):
            if targets is not None:
                views["targets"][end - len(targets) : end] = targets
                views["num_target_tokens"][...] = end

    def _fill_pooling(self, views: dict[str, np.ndarray], columns: RowColumns, ends: list[int]) -> None:
        for row, (pooling, end) in enumerate(zip(columns.pooling, ends, strict=True)):
            if pooling is not None:
                views["pooled_from"][row] = end - pooling.num_tokens
                if not pooling.is_first:
                    views["carried_slots"][row] = columns.slots[row]


def _fill_samples(views: dict[str, np.ndarray], counts: np.ndarray, ends: np.ndarray) -> None:
    """Where samples come from: ``counts`` of each row, after the last of its query tokens, which end at ``ends``."""
    sample_ends = counts.cumsum()
    num_samples = int(sample_ends[-1])
    views["sample_rows"][:num_samples] = np.arange(len(counts)).repeat(counts)
    views["sampled_tokens"][:num_samples] = (ends - sample_ends).repeat(counts) + np.arange(num_samples)
    views["num_samples"][...] = num_samples


def _views(buffer: np.ndarray, shape: BatchShape) -> dict[str, np.ndarray]:
    """The arrays in a buffer."""
    floats = buffer.view(np.float32)
    return {
        name: (floats if field.is_float else buffer)[field.start : field.stop].reshape(field.shape)
        for name, field in shape.fields.items()
    }
