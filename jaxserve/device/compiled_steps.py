"""The compiled programs of a model: its steps, and the small ones that set up a slot or copy pages before a step."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxserve.device.buckets import Buckets
from jaxserve.device.memory import return_freed_memory
from jaxserve.device.program import ModelProgram, StepState, shardings
from jaxserve.device.split_steps import SplitStep, trace_model, trace_sampler, trace_scorer
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.steps import trace_step
from jaxserve.layers.kv_layout import PoolKind
from jaxserve.sampling.penalties import IN_PROMPT, MAX_TRACKED, SlotTables
from jaxserve.scheduling.plan import PageCopy, SlotSetup, StepPlan

COPY_CAPACITY = 8
"""Pages that one call copies."""

Pools = tuple[Array, Array]


def trace_set_up(program: ModelProgram) -> jax.stages.Traced:
    """Traces what gives a slot its row of the tables: takes (``SlotTables``, row, as ``slot_row`` makes it)."""
    vocab_size = program.config.vocab_size
    tables = program.abstract_state().tables

    def set_up(tables: SlotTables, row: Int[Array, " size"]) -> SlotTables:
        counts, bias, tracked_ids = (lax.slice(row, (start,), (stop,))[None] for start, stop in _row_parts(vocab_size))
        parts = SlotTables(counts, lax.bitcast_convert_type(bias, jnp.float32), tracked_ids)
        return jax.tree.map(lambda table, part: lax.dynamic_update_slice(table, part, (row[0], 0)), tables, parts)

    row = program.whole((_row_parts(vocab_size)[-1][1],), jnp.int32)
    return jax.jit(set_up, donate_argnums=0, out_shardings=shardings(tables)).trace(tables, row)


def slot_row(setup: SlotSetup, vocab_size: int) -> np.ndarray:
    """What ``trace_set_up``'s program writes: slot, token counts, bias (by its bits) and tracked tokens, all int32."""
    sampling = setup.sampling
    parts = _row_parts(vocab_size)
    row = np.zeros(parts[-1][1], np.int32)
    row[0] = setup.slot
    counts, bias, tracked_ids = (row[start:stop] for start, stop in parts)
    if sampling.has_penalties:
        token_ids = np.array(setup.token_ids, np.int64)
        counts += np.bincount(token_ids[setup.num_prompt_tokens :], minlength=vocab_size).astype(np.int32)
        counts[token_ids[: setup.num_prompt_tokens]] |= IN_PROMPT
    for token, added in sampling.logit_bias:
        bias.view(np.float32)[token] += added
    tracked_ids[: len(sampling.tracked_ids)] = sampling.tracked_ids
    return row


def trace_copy_pages(program: ModelProgram, kind: PoolKind, count: int) -> jax.stages.Traced:
    """Traces the copying of pages: takes (pools, sources, targets), for all pools of a kind, one after the other.

    Args:
        program: The model.
        kind: Of the pools.
        count: How many of the kind lie in the same arrays; the same pages of each are copied.
    """
    pools = program.abstract_pools(kind, count)
    pages = program.whole((COPY_CAPACITY,), jnp.int32)

    def copy(pools: Pools, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> Pools:
        if count > 1:
            num_pages = program.pool_pages
            first = num_pages * jnp.arange(count, dtype=jnp.int32)[:, None]
            sources = (first + jnp.minimum(sources, num_pages - 1)).ravel()
            targets = jnp.where(targets < num_pages, first + targets, count * num_pages).ravel()
        return program.kernel.copy_pages(pools, sources, targets)

    return program.trace(copy, (pools, pages, pages), gives=shardings(pools), donated=[0])


def copy_arrays(copies: Sequence[PageCopy], num_pages: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sources and targets of each call of ``trace_copy_pages``'s program; those that only fill up write nothing.

    Calls run in order, and each reads all its sources first: a page may be a source and a later copy's target.
    """
    calls = []
    for start in range(0, len(copies), COPY_CAPACITY):
        pages = np.array(copies[start : start + COPY_CAPACITY], np.int32)
        sources, targets = np.full((2, COPY_CAPACITY), num_pages + 2, np.int32)
        sources[: len(pages)], targets[: len(pages)] = pages.T
        calls.append((sources, targets))
    return calls


def _row_parts(vocab_size: int) -> list[tuple[int, int]]:
    """Return the ranges of counts, bias and tracked tokens in a slot's row, after the slot itself."""
    ends = np.cumsum([1, vocab_size, vocab_size, MAX_TRACKED]).tolist()
    return [*zip(ends[:-1], ends[1:], strict=True)]


StepKey = tuple[BatchShape, str]
"""Batch shape and sampler variant of a step; the variant ``any`` is chosen when the step runs."""

CompiledStep = jax.stages.Compiled | SplitStep
"""Takes (packed parameters, ``StepState``, buffer, vocabulary mask) and gives (``StepState``, ``StepOutput``)."""


def step_keys(buckets: Buckets, platform: str, always_full: bool = False) -> list[StepKey]:
    """Every step to compile.

    On CPUs there is one for each shape: its sampler, a program of its own, chooses its variant when it runs, and a
    further program scores prompts. An accelerator would stop for the choice, so there each decode shape has a program
    for greedy and one for sampled rows, and decode steps that need more than that take a mixed shape, whose programs
    choose; where every step needs more (``always_full``), decode shapes have a program for that alone. A further mixed
    shape scores prompts.
    """
    if platform == "cpu":
        return [(shape, "any") for shape in buckets.shapes()]
    decode = ("full",) if always_full else ("greedy", "sampled")
    shapes = [*buckets.shapes(), buckets.scoring_shape]
    return [(shape, variant) for shape in shapes for variant in (decode if shape.decode_only else ("any",))]


def num_programs(buckets: Buckets, platform: str, always_full: bool = False) -> int:
    """How many programs the steps are: on CPUs a sampler for each ``SamplerShape`` and the scorer come on top."""
    keys = step_keys(buckets, platform, always_full)
    return len(keys) + (len({shape.sampler for shape, _ in keys}) + 1 if platform == "cpu" else 0)


class CompiledSteps:
    """The compiled programs of a model: its steps, and the two small ones that run before steps that need them.

    Args:
        program: The model.
        buckets: Batch shapes.
        platform: JAX's name of the platform whose way of running a step is taken; None for the devices' own.
    """

    def __init__(self, program: ModelProgram, buckets: Buckets, platform: str | None = None):
        self.program = program
        self.buckets = buckets
        self.platform = platform or program.mesh.devices.flat[0].platform
        keys = step_keys(buckets, self.platform, program.is_always_full)
        arguments = len(program.arguments)
        self._shapes = {shape: dataclasses.replace(shape, num_arguments=arguments) for shape, _ in keys}
        self.keys = [(self._shapes[shape], variant) for shape, variant in keys]
        self._decode_variants = {variant for shape, variant in self.keys if shape.decode_only}
        self._steps: dict[StepKey, CompiledStep] = {}
        self._set_up: jax.stages.Compiled | None = None
        self._copy_pages: dict[PoolKind, jax.stages.Compiled] = {}

    def compile(self) -> None:
        """Compiles every program: traced one after the other, compiled on all cores."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            layout = self.program.kv_layout
            counts = dict(zip(layout.pools, layout.counts, strict=True))
            set_up = _submit(pool, trace_set_up(self.program))
            copy_pages = {
                kind: _submit(pool, trace_copy_pages(self.program, kind, count)) for kind, count in counts.items()
            }
            self._steps = self._split_steps(pool) if self.platform == "cpu" else self._whole_steps(pool)
            self._set_up = set_up.result()
            self._copy_pages = {kind: future.result() for kind, future in copy_pages.items()}

    def _whole_steps(self, pool: concurrent.futures.Executor) -> dict[StepKey, CompiledStep]:
        futures = {key: _submit(pool, trace_step(self.program, *key)) for key in self.keys}
        return {key: future.result() for key, future in futures.items()}

    def _split_steps(self, pool: concurrent.futures.Executor) -> dict[StepKey, CompiledStep]:
        program, max_tokens = self.program, self.buckets.mixed_tokens[-1]
        sizes = sorted({shape.sampler for shape, _ in self.keys})
        scorer = _submit(pool, trace_scorer(program, max_tokens))
        samplers = {size: _submit(pool, trace_sampler(program, size)) for size in sizes}
        models = {shape: _submit(pool, trace_model(program, shape, max_tokens)) for shape, _ in self.keys}
        return {
            (shape, variant): SplitStep(
                models[shape].result(),
                samplers[shape.sampler].result(),
                None if shape.decode_only else scorer.result(),
            )
            for shape, variant in self.keys
        }

    def prepare(self, state: StepState, setups: Sequence[SlotSetup], copies: Sequence[PageCopy]) -> StepState:
        """The state with slots set up and pages copied; given up as a step gives it up."""
        assert self._set_up is not None
        kinds = self.program.kv_layout.pools
        for setup in setups:
            state = state._replace(tables=self._set_up(state.tables, slot_row(setup, self.program.config.vocab_size)))
        for sources, targets in copy_arrays(copies, self.program.num_pages):
            pools = zip(kinds, state.pools, strict=True)
            copied = tuple(self._copy_pages[kind](pool, sources, targets) for kind, pool in pools)
            state = state._replace(pools=copied)
        return state

    def choose(self, plan: StepPlan, variant: str) -> tuple[BatchShape, CompiledStep]:
        """The shape of a step and what runs it."""
        scores_prompt = any(plan.columns.targets)
        if scores_prompt and self.platform != "cpu":
            shape = self.buckets.scoring_shape
        else:
            decode_only = plan.is_decode_only and ("any" in self._decode_variants or variant in self._decode_variants)
            shape = self.buckets.shape_for(plan.num_tokens, decode_only)
        shape = self._shapes[shape]
        step = self._steps.get((shape, variant)) or self._steps[shape, "any"]
        if isinstance(step, SplitStep) and not scores_prompt:
            step = dataclasses.replace(step, scorer=None)
        return shape, step

    def items(self) -> Iterable[tuple[StepKey, CompiledStep]]:
        """Every step, those of mixed shapes with the scorer."""
        return self._steps.items()

    @property
    def temporary_bytes(self) -> int:
        """Most memory on a device that any step takes while it runs."""
        return max(map(_temporary_bytes, self._steps.values()), default=0)


def _submit(
    pool: concurrent.futures.Executor, traced: jax.stages.Traced
) -> concurrent.futures.Future[jax.stages.Compiled]:
    return pool.submit(_compile, traced.lower())


def _compile(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a program and release the memory that compiling took, so that it does not add up over many programs."""
    compiled = lowered.compile()
    return_freed_memory()
    return compiled


def _temporary_bytes(step: CompiledStep) -> int:
    """Most memory that a step's programs take while they run, with what the model's hands to the others."""
    if not isinstance(step, SplitStep):
        return _memory(step).temporary
    programs = [step.model, step.sampler, *([step.scorer] if step.scorer is not None else [])]
    return _memory(step.model).made + max(_memory(program).temporary for program in programs)


class _Memory(NamedTuple):
    """Bytes on a device that a program takes only while it runs, and those of arrays that it makes."""

    temporary: int
    made: int


def _memory(program: jax.stages.Compiled) -> _Memory:
    analysis = program.memory_analysis()
    if analysis is None:
        return _Memory(0, 0)
    return _Memory(analysis.temp_size_in_bytes, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
