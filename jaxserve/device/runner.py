"""Runs the plans of one data slice on devices of this process."""

import collections
import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.device import batch
from jaxserve.device.held_masks import HeldMasks, LaneMasks
from jaxserve.device.memory import return_freed_memory
from jaxserve.device.pipeline import Pipeline
from jaxserve.device.runner_interface import RowError, StepResult
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.slots import Slots
from jaxserve.device.split_steps import SplitStep
from jaxserve.device.stage import CompiledStep, Stage
from jaxserve.device.stage_link import StageLink
from jaxserve.device.state_updates import slot_row
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.steps import StepOutput
from jaxserve.layers.attention import Pools
from jaxserve.sampling.sampler import NO_TOKEN, VARIANTS
from jaxserve.scheduling.plan import ON_DEVICE, ChunkTargets, PageCopy, PageGrant, Sampling, SlotSetup, StepPlan
from jaxserve.scheduling.row_starts import as_array
from sharding import put

_NO_OUTPUT: Any = StepOutput(None, None, None, None, None)  # pyright: ignore[reportArgumentType]


class PendingStep(NamedTuple):
    """A launched step whose outputs are being copied to the host.

    Attributes:
        output: Outputs of the last stage, None if other processes have it; ``expert_tokens`` are a list with those of
            each stage that counts them.
        plans: Plan of each lane.
        errors: Rows of each lane whose inputs could not be built.
    """

    output: StepOutput
    plans: Sequence[StepPlan]
    errors: Sequence[tuple[RowError, ...]]

    def wait(self) -> list[StepResult]:
        """Wait for the step; return the result of each lane."""
        output = jax.tree.map(np.asarray, self.output)
        if len(self.plans) == 1:
            return [_result(output, self.plans[0], self.errors[0])]
        num_lanes = len(self.plans)
        parts = jax.tree.map(lambda array: array.reshape(num_lanes, len(array) // num_lanes, *array.shape[1:]), output)
        return [
            _result(jax.tree.map(lambda part, lane=lane: part[lane], parts), plan, self.errors[lane])
            for lane, plan in enumerate(self.plans)
        ]


def _result(output: Any, plan: StepPlan, errors: tuple[RowError, ...]) -> StepResult:
    """Return a lane's result from its part of the outputs."""
    counted = np.concatenate(output.expert_tokens) if output.expert_tokens else None
    tokens = [] if output.tokens is None else _token_lists(output.tokens, plan)
    return StepResult(tokens, output.logprobs, output.prompt_logprobs, output.sums, counted, errors)


def _token_lists(tokens: np.ndarray, plan: StepPlan) -> list[list[int]]:
    """Return the tokens of each row, without those that are none."""
    if plan.has_drafts:
        flat, counts = tokens.tolist(), zip(plan.first_samples, plan.num_samples, strict=True)
        return [[token for token in flat[first : first + count] if token != NO_TOKEN] for first, count in counts]
    tokens = tokens[: plan.num_rows]
    lists = tokens[:, None].tolist()
    is_empty = (tokens == NO_TOKEN) | (as_array(plan.num_samples) == 0)
    for row in is_empty.nonzero()[0].tolist():
        lists[row] = []
    return lists


class StepInputs(NamedTuple):
    """A compiled step and its inputs besides parameters and state.

    Steps with the same rows can reuse them until a slot changes, if no row is masked and all start ``ON_DEVICE``: the
    device tracks the positions, and ``num_shared_pages`` remains a lower bound because contexts only grow.

    Attributes:
        plans: Plan of each lane for which they were made.
        shape: Batch shape.
        step: The compiled step of the last stage; None if other processes have it.
        variant: Sampler variant.
        buffer: The lanes' buffers from ``batch.build``, one after the other.
        mask: Token mask of each sample, likewise.
    """

    plans: Sequence[StepPlan]
    shape: BatchShape
    step: CompiledStep | None
    variant: str
    buffer: np.ndarray
    mask: jax.Array | np.ndarray | None

    def fit(self, plans: Sequence[StepPlan]) -> bool:
        """Return whether plans have the same rows and change no slot."""
        return all(
            plan.same_rows_as == made_for.rows_number and plan.has_rows_only
            for plan, made_for in zip(plans, self.plans, strict=True)
        )

    def survives(self, plans: Sequence[StepPlan]) -> bool:
        """Return whether plans change none of the slots of the rows."""
        for plan, made_for in zip(plans, self.plans, strict=True):
            changed = {change.slot for change in (*plan.setups, *plan.grants)}
            if changed and not changed.isdisjoint(made_for.slots):
                return False
        return True


class LocalRunner:
    """A ``Runner`` in this process.

    Args:
        stages: The loaded stages of a model, in order: one without pipeline parallelism.
        link: Leads to the processes that have the other stages; None if this one has all.
    """

    def __init__(self, stages: Sequence[Stage], link: StageLink | None = None):
        self._stages = tuple(stages)
        self._last = stages[-1]
        self._link = link
        self._forget_steps()
        model, shapes = self._last.model, self._last.buckets.shapes() if self._last.is_here else ()
        self._open_masks = {
            samples: put(np.full((model.num_lanes * samples, words), -1, np.int32), model.rows_sharding)
            for samples, words in {model.mask_shape(shape.sampler.num_samples) for shape in shapes}
        }

    def _forget_steps(self) -> None:
        """Start with slots that nothing is known of, and no steps in flight."""
        model, buckets = self._last.model, self._last.buckets
        pages = buckets.table_pages, model.page_size, model.num_pages
        sampling = model.config.vocab_size, tuple(model.arguments.values())
        self._lanes = [Slots(model.num_slots, *pages, *sampling, buckets.num_tables) for _ in range(model.num_lanes)]
        self._held_masks = HeldMasks(model.rows_sharding)
        self._pipeline = Pipeline(self._stages, self._link) if len(self._stages) > 1 else None
        self._inputs = collections.deque[StepInputs](maxlen=len(self._stages))
        self._launched = collections.deque[PendingStep]()

    def launch(self, plans: Sequence[StepPlan]) -> None:
        """See ``Runner``."""
        catch_up = self._last.catch_up
        if catch_up is not None and not catch_up.goes_on(plans):
            self._last.take_in_postponed()
        inputs = next((inputs for inputs in self._inputs if inputs.fit(plans)), None)
        if inputs is None:
            inputs = self._prepare(plans)
        else:
            for slots, plan in zip(self._lanes, plans, strict=True):
                slots.starts.advance(plan)
        output = self._run_last(inputs) if self._pipeline is None else self._run_stages(self._pipeline, inputs, plans)
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        errors = [slots.errors(plan) if slots.failed else () for slots, plan in zip(self._lanes, plans, strict=True)]
        self._launched.append(PendingStep(output, plans, errors))

    def _run_last(self, inputs: StepInputs, *hidden: jax.Array) -> StepOutput:
        """Launch a step of the last stage, or of the only one; return what this process knows of its outputs."""
        last = self._last
        if inputs.step is None or inputs.mask is None:
            return _NO_OUTPUT
        catch_up, given = last.catch_up, (last.params, last.state, inputs.buffer, inputs.mask)
        if catch_up is not None and catch_up.waits(inputs.plans, inputs.shape):
            assert isinstance(inputs.step, SplitStep)
            last.state, output, drafting = inputs.step.without_drafting(*given)
            assert drafting is not None
            if not catch_up.add(inputs.plans, inputs.shape, drafting):
                last.take_in_postponed()
        else:
            last.state, output = inputs.step(*given, *hidden)
        wants_sums = any(pooling.is_last for plan in inputs.plans for pooling in plan.pooling)
        counted = [] if output.expert_tokens is None else last.reported(output.expert_tokens)
        wanted = output._replace(
            logprobs=output.logprobs if inputs.variant == "full" else None,
            sums=output.sums if wants_sums else None,
            expert_tokens=None,
        )
        return last.readable(wanted)._replace(expert_tokens=counted)

    def _run_stages(self, pipeline: Pipeline, inputs: StepInputs, plans: Sequence[StepPlan]) -> StepOutput:
        """Launch a step of every stage of a pipeline."""
        hidden, expert_tokens = pipeline.run(plans, inputs.shape, inputs.buffer)
        output = self._run_last(inputs, *hidden)
        pipeline.send_back(plans, self._last.state.latest if self._last.is_here else None)
        return output._replace(expert_tokens=[*expert_tokens, *(output.expert_tokens or ())])

    def _prepare(self, plans: Sequence[StepPlan]) -> StepInputs:
        """Apply the plans' slot changes, and create the inputs of their step."""
        lanes, last = [*zip(self._lanes, plans, strict=True)], self._last
        if self._pipeline is None:
            self._inputs.clear()
        else:  # those of the other microbatches
            kept = (inputs for inputs in self._inputs if inputs.survives(plans))
            self._inputs = collections.deque(kept, len(self._stages))
        rows = [slots.apply(plan) for slots, plan in lanes]
        if any(rows):
            last.set_up_slots(rows)
        if any(plan.copies or plan.state_copies for plan in plans):
            self._copy([plan.copies for plan in plans], [plan.state_copies for plan in plans])
        is_masked = any(plan.masks or slots.masks.has_static_masks for slots, plan in lanes)
        masked = [slots.masked_samples(plan) for slots, plan in lanes] if is_masked else []
        is_full = any(masked) or last.model.is_always_full
        variant = max((slots.variant(plan, is_full) for slots, plan in lanes), key=VARIANTS.index)
        shape, step = last.choose(plans, variant)
        num_samples = shape.sampler.num_samples
        mask = self._open_masks.get(num_samples)
        if any(masked) and last.is_here:
            mask = self._held_masks.get(num_samples, masked, functools.partial(self._make_masks, num_samples, masked))
        sizes = VARIANTS.index(variant), max(plan.num_drafts for plan in plans)
        buffer = _joined([batch.build(slots, plan, shape, *sizes) for slots, plan in lanes])
        inputs = StepInputs(plans, shape, step, variant, buffer, mask)
        keeps = any(plan.snapshots for plan in plans)
        if not is_masked and not keeps and all(start == ON_DEVICE for plan in plans for start in plan.starts):
            self._inputs.append(inputs)
        return inputs

    def _make_masks(self, num_samples: int, masked: LaneMasks) -> np.ndarray:
        """Return the token masks of all lanes, of which ``masked`` do not allow all."""
        lanes = zip(self._lanes, masked, strict=True)
        return _joined([slots.masks.array(samples, num_samples) for slots, samples in lanes])

    def _copy(self, pages: Sequence[Sequence[PageCopy]], states: Sequence[Sequence[PageCopy]]) -> None:
        """Copy pages and state pages of each lane in every stage."""
        for stage in self._stages:
            stage.copy_pages(pages)
            stage.copy_states(states)

    def collect(self) -> list[StepResult]:
        """See ``Runner``."""
        return self._launched.popleft().wait()

    @property
    def pools(self) -> list[tuple[Pools, ...]]:
        """The pages of each stage (``StepState.pages``), for reading or replacing them while no step is in flight; none
        of a stage of other processes."""
        self._last.take_in_postponed()
        return [stage.state.pages if stage.is_here else () for stage in self._stages]

    @pools.setter
    def pools(self, pools: Sequence[tuple[Pools, ...]]) -> None:
        for stage, each in zip(self._stages, pools, strict=True):
            if stage.is_here:
                stage.state = stage.state.with_pages(each)

    def release(self) -> list[tuple[ShardedModel, tuple[jax.Array, ...]]]:
        """Free pages and slots, and give up the model and the packed parameters of each stage.

        The runner cannot be used afterwards.
        """
        assert not self._launched, "steps are in flight"
        for array in jax.tree.leaves(([stage.state for stage in self._stages if stage.is_here], self._open_masks)):
            array.delete()
        self._held_masks.forget()
        released = [(stage.model, stage.params) for stage in self._stages]
        self._open_masks = {}
        for stage in self._stages:
            stage.params = ()
        return released

    def warm_up(self) -> None:
        """Run every program once and wait for it.

        The first run of a program does deferred work: on CPUs, XLA's matmuls generate their kernels, 0.3 to 0.6 s per
        program for a model of 30 layers. Mixed steps and those with drafts run a row of two tokens, because rows of one
        take another path in the kernels.
        """
        slot, page, token, last, num_lanes = 0, 0, 0, self._last, len(self._lanes)
        grants = [PageGrant(slot, 0, [page], table) for table in range(last.buckets.num_tables)]
        decode = StepPlan(0, grants=grants)
        decode.add_row(slot, 0, [token], 1)
        for slots in self._lanes:
            slots.apply(decode)
        row = slot_row(SlotSetup(slot, Sampling(), 1), last.model.config.vocab_size)
        last.set_up_slots([[row]] * num_lanes)
        copies = [[PageCopy(page, page)]] * num_lanes
        self._copy(copies, copies)
        for (shape, variant), step in last.items():
            sizes = VARIANTS.index("greedy" if variant == "any" else variant), last.model.num_drafts
            chunk = [token] * min(2, shape.num_tokens, last.model.page_size)
            mixed = StepPlan(0, targets=[ChunkTargets(0, chunk)])
            mixed.add_row(slot, 0, chunk, 1)
            drafts = StepPlan(0)
            drafts.add_row(slot, 0, chunk, len(chunk))
            plans = [drafts if shape.has_drafts else decode if shape.decode_only else mixed] * num_lanes
            lanes = zip(self._lanes, plans, strict=True)
            buffer = _joined([batch.build(slots, plan, shape, *sizes) for slots, plan in lanes])
            hidden = () if self._pipeline is None else self._pipeline.run(plans, shape, buffer)[0]
            if step is not None:
                outputs = step(last.params, last.state, buffer, self._open_masks[shape.sampler.num_samples], *hidden)
                last.state, _ = jax.block_until_ready((outputs[0], last.readable(outputs[1])))
            if self._pipeline is not None:
                self._pipeline.send_back(plans, last.state.latest if last.is_here else None)
        return_freed_memory()

    def reset(self) -> None:
        """See ``Runner``."""
        for pending in self._launched:
            with contextlib.suppress(Exception):
                pending.wait()
        for stage in self._stages:  # first: there may be no room for the pages twice
            stage.delete_state()
        if self._link is not None:
            self._link.renew()
        self._forget_steps()
        if self._last.catch_up is not None:
            self._last.catch_up.forget()
        for stage in self._stages:
            stage.load(stage.params)

    def close(self) -> None:
        """See ``Runner``."""
        for pending in self._launched:
            pending.wait()
        for array in jax.tree.leaves(self._open_masks):
            array.delete()
        self._held_masks.forget()
        for stage in self._stages:
            stage.delete()


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Return the lanes' arrays one after the other."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
