"""Run plans on the devices of one data slice; owns parameters, pages and compiled steps."""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.device.batch import BatchBuilder
from jaxserve.device.compiled_steps import CompiledStep, CompiledSteps
from jaxserve.device.masks import TokenMasks
from jaxserve.device.memory import return_freed_memory
from jaxserve.device.runner_interface import StepResult
from jaxserve.device.steps import StepOutput
from jaxserve.sampling.sampler import NO_TOKEN, VARIANTS
from jaxserve.scheduling.plan import (
    ON_DEVICE,
    PageCopy,
    PageGrant,
    Row,
    RowColumns,
    Sampling,
    SlotSetup,
    StepPlan,
)
from jaxserve.scheduling.row_arrays import row_arrays


class PendingStep:
    """A launched step whose outputs are being copied to the host."""

    def __init__(self, output: StepOutput, plan: StepPlan):
        self._output = output
        self._plan = plan
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()

    def wait(self) -> StepResult:
        """Wait for the step; return its result."""
        output = jax.tree.map(np.asarray, self._output)
        return StepResult(self._token_lists(output.tokens), *output[1:])

    def _token_lists(self, tokens: np.ndarray) -> list[list[int]]:
        columns = self._plan.columns
        if columns.has_drafts:
            counts = zip(self._plan.first_samples, columns.num_samples, strict=True)
            return [[t for t in tokens[first : first + count].tolist() if t != NO_TOKEN] for first, count in counts]
        tokens = tokens[: self._plan.num_rows]
        lists = tokens[:, None].tolist()
        is_empty = (tokens == NO_TOKEN) | (row_arrays(columns).num_samples == 0)
        for row in is_empty.nonzero()[0].tolist():
            lists[row] = []
        return lists


class StepInputs(NamedTuple):
    """A compiled step and its inputs besides parameters and state.

    Attributes:
        columns: Rows of the plan.
        step: The compiled step.
        variant: Sampler variant.
        buffer: Buffer from ``BatchBuilder``.
        mask: Token mask of each row.
        is_reusable: Whether steps with the same rows can reuse these inputs until a slot changes: the device tracks the
            positions, and ``num_shared_pages`` remains a lower bound because contexts only grow.
    """

    columns: RowColumns
    step: CompiledStep
    variant: str
    buffer: np.ndarray
    mask: jax.Array | np.ndarray
    is_reusable: bool


class StepRunner:
    """A ``Runner`` in this process.

    Args:
        steps: Compiled programs.
        params: Packed parameters (``ModelProgram.packing``).
    """

    def __init__(self, steps: CompiledSteps, params: tuple[jax.Array, ...]):
        self._steps = steps
        self._params = params
        program = steps.program
        self._builder = BatchBuilder(
            program.num_slots,
            steps.buckets.table_pages,
            program.page_size,
            program.num_pages,
            tuple(program.arguments.values()),
            steps.buckets.num_tables,
        )
        self._masks = TokenMasks(program.config.vocab_size)
        self._biased_slots: set[int] = set()
        self._inputs: StepInputs | None = None
        self._handles = itertools.count()
        self._launched: dict[int, PendingStep] = {}
        self._state = program.empty_state()
        self._open_masks = {
            rows: jax.device_put(np.full(program.mask_shape(rows), -1, np.int32), program.replicated)
            for rows in {shape.num_rows for shape in steps.buckets.shapes()}
        }

    def launch(self, plan: StepPlan) -> int:
        """See ``Runner``."""
        inputs = self._inputs
        has_updates = plan.setups or plan.grants or plan.copies or plan.masks
        if inputs is not None and plan.columns is inputs.columns and not has_updates:
            self._builder.starts.advance(plan)
        else:
            inputs = self._prepare(plan)
            self._inputs = inputs if inputs.is_reusable else None
        self._state, output = inputs.step(self._params, self._state, inputs.buffer, inputs.mask)
        if inputs.variant != "full":
            output = output._replace(logprobs=None)
        if not any(pooling is not None and pooling.is_last for pooling in plan.columns.pooling):
            output = output._replace(sums=None)
        handle = next(self._handles)
        self._launched[handle] = PendingStep(output, plan)
        return handle

    def _prepare(self, plan: StepPlan) -> StepInputs:
        """Apply a plan's slot changes, and create the inputs of its step."""
        builder, masks = self._builder, self._masks
        builder.apply(plan)
        masks.apply(plan.setups)
        setups = [setup for setup in plan.setups if self._needs_row(setup)]
        if setups or plan.copies:
            self._state = self._steps.prepare(self._state, setups, plan.copies)
        masked = masks.rows(plan, builder.starts)
        is_full = bool(masked) or self._steps.program.is_always_full
        variant = builder.variant(plan, is_full)
        shape, step = self._steps.choose(plan, variant)
        mask = masks.array(masked, shape.num_rows) if masked else self._open_masks[shape.num_rows]
        buffer = builder.build(plan, shape, VARIANTS.index(variant))
        is_masked = masks.has_static_masks or bool(plan.masks)
        is_reusable = not is_masked and all(start == ON_DEVICE for start in plan.columns.starts)
        return StepInputs(plan.columns, step, variant, buffer, mask, is_reusable)

    def collect(self, handle: int) -> StepResult:
        """See ``Runner``."""
        return self._launched.pop(handle).wait()

    def weights(self) -> dict[str, np.ndarray]:
        """See ``Runner``."""
        program = self._steps.program
        arrays = program.packing.unpack([np.array(array) for array in self._params])
        return dict(zip(program.abstract_model.params, arrays, strict=True))

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """See ``Runner``; temporarily keeps old and new parameters in memory."""
        program = self._steps.program
        structs = program.abstract_model.params
        for name, array in weights.items():
            struct = structs.get(name)
            if struct is None:
                raise ValueError(f"the model has no parameter {name!r}")
            if (array.shape, array.dtype) != (struct.shape, struct.dtype):
                expected, found = f"{struct.dtype}{list(struct.shape)}", f"{array.dtype}{list(array.shape)}"
                raise ValueError(f"expected {expected} for {name}, got {found}")
        replaced = {i: weights[name] for i, name in enumerate(structs) if name in weights}
        self._params = program.packing.replace(self._params, replaced)

    def warm_up(self) -> None:
        """Run every program once and wait for it.

        The first run of a program does deferred work: on CPUs, XLA's matmuls generate their kernels, 0.3 to 0.6 s per
        program for a model of 30 layers. Mixed steps run a row of two tokens, because rows of one take another path in
        the kernels.
        """
        slot, page, token = 0, 0, 0
        grants = [PageGrant(slot, 0, [page], table) for table in range(self._steps.buckets.num_tables)]
        decode = StepPlan(0, [], grants, [Row(slot, 0, [token], 1)])
        self._builder.apply(decode)
        self._state = self._steps.prepare(self._state, [SlotSetup(slot, Sampling(), 1)], [PageCopy(page, page)])
        for (shape, variant), step in self._steps.items():
            number = VARIANTS.index("greedy" if variant == "any" else variant)
            chunk = [token] * min(2, shape.num_tokens, self._builder.page_size)
            mixed = StepPlan(0, [], [], [Row(slot, 0, chunk, 1, targets=chunk)])
            buffer = self._builder.build(decode if shape.decode_only else mixed, shape, number)
            outputs = step(self._params, self._state, buffer, self._open_masks[shape.num_rows])
            self._state, _ = jax.block_until_ready(outputs)
        return_freed_memory()

    def _needs_row(self, setup: SlotSetup) -> bool:
        """Whether a slot's tables must be written: its request uses them, or the previous one left a bias there."""
        slot, sampling = setup.slot, setup.sampling
        was_biased = slot in self._biased_slots
        if sampling.logit_bias:
            self._biased_slots.add(slot)
        elif was_biased:
            self._biased_slots.remove(slot)
        return was_biased or bool(sampling.logit_bias or sampling.tracked_ids) or sampling.has_penalties

    def close(self) -> None:
        """See ``Runner``."""
        for pending in self._launched.values():
            pending.wait()
        for array in jax.tree.leaves((self._params, self._state, self._open_masks)):
            array.delete()
