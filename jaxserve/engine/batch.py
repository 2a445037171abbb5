"""From a plan to the buffer of a step: the only padding code.

Facts of a slot are kept here between steps, since plans name them only when they change.
"""

from collections.abc import Sequence

import numpy as np

from jaxserve.engine.plan import Sampling, StepPlan
from jaxserve.engine.step_batch import SLOT_NUMBERS, BatchShape

_NEVER = np.iinfo(np.int32).max


class BatchBuilder:
    """Facts of every slot, and the arrays of a step made from them and a plan.

    Args:
        num_slots: Sequences that can run at once.
        table_pages: M, pages of the longest context.
        page_size: Tokens a page.
        num_pages: Usable pages; the null page is the one behind them.
        neutral_arguments: What the engine's logits processors read of requests that give them nothing.
    """

    def __init__(
        self,
        num_slots: int,
        table_pages: int,
        page_size: int,
        num_pages: int,
        neutral_arguments: Sequence[float] = (),
    ):
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.neutral_arguments = tuple(neutral_arguments)
        self.page_table = np.full((num_slots, table_pages), num_pages, np.int32)
        self.lengths = np.zeros(num_slots, np.int32)
        self.numbers = np.zeros((len(SLOT_NUMBERS) + len(self.neutral_arguments), num_slots), np.int32)
        self._floats = self.numbers.view(np.float32)
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
            self.page_table[slot] = self.num_pages
            self.lengths[slot] = final_length
            self._set_numbers(slot, sampling)
            has_penalties = sampling.has_penalties
            self.is_random[slot] = sampling.temperature > 0
            self.counted_from[slot] = len(token_ids) if has_penalties else _NEVER
            self.needs_full[slot] = (
                sampling.num_logprobs >= 0
                or has_penalties
                or len(sampling.logit_bias) + len(sampling.tracked_ids) > 0
                or sampling.arguments not in ((), self.neutral_arguments)
            )
        for slot, first, pages in plan.grants:
            self.page_table[slot, first : first + len(pages)] = pages

    def build(self, plan: StepPlan, shape: BatchShape, variant: int) -> np.ndarray:
        """The step's buffer, int32, padded to ``shape``."""
        buffer = self._padding(shape).copy()
        views = _views(buffer, shape)
        num_decode, num_rows = len(plan.decode_slots), plan.num_rows
        slots = np.array(plan.decode_slots + [row.slot for row in plan.prefill], np.int32)
        if num_decode:
            self._fill_decode(views, plan, slots[:num_decode])
        self._fill_prefill(views, plan, num_decode)
        views["slots"][:num_rows] = slots
        views["page_table"][:num_rows] = self.page_table[slots]
        start, stop, size, _ = shape.slot_numbers
        buffer[start:stop].reshape(size)[:, :num_rows] = self.numbers[:, slots]
        views["num_decode"][...] = num_decode
        views["num_rows"][...] = num_rows
        views["variant"][...] = variant
        return buffer

    def variant(self, plan: StepPlan, is_masked: bool = False) -> str:
        """The simplest sampler that does what every row asks for; ``is_masked``: a row may not sample every token."""
        slots = plan.decode_slots + [row.slot for row in plan.prefill if row.samples]
        if is_masked or self.needs_full[slots].any():
            return "full"
        return "sampled" if self.is_random[slots].any() else "greedy"

    def _set_numbers(self, slot: int, sampling: Sampling) -> None:
        """A slot's part of the buffer, in the order of ``SLOT_NUMBERS``."""
        arguments = sampling.arguments or self.neutral_arguments
        assert len(arguments) == len(self.neutral_arguments), "as many arguments as the logits processors read"
        seed = sampling.seed if sampling.seed < 1 << 31 else sampling.seed - (1 << 32)
        self.numbers[:2, slot] = (sampling.top_k, seed)
        self._floats[2:, slot] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
            *arguments,
        )

    def _padding(self, shape: BatchShape) -> np.ndarray:
        """A buffer of empty rows and padding tokens."""
        if shape not in self._paddings:
            buffer = np.zeros(shape.buffer_size, np.int32)
            views = _views(buffer, shape)
            views["token_pages"][...] = self.num_pages + 1
            views["targets"][...] = -1
            views["page_table"][...] = self.num_pages
            views["slots"][...] = self.num_slots
            views["sampled_slots"][...] = self.num_slots
            views["counted_slots"][...] = self.num_slots
            views["query_starts"][...] = shape.num_tokens
            views["pooled_from"][...] = shape.num_tokens
            views["carried_slots"][...] = self.num_slots
            start, stop, size, _ = shape.slot_numbers
            buffer[start:stop].reshape(size)[...] = self._neutral
            self._paddings[shape] = buffer
        return self._paddings[shape]

    def _fill_decode(self, views: dict[str, np.ndarray], plan: StepPlan, slots: np.ndarray) -> None:
        num_decode = len(slots)
        positions = np.array(plan.decode_positions, np.int32)
        views["tokens"][:num_decode] = plan.decode_tokens
        views["positions"][:num_decode] = positions
        views["lengths"][:num_decode] = self.lengths[slots]
        views["token_pages"][:num_decode] = self.page_table[slots, positions // self.page_size]
        views["token_offsets"][:num_decode] = positions % self.page_size
        views["context_lens"][:num_decode] = positions + 1
        views["query_starts"][:num_decode] = views["sampled_tokens"][:num_decode] = np.arange(num_decode)
        views["query_lens"][:num_decode] = 1
        views["sampled_slots"][:num_decode] = slots
        views["num_shared_pages"][...] = self._num_shared_pages(slots, positions)
        views["counted_slots"][:num_decode] = np.where(positions >= self.counted_from[slots], slots, self.num_slots)

    def _num_shared_pages(self, slots: np.ndarray, positions: np.ndarray) -> int:
        """Leading pages that all rows have in common, full in each."""
        num_full = int(positions.min() + 1) // self.page_size
        if not num_full or (self.page_table[slots, 0] != self.page_table[slots[0], 0]).any():
            return 0  # nearly always
        table = self.page_table[slots, :num_full]
        differs = (table != table[0]).any(0)
        return int(differs.argmax()) if differs.any() else num_full

    def _fill_prefill(self, views: dict[str, np.ndarray], plan: StepPlan, first_row: int) -> None:
        start = first_row
        for i, row in enumerate(plan.prefill, first_row):
            count = len(row.token_ids)
            span = slice(start, start + count)
            positions = np.arange(row.start, row.start + count, dtype=np.int32)
            views["tokens"][span] = row.token_ids
            views["positions"][span] = positions
            views["lengths"][span] = self.lengths[row.slot]
            views["token_pages"][span] = self.page_table[row.slot, positions // self.page_size]
            views["token_offsets"][span] = positions % self.page_size
            views["context_lens"][i] = row.start + count
            views["query_starts"][i] = start
            views["query_lens"][i] = count
            views["sampled_tokens"][i] = start + count - 1
            if row.samples:
                views["sampled_slots"][i] = row.slot
            if row.pooling is not None:
                views["pooled_from"][i] = start + count - row.pooling.num_tokens
                if not row.pooling.is_first:
                    views["carried_slots"][i] = row.slot
            if row.targets is not None:
                views["targets"][span] = row.targets
                views["num_target_tokens"][...] = start + count
            start += count


def _views(buffer: np.ndarray, shape: BatchShape) -> dict[str, np.ndarray]:
    """The arrays in a buffer."""
    floats = buffer.view(np.float32)
    return {
        name: (floats if field.is_float else buffer)[field.start : field.stop].reshape(field.shape)
        for name, field in shape.fields.items()
    }
