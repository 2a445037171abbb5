"""Owner of what is on the devices of one data slice: parameters, pages, compiled steps. Takes plans, gives tokens."""

import concurrent.futures
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.batch import BatchBuilder, BatchShape
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.memory import return_freed_memory
from jaxserve.engine.plan import StepPlan
from jaxserve.engine.steps import ModelProgram, StepOutput, StepState, trace_step
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


class CompiledSteps:
    """The compiled programs of a model: one for each batch shape, or one for each shape and sampler variant.

    On CPUs one program chooses its sampler when it runs, which costs nothing there and compiles a third of the
    programs; an accelerator would stop for the choice.
    """

    def __init__(self, program: ModelProgram, buckets: Buckets):
        self.program = program
        self.buckets = buckets
        platform = program.mesh.devices.flat[0].platform
        self._variants = ("any",) if platform == "cpu" else VARIANTS
        self._compiled: dict[tuple[BatchShape, str], jax.stages.Compiled] = {}

    @property
    def num_programs(self) -> int:
        """Programs announced."""
        return len(self.buckets.shapes()) * len(self._variants)

    def compile(self) -> None:
        """Compiles every program: traced one after the other, compiled on all cores."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {}
            for shape in self.buckets.shapes():
                for variant in self._variants:
                    lowered = trace_step(self.program, shape, variant).lower()
                    futures[shape, variant] = pool.submit(lowered.compile)
            self._compiled = {key: future.result() for key, future in futures.items()}
        return_freed_memory()

    def get(self, shape: BatchShape, variant: str) -> jax.stages.Compiled:
        """The program of a shape and sampler variant."""
        return self._compiled[shape, variant if variant in self._variants else "any"]

    @property
    def temporary_bytes(self) -> int:
        """Most memory on a device that any program takes while it runs."""
        analyses = [compiled.memory_analysis() for compiled in self._compiled.values()]
        return max((analysis.temp_size_in_bytes for analysis in analyses if analysis is not None), default=0)

    @property
    def code_bytes(self) -> int:
        """Machine code of all programs together."""
        analyses = [compiled.memory_analysis() for compiled in self._compiled.values()]
        return sum(analysis.generated_code_size_in_bytes for analysis in analyses if analysis is not None)


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
        self._state = _zeros(program)
        self._open_masks = {
            rows: jax.device_put(np.full(program.mask_shape(rows), -1, np.int32), program.replicated)
            for rows in {shape.num_rows for shape in steps.buckets.shapes()}
        }

    def launch(self, plan: StepPlan) -> PendingStep:
        """Starts a step and returns without waiting for it; steps run in the order they are launched."""
        program, builder = self._steps.program, self._builder
        builder.apply(plan)
        shape = self._steps.buckets.shape_for(plan.num_tokens, not plan.prefill)
        mask = builder.vocabulary_mask(plan, shape.num_rows, program.config.vocab_size)
        variant = self._variant(plan, mask is not None)
        buffer = builder.build(plan, shape, VARIANTS.index(variant))
        device_mask = self._open_masks[shape.num_rows] if mask is None else mask
        self._state, output = self._steps.get(shape, variant)(self._params, self._state, buffer, device_mask)
        wanted = output if variant == "full" else output._replace(logprobs=None)
        if all(row.targets is None for row in plan.prefill):
            wanted = wanted._replace(prompt_logprobs=None)
        return PendingStep(wanted, plan.num_rows)

    def release(self) -> None:
        """Gives the device's memory back."""
        for array in jax.tree.leaves((self._params, self._state, self._open_masks)):
            array.delete()

    def _variant(self, plan: StepPlan, is_masked: bool) -> str:
        """The simplest sampler that does what every row asks for."""
        slots = plan.decode_slots + [row.slot for row in plan.prefill if row.samples]
        if is_masked or (self._builder.num_logprobs[slots] >= 0).any():
            return "full"
        return "sampled" if (self._builder.temperature[slots] > 0).any() else "greedy"


def _zeros(program: ModelProgram) -> StepState:
    """Empty pools and slots, made on the devices."""
    abstract = program.abstract_state()
    shardings = jax.tree.map(lambda struct: struct.sharding, abstract)
    make = jax.jit(
        lambda: jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), abstract), out_shardings=shardings
    )
    return make()
