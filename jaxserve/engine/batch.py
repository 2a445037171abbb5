"""From a plan to the buffer of a step: the only padding code.

Facts of a slot are kept here between steps, since plans name them only when they change.
"""

import numpy as np

from jaxserve.engine.plan import StepPlan
from jaxserve.engine.step_batch import BatchShape


class BatchBuilder:
    """Facts of every slot, and the arrays of a step made from them and a plan.

    Args:
        num_slots: Sequences that can run at once.
        table_pages: M, pages of the longest context.
        page_size: Tokens a page.
        num_pages: Usable pages; the null page is the one behind them.
    """

    def __init__(self, num_slots: int, table_pages: int, page_size: int, num_pages: int):
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.page_table = np.full((num_slots, table_pages), num_pages, np.int32)
        self.lengths = np.zeros(num_slots, np.int32)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.seeds = np.zeros(num_slots, np.int32)
        self.num_logprobs = np.full(num_slots, -1, np.int32)
        self.banned: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._sampling = {name: getattr(self, name) for name in ("temperature", "top_p", "min_p", "top_k", "seeds")}
        self._paddings: dict[BatchShape, np.ndarray] = {}

    def apply(self, plan: StepPlan) -> None:
        """Takes over what the plan says of slots."""
        for slot, sampling, final_length, *_ in plan.setups:
            self.page_table[slot] = self.num_pages
            self.lengths[slot] = final_length
            self.temperature[slot] = sampling.temperature
            self.top_p[slot] = sampling.top_p
            self.min_p[slot] = sampling.min_p
            self.top_k[slot] = sampling.top_k
            self.seeds[slot] = np.uint32(sampling.seed).view(np.int32)
            self.num_logprobs[slot] = sampling.num_logprobs
            self.banned.pop(slot, None)
            if sampling.banned_ids:
                self.banned[slot] = (sampling.banned_until, sampling.banned_ids)
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
        for name, values in self._sampling.items():
            views[name][:num_rows] = values[slots]
        views["num_decode"][...] = num_decode
        views["num_rows"][...] = num_rows
        views["variant"][...] = variant
        return buffer

    def variant(self, plan: StepPlan) -> str:
        """The simplest sampler that does what every row asks for."""
        slots = plan.decode_slots + [row.slot for row in plan.prefill if row.samples]
        if self._banned_rows(plan) or (self.num_logprobs[slots] >= 0).any():
            return "full"
        return "sampled" if (self.temperature[slots] > 0).any() else "greedy"

    def vocabulary_mask(self, plan: StepPlan, num_rows: int, vocab_size: int) -> np.ndarray | None:
        """Allowed tokens of each row as bits, [num_rows, V / 32] int32; None where every token is allowed."""
        banned = self._banned_rows(plan)
        if not banned:
            return None
        mask = np.full((num_rows, -(-vocab_size // 32)), -1, np.int32)
        for row, token_ids in banned:
            for token in token_ids:
                mask[row, token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
        return mask

    def _banned_rows(self, plan: StepPlan) -> list[tuple[int, tuple[int, ...]]]:
        """Rows that may not sample some tokens yet, and those tokens."""
        if not self.banned:
            return []
        rows = [*zip(plan.decode_slots, plan.decode_positions, strict=True)]
        rows += [(row.slot, row.start + len(row.token_ids) - 1) for row in plan.prefill]
        return [
            (i, self.banned[slot][1])
            for i, (slot, position) in enumerate(rows)
            if slot in self.banned and position + 1 < self.banned[slot][0]
        ]

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
            views["query_starts"][...] = shape.num_tokens
            views["top_p"][...] = 1.0
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
