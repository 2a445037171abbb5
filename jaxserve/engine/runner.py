"""Owner of what is on the devices of one data slice: parameters, pages, compiled steps. Takes plans, gives tokens."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.engine.batch import BatchBuilder
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.masks import TokenMasks
from jaxserve.engine.memory import return_freed_memory
from jaxserve.engine.plan import PageCopy, PageGrant, PrefillRow, Sampling, SlotSetup, StepPlan
from jaxserve.engine.program import ModelProgram, StepState
from jaxserve.engine.slot_programs import copy_arrays, slot_row, trace_copy_pages, trace_set_up
from jaxserve.engine.step_batch import BatchShape
from jaxserve.engine.steps import StepOutput, trace_step
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.sampling.sampler import VARIANTS

_EMPTY_STEP = StepPlan(0, [], [], [], [], [], [])


class StepResult(NamedTuple):
    """What the host learns of a step.

    Attributes:
        tokens: Each row's token; ``sampler.NO_TOKEN`` (-1) for a row whose logits have NaN, or nothing to choose from.
        logprobs: Those of the tokens, where a row asked for any.
        prompt_logprobs: Those of the prompt tokens behind each query token, where a chunk asked for any.
        sums: [R, D] float32, hidden states summed up over each row's prompt, where a chunk completes any.
    """

    tokens: list[int]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None
    sums: np.ndarray | None = None


class PendingStep:
    """A launched step whose outputs are on their way to the host."""

    def __init__(self, output: StepOutput, num_rows: int):
        self._output = output
        self._num_rows = num_rows
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()

    def wait(self) -> StepResult:
        """Waits for the step."""
        output = jax.tree.map(np.asarray, self._output)
        return StepResult(
            output.tokens[: self._num_rows].tolist(), output.logprobs, output.prompt_logprobs, output.sums
        )


ProgramKey = tuple[BatchShape, str]


def program_keys(buckets: Buckets, platform: str, always_full: bool = False) -> list[ProgramKey]:
    """Batch shape and sampler of every program to compile.

    On CPUs there is one program for each shape, which chooses its sampler when it runs: that costs nothing there. An
    accelerator would stop for the choice, so there each decode shape has a program for greedy and one for sampled rows,
    and decode steps that need more than that take a mixed shape, whose programs choose. Where every step needs more
    (``always_full``), decode shapes have a program for that alone.
    """
    decode = ("any",) if platform == "cpu" else ("full",) if always_full else ("greedy", "sampled")
    shapes = buckets.shapes()
    return [(shape, variant) for shape in shapes for variant in (decode if shape.decode_only else ("any",))]


class CompiledSteps:
    """The compiled programs of a model: its steps, and the two small ones that run before steps that need them."""

    def __init__(self, program: ModelProgram, buckets: Buckets):
        self.program = program
        self.buckets = buckets
        arguments = len(program.arguments)
        self._shapes = {shape: dataclasses.replace(shape, num_arguments=arguments) for shape in buckets.shapes()}
        platform = program.mesh.devices.flat[0].platform
        keys = program_keys(buckets, platform, program.is_always_full)
        self.keys = [(self._shapes[shape], variant) for shape, variant in keys]
        self._decode_variants = {variant for shape, variant in self.keys if shape.decode_only}
        self._compiled: dict[ProgramKey, jax.stages.Compiled] = {}
        self._set_up: jax.stages.Compiled | None = None
        self._copy_pages: jax.stages.Compiled | None = None

    def compile(self) -> None:
        """Compiles every program: traced one after the other, compiled on all cores."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {}
            for shape, variant in self.keys:
                lowered = trace_step(self.program, shape, variant).lower()
                futures[shape, variant] = pool.submit(_compile, lowered)
            small = [pool.submit(_compile, trace(self.program).lower()) for trace in (trace_set_up, trace_copy_pages)]
            self._compiled = {key: future.result() for key, future in futures.items()}
            self._set_up, self._copy_pages = (future.result() for future in small)

    def prepare(self, state: StepState, setups: Sequence[SlotSetup], copies: Sequence[PageCopy]) -> StepState:
        """The state with slots set up and pages copied; given up as a step gives it up."""
        assert self._set_up is not None and self._copy_pages is not None
        for setup in setups:
            state = state._replace(tables=self._set_up(state.tables, slot_row(setup, self.program.config.vocab_size)))
        for sources, targets in copy_arrays(copies, self.program.num_pages):
            state = state._replace(pools=tuple(self._copy_pages(pools, sources, targets) for pools in state.pools))
        return state

    def choose(self, plan: StepPlan, variant: str) -> tuple[BatchShape, jax.stages.Compiled]:
        """The program of a step and its shape."""
        if any(row.targets is not None for row in plan.prefill):
            shape = self.buckets.scoring_shape
        else:
            decode_only = not plan.prefill and ("any" in self._decode_variants or variant in self._decode_variants)
            shape = self.buckets.shape_for(plan.num_tokens, decode_only)
        shape = self._shapes[shape]
        compiled = self._compiled.get((shape, variant)) or self._compiled[shape, "any"]
        return shape, compiled

    def items(self) -> Iterable[tuple[ProgramKey, jax.stages.Compiled]]:
        """Every program of a step."""
        return self._compiled.items()

    @property
    def temporary_bytes(self) -> int:
        """Most memory on a device that any program takes while it runs."""
        analyses = [compiled.memory_analysis() for compiled in self._compiled.values()]
        return max((analysis.temp_size_in_bytes for analysis in analyses if analysis is not None), default=0)


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program and gives back the memory that took, so that what many leave does not add up."""
    compiled = lowered.compile()
    return_freed_memory()
    return compiled


class StepRunner:
    """Runs plans on one data slice.

    Args:
        steps: Compiled programs.
        params: Parameters as the program packs them (``ModelProgram.packing``).
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
        )
        self._masks = TokenMasks(program.config.vocab_size)
        self._biased_slots: set[int] = set()
        self._state = program.empty_state()
        self._open_masks = {
            rows: jax.device_put(np.full(program.mask_shape(rows), -1, np.int32), program.replicated)
            for rows in {shape.num_rows for shape in steps.buckets.shapes()}
        }

    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts a step and returns without waiting for it; steps run in the order they are launched."""
        builder, masks = self._builder, self._masks
        builder.apply(plan)
        masks.apply(plan.setups)
        setups = [setup for setup in plan.setups if self._needs_row(setup)]
        if setups or plan.copies:
            self._state = self._steps.prepare(self._state, setups, plan.copies)
        masked = masks.rows(plan)
        is_full = bool(masked) or self._steps.program.is_always_full
        variant = builder.variant(plan, is_full)
        shape, compiled = self._steps.choose(plan, variant)
        mask = masks.array(masked, shape.num_rows) if masked else self._open_masks[shape.num_rows]
        buffer = builder.build(plan, shape, VARIANTS.index(variant))
        self._state, output = compiled(self._params, self._state, buffer, mask)
        if variant != "full":
            output = output._replace(logprobs=None)
        if not any(row.is_pooled for row in plan.prefill):
            output = output._replace(sums=None)
        return PendingStep(output, plan.num_rows)

    def warm_up(self) -> None:
        """Runs every program once, each with a row of one token, and waits for them; before the first request.

        XLA puts part of its work off until then: on CPUs its library of dots makes its kernels, 0.3 to 0.6 s in each
        program of a model of 30 layers.
        """
        slot, page, token = 0, 0, 0
        self._builder.apply(_EMPTY_STEP._replace(grants=[PageGrant(slot, 0, [page])]))
        decode = _EMPTY_STEP._replace(decode_slots=[slot], decode_positions=[0], decode_tokens=[token])
        prefill = _EMPTY_STEP._replace(prefill=[PrefillRow(slot, 0, [token], samples=True, targets=[token])])
        self._state = self._steps.prepare(self._state, [SlotSetup(slot, Sampling(), 1)], [PageCopy(page, page)])
        for (shape, variant), compiled in self._steps.items():
            number = VARIANTS.index("greedy" if variant == "any" else variant)
            buffer = self._builder.build(decode if shape.decode_only else prefill, shape, number)
            self._state, _ = compiled(self._params, self._state, buffer, self._open_masks[shape.num_rows])
        jax.block_until_ready(self._state)
        return_freed_memory()

    def _needs_row(self, setup: SlotSetup) -> bool:
        """Whether a slot's tables must be written: its request reads them, or would find the bias of the one before."""
        slot, sampling = setup.slot, setup.sampling
        was_biased = slot in self._biased_slots
        if sampling.logit_bias:
            self._biased_slots.add(slot)
        elif was_biased:
            self._biased_slots.remove(slot)
        return was_biased or bool(sampling.logit_bias or sampling.tracked_ids) or sampling.has_penalties

    def release(self) -> None:
        """Gives the device's memory back."""
        for array in jax.tree.leaves((self._params, self._state, self._open_masks)):
            array.delete()
