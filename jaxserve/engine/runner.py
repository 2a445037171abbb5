"""Owner of what is on the devices of one data slice: parameters, pages, compiled steps. Takes plans, gives tokens."""

import concurrent.futures
import os
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.engine.batch import BatchBuilder
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.memory import return_freed_memory
from jaxserve.engine.plan import StepPlan
from jaxserve.engine.step_batch import BatchShape
from jaxserve.engine.steps import ModelProgram, StepOutput, trace_step
from jaxserve.sampling.sampler import VARIANTS, TokenLogprobs


class StepResult(NamedTuple):
    """What the host learns of a step: each row's token, and logprobs where a row asked for them."""

    tokens: list[int]
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None


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
        return StepResult(output.tokens[: self._num_rows].tolist(), output.logprobs, output.prompt_logprobs)


ProgramKey = tuple[BatchShape, str]


def program_keys(buckets: Buckets, platform: str) -> list[ProgramKey]:
    """Batch shape and sampler of every program to compile.

    On CPUs there is one program for each shape, which chooses its sampler when it runs: that costs nothing there. An
    accelerator would stop for the choice, so there each decode shape has a program for greedy and one for sampled rows,
    and decode steps that need more than that take a mixed shape, whose programs choose.
    """
    decode = ("any",) if platform == "cpu" else ("greedy", "sampled")
    shapes = buckets.shapes()
    return [(shape, variant) for shape in shapes for variant in (decode if shape.decode_only else ("any",))]


class CompiledSteps:
    """The compiled programs of a model."""

    def __init__(self, program: ModelProgram, buckets: Buckets):
        self.program = program
        self.buckets = buckets
        self.keys = program_keys(buckets, program.mesh.devices.flat[0].platform)
        self._decode_variants = {variant for shape, variant in self.keys if shape.decode_only}
        self._compiled: dict[ProgramKey, jax.stages.Compiled] = {}

    def compile(self) -> None:
        """Compiles every program: traced one after the other, compiled on all cores."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {}
            for shape, variant in self.keys:
                lowered = trace_step(self.program, shape, variant).lower()
                futures[shape, variant] = pool.submit(_compile, lowered)
            self._compiled = {key: future.result() for key, future in futures.items()}

    def choose(self, plan: StepPlan, variant: str) -> tuple[BatchShape, jax.stages.Compiled]:
        """The program of a step and its shape."""
        if any(row.targets is not None for row in plan.prefill):
            shape = self.buckets.scoring_shape
        else:
            decode_only = not plan.prefill and ("any" in self._decode_variants or variant in self._decode_variants)
            shape = self.buckets.shape_for(plan.num_tokens, decode_only)
        compiled = self._compiled.get((shape, variant)) or self._compiled[shape, "any"]
        return shape, compiled

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
        params: Parameters in the module's flat order, sharded as the program says.
    """

    def __init__(self, steps: CompiledSteps, params: tuple[jax.Array, ...]):
        self._steps = steps
        self._params = params
        program = steps.program
        self._builder = BatchBuilder(program.num_slots, steps.buckets.table_pages, program.page_size, program.num_pages)
        self._state = program.empty_state()
        self._open_masks = {
            rows: jax.device_put(np.full(program.mask_shape(rows), -1, np.int32), program.replicated)
            for rows in {shape.num_rows for shape in steps.buckets.shapes()}
        }

    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts a step and returns without waiting for it; steps run in the order they are launched."""
        program, builder = self._steps.program, self._builder
        builder.apply(plan)
        variant = builder.variant(plan)
        shape, compiled = self._steps.choose(plan, variant)
        mask = builder.vocabulary_mask(plan, shape.num_rows, program.config.vocab_size)
        buffer = builder.build(plan, shape, VARIANTS.index(variant))
        device_mask = self._open_masks[shape.num_rows] if mask is None else mask
        self._state, output = compiled(self._params, self._state, buffer, device_mask)
        wanted = output if variant == "full" else output._replace(logprobs=None)
        return PendingStep(wanted, plan.num_rows)

    def release(self) -> None:
        """Gives the device's memory back."""
        for array in jax.tree.leaves((self._params, self._state, self._open_masks)):
            array.delete()
