"""Pipeline stages before the last: their programs, and the hand-over of hidden states and tokens between stages.

Every stage runs every step, one after the other, and while one stage runs a step, the stages before it can run the next
ones. Hidden states go from each stage to the next; the tokens that the last stage samples go back to the others. All of
that is queued on the devices: the host waits for nothing.
"""

import collections
import concurrent.futures
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.device.buckets import Buckets
from jaxserve.device.copied_pages import PageCopies
from jaxserve.device.program import ModelProgram, shardings
from jaxserve.device.programs import bytes_of, submit
from jaxserve.device.step_batch import BatchShape, LatestTokens
from jaxserve.device.steps import attention_settings
from jaxserve.layers.attention import Pools
from jaxserve.scheduling.plan import ON_DEVICE, PageCopy, StepPlan
from jaxserve.scheduling.row_starts import as_array


class StageOutput(NamedTuple):
    """Outputs of a stage besides its pages.

    Attributes:
        hidden: Hidden state of each query token after the stage's last layer.
        expert_tokens: Tokens routed to each expert of each of its layers with experts; None unless they are counted.
    """

    hidden: Float[Array, "T D"]
    expert_tokens: Int[Array, "layers E"] | None


def trace_stage(program: ModelProgram, shape: BatchShape) -> jax.stages.Traced:
    """Trace a stage that is not the last, for the steps of a batch shape.

    The traced function maps (packed parameters, pools, ``LatestTokens``, buffer, hidden states) to (pools,
    ``StageOutput``) and donates the pools. The first stage has no hidden states among its arguments.
    """
    program = program.for_shape(shape)
    attention = attention_settings(program, shape)

    def stage(
        arrays: tuple[Array, ...],
        pools: tuple[Pools, ...],
        latest: LatestTokens,
        buffer: Int[Array, " size"],
        hidden: Float[Array, "T D"] | None = None,
    ) -> tuple[tuple[Pools, ...], StageOutput]:
        batch = program.unpack(buffer, shape, latest)
        x, written, expert_tokens = program.model(arrays).hidden(batch, pools, attention, hidden)
        return tuple(written), StageOutput(x, expert_tokens)

    pools, buffer = program.abstract_all_pools(), program.rows_struct((shape.buffer_size,), np.int32)
    given = program.abstract_input(shape.num_tokens)
    arguments = (program.abstract_params, pools, program.abstract_latest(), buffer, *given)
    return program.trace(stage, arguments, (shardings(pools), program.rows_sharding), donated=[1])


class StageSteps:
    """The compiled programs of a stage that is not the last: one per batch shape, and one that copies pages.

    Args:
        program: The stage.
        buckets: Batch shapes.
    """

    def __init__(self, program: ModelProgram, buckets: Buckets):
        self.program = program
        arguments = len(program.arguments)
        self._shapes = [dataclasses.replace(shape, num_arguments=arguments) for shape in buckets.shapes()]
        self._steps: dict[BatchShape, jax.stages.Compiled] = {}
        self.copies = PageCopies(program)

    def compile(self) -> None:
        """Trace the programs one after the other, and compile them on all cores."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            self.copies.compile(pool)
            steps = {shape: submit(pool, trace_stage(self.program, shape)) for shape in self._shapes}
            self._steps = {shape: future.result() for shape, future in steps.items()}

    def step(self, shape: BatchShape) -> jax.stages.Compiled:
        """Return the program of a shape; scoring prompts is left to the last stage."""
        return self._steps[dataclasses.replace(shape, scores_prompt=False)]

    @property
    def temporary_bytes(self) -> int:
        """Peak temporary memory per device over all steps, in bytes, with the hidden states handed over."""
        return max(sum(bytes_of(step)) for step in self._steps.values())


class StageRunner:
    """A stage that is not the last, on its devices.

    Attributes:
        program: The stage.
        params: Packed parameters.
        pools: The pages.

    Args:
        steps: Compiled programs.
        params: Packed parameters.
        pools: The pages; None allocates them.
    """

    def __init__(self, steps: StageSteps, params: tuple[jax.Array, ...], pools: tuple[Pools, ...] | None = None):
        self.program = steps.program
        self.params = params
        self.pools = steps.program.empty_pools() if pools is None else pools
        self._steps = steps

    def run(self, shape: BatchShape, latest: LatestTokens, buffer: np.ndarray, *hidden: jax.Array) -> StageOutput:
        """Launch a step, given the hidden states of the stage before unless this is the first."""
        self.pools, output = self._steps.step(shape)(self.params, self.pools, latest, buffer, *hidden)
        return output

    def copy_pages(self, copies: Sequence[Sequence[PageCopy]]) -> None:
        """Copy pages of each lane."""
        self.pools = self._steps.copies.copy(self.pools, copies)

    def delete(self) -> None:
        """Free the devices' memory."""
        for array in jax.tree.leaves((self.params, self.pools)):
            array.delete()


class _Returned(NamedTuple):
    """The latest tokens of all slots after a step, on the devices of each stage before the last."""

    step: int
    latest: list[LatestTokens]


class Pipeline:
    """The stages before the last, if any, and what goes to the last one and comes back.

    A row whose first token is ``ON_DEVICE`` needs the tokens of the step that last sampled for its slot, and so cannot
    begin before that step has passed the last stage. ``run`` uses the latest tokens after the earliest step that has
    all of them, so that stages wait for no other steps.

    Args:
        stages: The stages before the last, in order.
        last: The last stage.
    """

    def __init__(self, stages: Sequence[StageRunner], last: ModelProgram):
        self.stages = tuple(stages)
        programs = [*(stage.program for stage in stages), last]
        self._next = [program.abstract_hidden(1).sharding for program in programs[1:]]
        self._latest = [shardings(program.abstract_latest()) for program in programs[:-1]]
        empty = jax.tree.map(lambda struct: np.zeros(struct.shape, struct.dtype), last.abstract_latest())
        self._returned = collections.deque([self._sent(-1, empty)], maxlen=len(programs) + 1)
        self._sampled_at = np.full((last.num_lanes, last.num_slots), -1)
        self._step = 0

    def run(
        self, plans: Sequence[StepPlan], shape: BatchShape, buffer: np.ndarray
    ) -> tuple[list[jax.Array], list[Any]]:
        """Launch a step of every stage; return the last stage's input, which is empty if it is the first one too, and
        the expert tokens of each stage that counts them.

        Args:
            plans: Plan of each lane.
            shape: Batch shape.
            buffer: The step's buffer.
        """
        hidden, expert_tokens = list[jax.Array](), []
        if not self.stages:
            return hidden, expert_tokens
        returned = self._needed(plans)
        for stage, latest, sharding in zip(self.stages, returned.latest, self._next, strict=True):
            output = stage.run(shape, latest, buffer, *hidden)
            hidden = [jax.device_put(output.hidden, sharding)]
            if output.expert_tokens is not None:
                expert_tokens.append(output.expert_tokens)
        return hidden, expert_tokens

    def send_back(self, plans: Sequence[StepPlan], latest: LatestTokens) -> None:
        """Send the latest tokens of all slots back from the last stage, once the step is launched there."""
        if not self.stages:
            return
        for sampled_at, plan in zip(self._sampled_at, plans, strict=True):
            sampled_at[as_array(plan.slots)[as_array(plan.num_samples) > 0]] = self._step
        self._returned.append(self._sent(self._step, latest))
        self._step += 1

    def copy_pages(self, copies: Sequence[Sequence[PageCopy]]) -> None:
        """Copy pages of each lane in every stage."""
        for stage in self.stages:
            stage.copy_pages(copies)

    def delete(self) -> None:
        """Free the devices' memory."""
        for stage in self.stages:
            stage.delete()

    def _sent(self, step: int, latest: LatestTokens) -> _Returned:
        """Copy the latest tokens after a step to each stage; equal shardings make the copies asynchronous."""
        return _Returned(step, [jax.device_put(latest, sharding) for sharding in self._latest])

    def _needed(self, plans: Sequence[StepPlan]) -> _Returned:
        """Return the latest tokens after the earliest step that has those that the plans read."""
        needed = -1
        for sampled_at, plan in zip(self._sampled_at, plans, strict=True):
            slots = as_array(plan.slots)[as_array(plan.starts) == ON_DEVICE]
            needed = max(needed, sampled_at[slots].max(initial=-1))
        return next(returned for returned in self._returned if returned.step >= needed)
