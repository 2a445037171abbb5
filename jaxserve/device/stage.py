"""A stage of a model on its devices: its compiled programs, its weights and its state."""

import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.device.buckets import Buckets
from jaxserve.device.catching_up import CatchUp, chunk_steps, trace_chunks
from jaxserve.device.compiling import Compiling, bytes_of, submit
from jaxserve.device.draft_inputs import drafting_shape, skips_padding
from jaxserve.device.drafting import trace_drafts
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.split_steps import SplitStep, trace_model, trace_sampler, trace_scorer
from jaxserve.device.state_updates import (
    copy_arrays,
    slot_row,
    trace_copy_pages,
    trace_copy_states,
    trace_set_up,
)
from jaxserve.device.step_batch import BatchShape, LatestTokens
from jaxserve.device.step_state import StepState
from jaxserve.device.steps import HiddenOutput, trace_hidden, trace_step
from jaxserve.layers.kv_layout import PoolKind
from jaxserve.scheduling.plan import PageCopy, StepPlan
from sharding import is_shared, on_all, own_devices

StepKey = tuple[BatchShape, str]
"""Batch shape and sampler variant of a step; ``any`` selects the variant at run time."""

CompiledStep = jax.stages.Compiled | SplitStep
"""Maps (packed parameters, ``StepState``, buffer, vocabulary mask) to (``StepState``, ``StepOutput``).

After other stages, it also has their hidden states as an argument.
"""


def step_keys(buckets: Buckets, platform: str, always_full: bool = False) -> list[StepKey]:
    """Return the shape and sampler variant of every step to compile.

    On CPUs the sampler is a separate program that selects its variant at run time, so there is one step per shape. On
    accelerators that selection would stall, so decode shapes have a greedy and a sampled variant, and decode steps that
    need the full sampler run in a mixed shape, which selects at run time. If every step needs the full sampler
    (``always_full``), decode shapes have only that variant. One more mixed shape computes prompt logprobs.
    """
    if platform == "cpu":
        return [(shape, "any") for shape in buckets.shapes()]
    decode = ("full",) if always_full else ("greedy", "sampled")
    shapes = [*buckets.shapes(), buckets.scoring_shape]
    return [(shape, variant) for shape in shapes for variant in (decode if shape.decode_only else ("any",))]


def num_programs(
    buckets: Buckets,
    platform: str,
    always_full: bool = False,
    num_stages: int = 1,
    drafting: ShardedModel | None = None,
) -> int:
    """Return the number of programs; on CPUs it includes a sampler per ``SamplerShape``, the scorer, and the drafting
    after steps of a last stage ``drafting``."""
    keys, others = step_keys(buckets, platform, always_full), (num_stages - 1) * len(buckets.shapes())
    if drafting is not None and platform == "cpu":
        shapes = _drafting_shapes(drafting, buckets)
        chunks = _chunk_shapes(drafting, shapes)
        others += len(set(shapes.values())) + (0 if chunks is None else len(set(chunks[0].values())))
    return others + len(keys) + (len({shape.sampler for shape, _ in keys}) + 1 if platform == "cpu" else 0)


def _drafting_shapes(sharded: ShardedModel, buckets: Buckets) -> dict[BatchShape, BatchShape]:
    """Return the shape of the program that drafts after steps of each shape; empty without a drafter."""
    if sharded.drafter is None:
        return {}
    return {shape: drafting_shape(sharded, shape, buckets.shapes()) for shape in buckets.shapes()}


def _chunk_shapes(
    sharded: ShardedModel, drafting: Mapping[BatchShape, BatchShape]
) -> tuple[dict[BatchShape, BatchShape], BatchShape] | None:
    """Return the shapes of the drafting after decode steps, by those of the steps, and after chunks of their tokens if
    the drafter can catch up."""
    if sharded.drafter is None or not sharded.is_first or not skips_padding(sharded):
        return None
    larger = max((to for to in drafting.values() if not to.decode_only), key=lambda shape: shape.num_tokens)
    smaller = {
        shape: to
        for shape, to in drafting.items()
        if shape.decode_only and not shape.has_drafts and chunk_steps(sharded, to) > 1
        if to.num_rows <= larger.num_rows and to.num_tokens <= larger.num_tokens
    }
    return (smaller, larger) if smaller else None


class Stage:
    """A model, or consecutive layers of it, on its devices.

    A stage is compiled, then loaded. The last one samples and has the state of the slots; those before it hand hidden
    states over, and have only pages.

    Args:
        model: The model, or its layers.
        buckets: Batch shapes.
        platform: JAX platform that decides how steps are split into programs; None for the devices' platform.

    Attributes:
        is_here: Whether this process has devices of it. Otherwise it has no programs, weights or state.
        is_led: Whether this process reports what each of its processes knows.
        keys: Shape and sampler variant of each step.
        params: Packed parameters (``ShardedModel.packing``).
        state: The pages, and the state of all slots.
        catch_up: What the drafter takes in later; None where it takes in the tokens of a step right after it.
    """

    params: tuple[jax.Array, ...]
    state: StepState
    catch_up: CatchUp | None = None

    def __init__(self, model: ShardedModel, buckets: Buckets, platform: str | None = None):
        self.model = model
        given = {"num_arguments": len(model.arguments), "state_distance": model.state_distance}
        self.buckets = dataclasses.replace(buckets, **given)
        own = own_devices(model.mesh)
        self.is_here = bool(own)
        self.is_led = self.is_here and own[0] == model.mesh.devices.flat[0]
        self._on_all = on_all(model.mesh) if self.is_here and model.num_lanes > 1 and is_shared(model.mesh) else None
        self.platform = platform or model.mesh.devices.flat[0].platform
        if model.is_last:
            self.keys = step_keys(self.buckets, self.platform, model.is_always_full)
        else:
            self.keys = [(shape, "any") for shape in self.buckets.shapes()]
        self._decode_variants = {variant for shape, variant in self.keys if shape.decode_only}
        self._steps: dict[StepKey, CompiledStep] = {}
        self._plain_steps: dict[StepKey, CompiledStep] = {}
        self._set_up: jax.stages.Compiled | None = None
        self._models = [model, *([] if model.drafter is None else [model.drafter.sharded])]
        self._copies: dict[tuple[bool, PoolKind], jax.stages.Compiled] = {}
        self._copy_states: jax.stages.Compiled | None = None

    def compile(self) -> None:
        """Trace the programs one after the other, and compile them on all cores."""
        if not self.is_here:
            return
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            set_up = submit(pool, trace_set_up(self.model)) if self.model.is_last else None
            copies = {
                (model.is_drafter, kind): submit(pool, trace_copy_pages(model, kind, count))
                for model in self._models
                for kind, count in dict(zip(model.kv_layout.pools, model.kv_layout.counts, strict=True)).items()
            }
            copy_states = submit(pool, trace_copy_states(self.model)) if any(self.model.state_specs) else None
            self._steps = self._compile_steps(pool)
            self._plain_steps = {key: _without_scorer(step) for key, step in self._steps.items()}
            self._copies = {kind: future.result() for kind, future in copies.items()}
            self._set_up = None if set_up is None else set_up.result()
            self._copy_states = None if copy_states is None else copy_states.result()

    def _compile_steps(self, pool: concurrent.futures.Executor) -> dict[StepKey, CompiledStep]:
        model, max_tokens = self.model, self.buckets.mixed_tokens[-1]
        if not model.is_last:
            futures = {(shape, variant): submit(pool, trace_hidden(model, shape)) for shape, variant in self.keys}
            return {key: future.result() for key, future in futures.items()}
        if self.platform != "cpu":
            return self._compile_whole_steps(pool)
        scorer = submit(pool, trace_scorer(model, max_tokens))
        sizes = sorted({shape.sampler for shape, _ in self.keys})
        samplers = {size: submit(pool, trace_sampler(model, size)) for size in sizes}
        drafting = _drafting_shapes(model, self.buckets)
        drafts = {shape: submit(pool, trace_drafts(model, shape)) for shape in dict.fromkeys(drafting.values())}
        futures = {
            (shape, variant): submit(pool, trace_model(model, shape, max_tokens, drafting.get(shape)))
            for shape, variant in self.keys
        }
        chunk_shapes = _chunk_shapes(model, drafting)
        if chunk_shapes is not None:
            smaller, larger = chunk_shapes
            chunks = {to: submit(pool, trace_chunks(model, to, larger)) for to in set(smaller.values())}
            by_shape = {shape: chunks[to].result() for shape, to in smaller.items()}
            self.catch_up = CatchUp(model, by_shape, drafts[larger].result(), larger.num_tokens)
        return {
            (shape, variant): SplitStep(
                future.result(),
                samplers[shape.sampler].result(),
                None if shape.decode_only else scorer.result(),
                drafts[drafting[shape]].result() if drafts else None,
            )
            for (shape, variant), future in futures.items()
        }

    def _compile_whole_steps(self, pool: concurrent.futures.Executor) -> dict[StepKey, CompiledStep]:
        """Compile steps of one program each.

        Those of as many tokens have the same matmuls. All but one wait for the first, whose autotuning results XLA then
        finds in its cache, in place of measuring the same candidates on the device side by side.
        """
        first, futures = dict[int, Compiling](), dict[StepKey, Compiling]()
        for shape, variant in self.keys:
            after = first.get(shape.num_tokens)
            futures[shape, variant] = submit(pool, trace_step(self.model, shape, variant), after)
            first.setdefault(shape.num_tokens, futures[shape, variant])
        return {key: future.result() for key, future in futures.items()}

    def load(self, params: tuple[jax.Array, ...], state: StepState | None = None) -> None:
        """Set the packed parameters and the state; None allocates the state."""
        self.params = params
        if self.is_here:
            self.state = self.model.empty_state() if state is None else state

    def choose(self, plans: Sequence[StepPlan], variant: str) -> tuple[BatchShape, CompiledStep | None]:
        """Return the batch shape and the compiled step of the last stage for the plans of all lanes; no step if other
        processes have it."""
        scores_prompt = any(plan.targets for plan in plans)
        if scores_prompt and self.platform != "cpu":
            shape = self.buckets.scoring_shape
        else:
            is_compiled = "any" in self._decode_variants or variant in self._decode_variants
            decode_only = is_compiled and all(plan.is_decode_only for plan in plans)
            num_tokens = max(plan.num_tokens for plan in plans)
            if decode_only and any(plan.has_drafts for plan in plans):
                shape = self.buckets.draft_shape_for(max(plan.num_rows for plan in plans), num_tokens)
            else:
                shape = self.buckets.shape_for(num_tokens, decode_only)
        steps = self._steps if scores_prompt else self._plain_steps
        if not self.is_here:
            return shape, None
        return shape, steps.get((shape, variant)) or steps[shape, "any"]

    def take_in_postponed(self) -> None:
        """Let the drafter take in what has been left to later."""
        if self.catch_up is not None:
            self.state = self.catch_up.run(self.params, self.state)

    def readable(self, output: Any) -> Any:
        """Return outputs that this process can read: where others have some lanes, their parts are gathered."""
        return output if self._on_all is None else jax.tree.map(self._on_all, output)

    def reported(self, expert_tokens: jax.Array) -> list[jax.Array]:
        """Return the expert tokens of a step, readable; nothing if another process reports them."""
        readable = self.readable(expert_tokens)
        return [readable] if self.is_led else []

    def run_layers(
        self, shape: BatchShape, latest: LatestTokens, buffer: np.ndarray, *hidden: jax.Array
    ) -> HiddenOutput:
        """Launch a step of a stage that is not the last; scoring prompts is left to the last.

        Args:
            shape: Batch shape.
            latest: Latest tokens of all slots.
            buffer: The step's buffer.
            hidden: Hidden states of the stage before, unless this is the first.
        """
        step: Any = self._steps[dataclasses.replace(shape, scores_prompt=False), "any"]
        pools, output = step(self.params, self.state.pools, latest, buffer, *hidden)
        self.state = self.state._replace(pools=pools)
        return output

    def set_up_slots(self, rows: Sequence[Sequence[np.ndarray]]) -> None:
        """Write slots' rows (see ``slot_row``) of each lane to the state of the last stage."""
        if not self.is_here:
            return
        assert self._set_up is not None
        nothing = slot_row(None, self.model.config.vocab_size)
        for lanes in itertools.zip_longest(*rows, fillvalue=nothing):
            tables = self._set_up(self.state.tables, np.concatenate(lanes))
            self.state = self.state._replace(tables=tables)

    def copy_pages(self, copies: Sequence[Sequence[PageCopy]]) -> None:
        """Copy pages of each lane in all pools."""
        if not self.is_here:
            return
        programs = [self._copies[model.is_drafter, kind] for model in self._models for kind in model.kv_layout.pools]
        places, states = [*range(len(self.state.pools))], self.model.kv_layout.state_places
        del places[states]
        for pages in copy_arrays(copies, self.model.num_pages):
            pools = [*self.state.pools]
            for copy, place in zip(programs, places, strict=True):
                pools[place] = copy(pools[place], *pages)
            self.state = self.state._replace(pools=tuple(pools))

    def copy_states(self, copies: Sequence[Sequence[PageCopy]]) -> None:
        """Copy state pages of each lane in all recurrent layers."""
        if self._copy_states is None:
            return
        places = self.model.kv_layout.state_places
        for pages in copy_arrays(copies, self.model.num_states):
            pools = [*self.state.pools]
            pools[places] = self._copy_states(self.state.pools[places], *pages)
            self.state = self.state._replace(pools=tuple(pools))

    def items(self) -> Iterable[tuple[StepKey, CompiledStep | None]]:
        """Return all steps; on CPUs those of mixed shapes include the scorer. None are those of other processes."""
        return self._steps.items() if self.is_here else ((key, None) for key in self.keys)

    def delete(self) -> None:
        """Free the devices' memory."""
        self.delete_state()
        for array in jax.tree.leaves(self.params):
            array.delete()

    def delete_state(self) -> None:
        """Free the memory of the state."""
        if self.is_here:
            for array in jax.tree.leaves(self.state):
                array.delete()

    @property
    def temporary_bytes(self) -> int:
        """Peak temporary memory per device over all steps, in bytes, with the hidden states handed over."""
        return max(map(_temporary_bytes, self._steps.values()), default=0)


def _without_scorer(step: CompiledStep) -> CompiledStep:
    """Return the step for plans without prompt logprobs."""
    return dataclasses.replace(step, scorer=None) if isinstance(step, SplitStep) else step


def _temporary_bytes(step: CompiledStep) -> int:
    """Return the peak temporary memory of a step's programs, including the outputs passed between them."""
    if not isinstance(step, SplitStep):
        return sum(bytes_of(step))
    programs = [each for each in (step.model, step.sampler, step.scorer, step.drafts) if each is not None]
    return bytes_of(step.model).outputs + max(bytes_of(program).temporary for program in programs)
