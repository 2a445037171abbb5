"""Run plans on the devices of one data slice, in all stages; owns parameters, pages and compiled steps."""

import collections
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.device.compiled_steps import CompiledStep, CompiledSteps, slot_row
from jaxserve.device.lane import Lane
from jaxserve.device.memory import return_freed_memory
from jaxserve.device.program import ModelProgram, StepState
from jaxserve.device.runner_interface import RowError, StepResult
from jaxserve.device.stage_steps import Pipeline, StageRunner
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.steps import StepOutput
from jaxserve.layers.attention import Pools
from jaxserve.sampling.sampler import NO_TOKEN, VARIANTS
from jaxserve.scheduling.plan import ON_DEVICE, ChunkTargets, PageCopy, PageGrant, Sampling, SlotSetup, StepPlan
from jaxserve.scheduling.row_starts import as_array


class PendingStep:
    """A launched step whose outputs are being copied to the host.

    Args:
        output: Outputs of the last stage.
        plans: Plan of each lane.
        expert_tokens: Those of the stages before it that count them.
        errors: Rows of each lane whose inputs could not be built.
    """

    def __init__(
        self,
        output: StepOutput,
        plans: Sequence[StepPlan],
        expert_tokens: Sequence[jax.Array],
        errors: Sequence[tuple[RowError, ...]],
    ):
        own = () if output.expert_tokens is None else (output.expert_tokens,)
        counted: Any = (*expert_tokens, *own) or None
        self._output = output._replace(expert_tokens=counted)
        self._plans = plans
        self._errors = errors
        for array in jax.tree.leaves(self._output):
            array.copy_to_host_async()

    def wait(self) -> list[StepResult]:
        """Wait for the step; return the result of each lane."""
        output = jax.tree.map(np.asarray, self._output)
        num_lanes = len(self._plans)
        if num_lanes == 1:
            return [_result(output, self._plans[0], self._errors[0])]
        parts = jax.tree.map(lambda array: array.reshape(num_lanes, len(array) // num_lanes, *array.shape[1:]), output)
        return [
            _result(jax.tree.map(lambda part, lane=lane: part[lane], parts), plan, self._errors[lane])
            for lane, plan in enumerate(self._plans)
        ]


def _result(output: Any, plan: StepPlan, errors: tuple[RowError, ...]) -> StepResult:
    """Return a lane's result from its part of the outputs."""
    counted = None if output.expert_tokens is None else np.concatenate(output.expert_tokens)
    result = StepResult(_token_lists(output.tokens, plan), *output[1:])
    return result._replace(expert_tokens=counted, errors=errors)


def _token_lists(tokens: np.ndarray, plan: StepPlan) -> list[list[int]]:
    """Return the tokens of each row, without those that are none."""
    if plan.has_drafts:
        counts = zip(plan.first_samples, plan.num_samples, strict=True)
        return [[t for t in tokens[first : first + count].tolist() if t != NO_TOKEN] for first, count in counts]
    tokens = tokens[: plan.num_rows]
    lists = tokens[:, None].tolist()
    is_empty = (tokens == NO_TOKEN) | (as_array(plan.num_samples) == 0)
    for row in is_empty.nonzero()[0].tolist():
        lists[row] = []
    return lists


class StepInputs(NamedTuple):
    """A compiled step and its inputs besides parameters and state.

    Attributes:
        plans: Plan of each lane for which they were made.
        shape: Batch shape.
        step: The compiled step of the last stage.
        variant: Sampler variant.
        buffer: The lanes' buffers from ``BatchBuilder``, one after the other.
        mask: Token mask of each row, likewise.
        is_reusable: Whether steps with the same rows can reuse these inputs until a slot changes: the device tracks the
            positions, and ``num_shared_pages`` remains a lower bound because contexts only grow.
    """

    plans: Sequence[StepPlan]
    shape: BatchShape
    step: CompiledStep
    variant: str
    buffer: np.ndarray
    mask: jax.Array | np.ndarray
    is_reusable: bool

    def fit(self, plans: Sequence[StepPlan]) -> bool:
        """Return whether plans have the same rows and change no slot."""
        for plan, made_for in zip(plans, self.plans, strict=True):
            if plan.same_rows_as != made_for.rows_number or plan.setups or plan.grants or plan.copies or plan.masks:
                return False
        return True

    def survives(self, plans: Sequence[StepPlan]) -> bool:
        """Return whether plans change none of the slots of the rows."""
        for plan, made_for in zip(plans, self.plans, strict=True):
            changed = {change.slot for change in (*plan.setups, *plan.grants)}
            if changed and not changed.isdisjoint(made_for.slots):
                return False
        return True


class StepRunner:
    """A ``Runner`` in this process.

    Args:
        steps: Compiled programs of the model, or of its last stage.
        params: Packed parameters (``ModelProgram.packing``) of the same.
        earlier: The stages before it, in order.
        state: The state of all slots, and the pages; None allocates it.
    """

    def __init__(
        self,
        steps: CompiledSteps,
        params: tuple[jax.Array, ...],
        earlier: Sequence[StageRunner] = (),
        state: StepState | None = None,
    ):
        self._steps = steps
        self._params = params
        self._handles = itertools.count()
        self._forget_steps(earlier)
        program = steps.program
        self._state = program.empty_state() if state is None else state
        self._open_masks = {
            rows: jax.device_put(np.full((program.num_lanes * rows, words), -1, np.int32), program.rows_sharding)
            for rows, words in {program.mask_shape(shape.num_rows) for shape in steps.buckets.shapes()}
        }

    def _forget_steps(self, earlier: Sequence[StageRunner]) -> None:
        """Start with slots that nothing is known of, and no steps in flight."""
        program = self._steps.program
        self._lanes = [Lane(program, self._steps.buckets) for _ in range(program.num_lanes)]
        self._pipeline = Pipeline(earlier, program)
        self._inputs = collections.deque[StepInputs](maxlen=1 + len(earlier))
        self._launched: dict[int, PendingStep] = {}

    def launch(self, plans: Sequence[StepPlan]) -> int:
        """See ``Runner``."""
        inputs = next((inputs for inputs in self._inputs if inputs.fit(plans)), None)
        if inputs is not None:
            for lane, plan in zip(self._lanes, plans, strict=True):
                lane.builder.starts.advance(plan)
        else:
            inputs = self._prepare(plans)
            if inputs.is_reusable:
                self._inputs.append(inputs)
        hidden, expert_tokens = self._pipeline.run(plans, inputs.shape, inputs.buffer)
        self._state, output = inputs.step(self._params, self._state, inputs.buffer, inputs.mask, *hidden)
        self._pipeline.send_back(plans, self._state.latest)
        if inputs.variant != "full":
            output = output._replace(logprobs=None)
        if not any(pooling.is_last for plan in plans for pooling in plan.pooling):
            output = output._replace(sums=None)
        handle = next(self._handles)
        errors = [lane.errors(plan) for lane, plan in zip(self._lanes, plans, strict=True)]
        self._launched[handle] = PendingStep(output, plans, expert_tokens, errors)
        return handle

    def _prepare(self, plans: Sequence[StepPlan]) -> StepInputs:
        """Apply the plans' slot changes, and create the inputs of their step."""
        lanes, steps = [*zip(self._lanes, plans, strict=True)], self._steps
        kept = [inputs for inputs in self._inputs if inputs.survives(plans)]
        self._inputs.clear()
        self._inputs.extend(kept)
        rows = [lane.apply(plan) for lane, plan in lanes]
        copies = [plan.copies for plan in plans]
        if any(rows) or any(copies):
            self._state = steps.prepare(self._state, rows, copies)
        if any(copies):
            self._pipeline.copy_pages(copies)
        masked = [lane.masked_rows(plan) for lane, plan in lanes]
        is_full = any(masked) or steps.program.is_always_full
        variant = max((lane.builder.variant(plan, is_full) for lane, plan in lanes), key=VARIANTS.index)
        shape, step = steps.choose(plans, variant)
        mask = self._open_masks[shape.num_rows]
        if any(masked):
            masks = zip(self._lanes, masked, strict=True)
            mask = _joined([lane.mask(rows, shape.num_rows) for lane, rows in masks])
        buffer = _joined([lane.builder.build(plan, shape, VARIANTS.index(variant)) for lane, plan in lanes])
        is_reusable = all(_is_reusable(lane, plan) for lane, plan in lanes)
        return StepInputs(plans, shape, step, variant, buffer, mask, is_reusable)

    def collect(self, handle: int) -> list[StepResult]:
        """See ``Runner``."""
        return self._launched.pop(handle).wait()

    def weights(self) -> dict[str, np.ndarray]:
        """See ``Runner``."""
        found = dict[str, np.ndarray]()
        for program, params in self._all_params():
            arrays = program.packing.unpack([np.array(array) for array in params])
            found |= zip(program.array_names, arrays, strict=True)
        return found

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """See ``Runner``; temporarily keeps old and new parameters in memory."""
        programs = [program for program, _ in self._all_params()]
        structs = {name: struct for program in programs for name, struct in program.array_names.items()}
        for name, array in weights.items():
            struct = structs.get(name)
            if struct is None:
                raise ValueError(f"the model has no parameter {name!r}")
            if (array.shape, array.dtype) != (struct.shape, struct.dtype):
                expected, found = f"{struct.dtype}{list(struct.shape)}", f"{array.dtype}{list(array.shape)}"
                raise ValueError(f"expected {expected} for {name}, got {found}")
        replaced = []
        for program, params in self._all_params():
            new = {i: weights[name] for i, name in enumerate(program.array_names) if name in weights}
            replaced.append(program.packing.replace(params, new))
        *earlier, self._params = replaced
        for stage, params in zip(self._pipeline.stages, earlier, strict=True):
            stage.params = params

    def _all_params(self) -> list[tuple[ModelProgram, tuple[jax.Array, ...]]]:
        """Return the program and the packed parameters of every stage."""
        last = self._steps.program, self._params
        return [*((stage.program, stage.params) for stage in self._pipeline.stages), last]

    @property
    def pools(self) -> list[tuple[Pools, ...]]:
        """The pages of each stage, for reading or replacing them while no step is in flight."""
        return [*(stage.pools for stage in self._pipeline.stages), self._state.pools]

    @pools.setter
    def pools(self, pools: Sequence[tuple[Pools, ...]]) -> None:
        *earlier, last = pools
        for stage, each in zip(self._pipeline.stages, earlier, strict=True):
            stage.pools = each
        self._state = self._state._replace(pools=last)

    def release(self) -> list[tuple[ModelProgram, tuple[jax.Array, ...]]]:
        """Free pages and slots, and return the program and the packed parameters of each stage, which the runner gives
        up: it cannot be used afterwards."""
        assert not self._launched, "steps are in flight"
        for array in jax.tree.leaves((self.pools, self._state, self._open_masks)):
            array.delete()
        released = self._all_params()
        self._params, self._open_masks = (), {}
        for stage in self._pipeline.stages:
            stage.params = ()
        return released

    def warm_up(self) -> None:
        """Run every program once and wait for it.

        The first run of a program does deferred work: on CPUs, XLA's matmuls generate their kernels, 0.3 to 0.6 s per
        program for a model of 30 layers. Mixed steps run a row of two tokens, because rows of one take another path in
        the kernels.
        """
        slot, page, token = 0, 0, 0
        grants = [PageGrant(slot, 0, [page], table) for table in range(self._steps.buckets.num_tables)]
        decode = StepPlan(0, grants=grants)
        decode.add_row(slot, 0, [token], 1)
        for lane in self._lanes:
            lane.builder.apply(decode)
        row = slot_row(SlotSetup(slot, Sampling(), 1), self._steps.program.config.vocab_size)
        copies = [PageCopy(page, page)]
        num_lanes = len(self._lanes)
        self._state = self._steps.prepare(self._state, [[row]] * num_lanes, [copies] * num_lanes)
        self._pipeline.copy_pages([copies] * num_lanes)
        for (shape, variant), step in self._steps.items():
            number = VARIANTS.index("greedy" if variant == "any" else variant)
            chunk = [token] * min(2, shape.num_tokens, self._steps.program.page_size)
            mixed = StepPlan(0, targets=[ChunkTargets(0, chunk)])
            mixed.add_row(slot, 0, chunk, 1)
            plan = decode if shape.decode_only else mixed
            buffer = _joined([lane.builder.build(plan, shape, number) for lane in self._lanes])
            hidden, _ = self._pipeline.run([plan] * num_lanes, shape, buffer)
            outputs = step(self._params, self._state, buffer, self._open_masks[shape.num_rows], *hidden)
            self._state, _ = jax.block_until_ready(outputs)
            self._pipeline.send_back([plan] * num_lanes, self._state.latest)
        return_freed_memory()

    def reset(self) -> None:
        """See ``Runner``."""
        for pending in self._launched.values():
            with contextlib.suppress(Exception):
                pending.wait()
        stages = self._pipeline.stages
        for array in jax.tree.leaves((self._state, [stage.pools for stage in stages])):
            array.delete()  # first: there may be no room for the pages twice
        self._forget_steps(stages)
        for stage in stages:
            stage.pools = stage.program.empty_pools()
        self._state = self._steps.program.empty_state()

    def close(self) -> None:
        """See ``Runner``."""
        for pending in self._launched.values():
            pending.wait()
        for array in jax.tree.leaves((self._params, self._state, self._open_masks)):
            array.delete()
        self._pipeline.delete()


def _is_reusable(lane: Lane, plan: StepPlan) -> bool:
    """Return whether a lane's next step can have the same inputs; see ``StepInputs``."""
    is_masked = lane.has_static_masks or bool(plan.masks)
    return not is_masked and all(start == ON_DEVICE for start in plan.starts)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Return the lanes' arrays one after the other."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
