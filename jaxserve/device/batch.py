"""Build the padded input buffer of a step from its plan.

Plans carry a slot's parameters and pages only when they change, so they are kept here between steps.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxserve.device.sampler_batch import FLOAT_FIELDS, SLOT_PARAMS
from jaxserve.device.step_batch import BatchShape
from jaxserve.scheduling.plan import PageGrant, Sampling, SlotSetup, StepPlan
from jaxserve.scheduling.row_starts import RowStarts, as_array

_NEVER = np.iinfo(np.int32).max


class BatchBuilder:
    """Keeps the state of every slot on the host, and builds the buffers of steps.

    Args:
        num_slots: Number of slots.
        table_pages: M, pages of the longest context.
        page_size: Tokens per page.
        num_pages: Usable pages; the null page follows them.
        default_arguments: Default arguments of the logits processors.
        num_tables: Number of page tables per slot.

    Attributes:
        failed: Why the inputs of a slot's rows could not be built. Its rows run without them, and the others are not
            affected.
    """

    def __init__(
        self,
        num_slots: int,
        table_pages: int,
        page_size: int,
        num_pages: int,
        default_arguments: Sequence[float] = (),
        num_tables: int = 1,
    ):
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.default_arguments = tuple(default_arguments)
        self.starts = RowStarts(num_slots)
        self.page_tables = np.full((num_tables, num_slots, table_pages), num_pages, np.int32)
        self.lengths = np.zeros(num_slots, np.int32)
        self.slot_params = np.zeros((len(SLOT_PARAMS) + len(self.default_arguments), num_slots), np.int32)
        floats = self.slot_params.view(np.float32)
        self._param_rows = {
            name: (floats if name in FLOAT_FIELDS else self.slot_params)[i] for i, name in enumerate(SLOT_PARAMS)
        }
        self._arguments = floats[len(SLOT_PARAMS) :]
        self._set_params(0, Sampling())
        self._defaults = self.slot_params[:, :1].copy()
        self.slot_params[...] = self._defaults
        self.is_random = np.zeros(num_slots, bool)
        self.needs_full = np.zeros(num_slots, bool)
        self.counted_from = np.full(num_slots, _NEVER, np.int32)
        self._paddings: dict[BatchShape, np.ndarray] = {}
        self.failed: dict[int, Exception] = {}

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's slot assignments and page table updates."""
        for setup in plan.setups:
            self.set_up(setup)
        self.grant(plan.grants)

    def set_up(self, setup: SlotSetup) -> None:
        """Assign a slot."""
        slot, sampling = setup.slot, setup.sampling
        self.page_tables[:, slot] = self.num_pages
        self.lengths[slot] = setup.final_length
        self._set_params(slot, sampling)
        self.is_random[slot] = sampling.options.temperature > 0
        self.counted_from[slot] = len(setup.token_ids) if sampling.has_penalties else _NEVER
        self.needs_full[slot] = (
            sampling.num_logprobs >= 0
            or sampling.changes_logits
            or len(sampling.tracked_ids) > 0
            or sampling.arguments not in ((), self.default_arguments)
        )

    def grant(self, grants: Iterable[PageGrant]) -> None:
        """Apply page table updates."""
        for slot, first, pages, table in grants:
            self.page_tables[table, slot, first : first + len(pages)] = pages

    def build(self, plan: StepPlan, shape: BatchShape, variant: int) -> np.ndarray:
        """Return the step's int32 buffer, padded to ``shape``; call once per plan, in order."""
        buffer = self._padding(shape).copy()
        views = _views(buffer, shape)
        num_rows, num_tokens = plan.num_rows, plan.num_tokens
        slots, lengths, num_samples = as_array(plan.slots), as_array(plan.lengths), as_array(plan.num_samples)
        starts = self.starts.advance(plan)
        ends = lengths.cumsum()
        views["tokens"][:num_tokens] = as_array(plan.token_ids)
        views["token_rows"][:num_tokens] = np.arange(num_rows).repeat(lengths)
        views["page_tables"][:, :num_rows] = self.page_tables[:, slots]
        views["starts"][:num_rows] = as_array(plan.starts)
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
        self._fill_targets(views, plan, ends)
        self._fill_pooling(views, plan, ends)
        start, stop, size, _ = shape.slot_params
        buffer[start:stop].reshape(size)[:, :num_rows] = self.slot_params[:, slots]
        views["num_rows"][...] = num_rows
        views["variant"][...] = variant
        return buffer

    def variant(self, plan: StepPlan, is_masked: bool = False) -> str:
        """Return the simplest sampler variant that supports every row; ``is_masked`` if a row has a token mask."""
        slots = as_array(plan.slots)[as_array(plan.num_samples) > 0]
        if is_masked or self.needs_full[slots].any():
            return "full"
        return "sampled" if self.is_random[slots].any() else "greedy"

    def _set_params(self, slot: int, sampling: Sampling) -> None:
        """Store a slot's sampling parameters."""
        arguments = sampling.arguments or self.default_arguments
        assert len(arguments) == len(self.default_arguments), "wrong number of logits processor arguments"
        seed = sampling.seed if sampling.seed < 1 << 31 else sampling.seed - (1 << 32)
        self._param_rows["seeds"][slot] = seed
        for name, value in sampling.options._asdict().items():
            self._param_rows[name][slot] = value
        self._arguments[:, slot] = arguments

    def _padding(self, shape: BatchShape) -> np.ndarray:
        """Return a buffer of empty rows and padding tokens."""
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
            start, stop, size, _ = shape.slot_params
            buffer[start:stop].reshape(size)[...] = self._defaults
            self._paddings[shape] = buffer
        return self._paddings[shape]

    def _num_shared_pages(self, page_table: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> int:
        """Return the number of full leading pages that all rows of one token share in a table."""
        num_full = int(positions.min() + 1) // self.page_size if len(slots) else 0
        if not num_full or (page_table[slots, 0] != page_table[slots[0], 0]).any():
            return 0  # the common case
        table = page_table[slots, :num_full]
        differs = (table != table[0]).any(0)
        return int(differs.argmax()) if differs.any() else num_full

    def _fill_targets(self, views: dict[str, np.ndarray], plan: StepPlan, ends: np.ndarray) -> None:
        for row, targets in plan.targets:
            with self._alone(plan.slots[row]):
                views["targets"][ends[row] - len(targets) : ends[row]] = targets
            views["num_target_tokens"][...] = ends[row]

    def _fill_pooling(self, views: dict[str, np.ndarray], plan: StepPlan, ends: np.ndarray) -> None:
        for row, num_tokens, is_first, _ in plan.pooling:
            with self._alone(plan.slots[row]):
                views["pooled_from"][row] = ends[row] - num_tokens
                if not is_first:
                    views["carried_slots"][row] = plan.slots[row]

    @contextlib.contextmanager
    def _alone(self, slot: int) -> Iterator[None]:
        """Let an exception in the block fail this slot's rows only."""
        try:
            yield
        except Exception as error:
            self.failed[slot] = error


def _fill_samples(views: dict[str, np.ndarray], counts: np.ndarray, ends: np.ndarray) -> None:
    """Set each sample's row and query token: ``counts`` samples for the last tokens of each row."""
    sample_ends = counts.cumsum()
    num_samples = int(counts.sum())
    views["sample_rows"][:num_samples] = np.arange(len(counts)).repeat(counts)
    views["sampled_tokens"][:num_samples] = (ends - sample_ends).repeat(counts) + np.arange(num_samples)
    views["num_samples"][...] = num_samples


def _views(buffer: np.ndarray, shape: BatchShape) -> dict[str, np.ndarray]:
    """Return views of the arrays in a buffer."""
    floats = buffer.view(np.float32)
    return {
        name: (floats if field.is_float else buffer)[field.start : field.stop].reshape(field.shape)
        for name, field in shape.fields.items()
    }
