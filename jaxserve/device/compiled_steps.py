"""The compiled programs of a model, or of its last stage: steps, and small ones that set up a slot and copy pages."""

import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxserve.device.buckets import Buckets
from jaxserve.device.copied_pages import PageCopies
from jaxserve.device.program import ModelProgram, StepState, shardings
from jaxserve.device.programs import bytes_of, submit
from jaxserve.device.split_steps import SplitStep, trace_model, trace_sampler, trace_scorer
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.steps import trace_step
from jaxserve.sampling.penalties import IN_PROMPT, MAX_TRACKED, SlotTables
from jaxserve.scheduling.plan import PageCopy, SlotSetup, StepPlan


def trace_set_up(program: ModelProgram) -> jax.stages.Traced:
    """Trace the program that writes a slot's row of each lane (see ``slot_row``) to the ``SlotTables``."""
    vocab_size, split = program.config.vocab_size, program.split
    tables = program.abstract_state().tables

    def set_up(tables: SlotTables, row: Int[Array, " size"]) -> SlotTables:
        counts, bias, tracked_ids = (lax.slice(row, (start,), (stop,))[None] for start, stop in _row_parts(vocab_size))
        width = tables.bias.shape[1]
        counts, bias = split.part(counts, width), split.part(bias, width)
        parts = SlotTables(counts, lax.bitcast_convert_type(bias, jnp.float32), tracked_ids)
        return jax.tree.map(lambda table, part: table.at[row[0]].set(part[0], mode="drop"), tables, parts)

    row = program.rows_struct((_row_parts(vocab_size)[-1][1],), jnp.int32)
    return program.trace(set_up, (tables, row), out_shardings=shardings(tables), donated=[0])


_NO_SLOT = np.iinfo(np.int32).max


def slot_row(setup: SlotSetup | None, vocab_size: int) -> np.ndarray:
    """Return a lane's part of the int32 input of ``trace_set_up``'s program, which writes nothing for None.

    It has the slot, token counts, bias (float32 bits), and tracked tokens.
    """
    parts = _row_parts(vocab_size)
    row = np.zeros(parts[-1][1], np.int32)
    if setup is None:
        row[0] = _NO_SLOT
        return row
    sampling = setup.sampling
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


def _row_parts(vocab_size: int) -> list[tuple[int, int]]:
    """Return the ranges of counts, bias and tracked tokens in a slot's row, after the slot itself."""
    ends = np.cumsum([1, vocab_size, vocab_size, MAX_TRACKED]).tolist()
    return [*zip(ends[:-1], ends[1:], strict=True)]


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


def num_programs(buckets: Buckets, platform: str, always_full: bool = False, num_stages: int = 1) -> int:
    """Return the number of programs; on CPUs it includes a sampler per ``SamplerShape`` and the scorer."""
    keys = step_keys(buckets, platform, always_full)
    earlier = (num_stages - 1) * len(buckets.shapes())
    return earlier + len(keys) + (len({shape.sampler for shape, _ in keys}) + 1 if platform == "cpu" else 0)


class CompiledSteps:
    """The compiled programs of a model, or of the last of its stages.

    Args:
        program: The model, or its last stage.
        buckets: Batch shapes.
        platform: JAX platform that decides how steps are split into programs; None for the devices' platform.
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
        self._copies = PageCopies(program)

    def compile(self) -> None:
        """Trace the programs one after the other, and compile them on all cores."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            set_up = submit(pool, trace_set_up(self.program))
            self._copies.compile(pool)
            self._steps = self._split_steps(pool) if self.platform == "cpu" else self._whole_steps(pool)
            self._set_up = set_up.result()

    def _whole_steps(self, pool: concurrent.futures.Executor) -> dict[StepKey, CompiledStep]:
        futures = {key: submit(pool, trace_step(self.program, *key)) for key in self.keys}
        return {key: future.result() for key, future in futures.items()}

    def _split_steps(self, pool: concurrent.futures.Executor) -> dict[StepKey, CompiledStep]:
        program, max_tokens = self.program, self.buckets.mixed_tokens[-1]
        sizes = sorted({shape.sampler for shape, _ in self.keys})
        scorer = submit(pool, trace_scorer(program, max_tokens))
        samplers = {size: submit(pool, trace_sampler(program, size)) for size in sizes}
        models = {shape: submit(pool, trace_model(program, shape, max_tokens)) for shape, _ in self.keys}
        return {
            (shape, variant): SplitStep(
                models[shape].result(),
                samplers[shape.sampler].result(),
                None if shape.decode_only else scorer.result(),
            )
            for shape, variant in self.keys
        }

    def prepare(
        self, state: StepState, rows: Sequence[Sequence[np.ndarray]], copies: Sequence[Sequence[PageCopy]]
    ) -> StepState:
        """Write slots' rows (see ``slot_row``) and copy pages of each lane; return the new state. Donates ``state``."""
        assert self._set_up is not None
        nothing = slot_row(None, self.program.config.vocab_size)
        for lanes in itertools.zip_longest(*rows, fillvalue=nothing):
            state = state._replace(tables=self._set_up(state.tables, np.concatenate(lanes)))
        return state._replace(pools=self._copies.copy(state.pools, copies))

    def choose(self, plans: Sequence[StepPlan], variant: str) -> tuple[BatchShape, CompiledStep]:
        """Return the batch shape and the compiled step for the plans of all lanes."""
        scores_prompt = any(plan.targets for plan in plans)
        if scores_prompt and self.platform != "cpu":
            shape = self.buckets.scoring_shape
        else:
            is_compiled = "any" in self._decode_variants or variant in self._decode_variants
            decode_only = is_compiled and all(plan.is_decode_only for plan in plans)
            shape = self.buckets.shape_for(max(plan.num_tokens for plan in plans), decode_only)
        shape = self._shapes[shape]
        step = self._steps.get((shape, variant)) or self._steps[shape, "any"]
        if isinstance(step, SplitStep) and not scores_prompt:
            step = dataclasses.replace(step, scorer=None)
        return shape, step

    def items(self) -> Iterable[tuple[StepKey, CompiledStep]]:
        """Return all steps; on CPUs those of mixed shapes include the scorer."""
        return self._steps.items()

    @property
    def temporary_bytes(self) -> int:
        """Peak temporary memory per device over all steps, in bytes."""
        return max(map(_temporary_bytes, self._steps.values()), default=0)


def _temporary_bytes(step: CompiledStep) -> int:
    """Return the peak temporary memory of a step's programs, including the outputs passed between them."""
    if not isinstance(step, SplitStep):
        return bytes_of(step).temporary
    programs = [step.model, step.sampler, *([step.scorer] if step.scorer is not None else [])]
    return bytes_of(step.model).outputs + max(bytes_of(program).temporary for program in programs)
