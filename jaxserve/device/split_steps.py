"""A step as CPUs run it: the model, the sampler and the scoring of prompts are programs of their own.

An accelerator would wait between them, so that ``jaxserve.device.steps`` makes one program of each step there. On CPUs
that gap is nothing, and a sampler in every program took much of a start: here there is a program of the model for each
batch shape, one of the sampler for each number of rows, and one that scores the prompts of all steps.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.device.program import ModelProgram, StepState, shardings
from jaxserve.device.sampler_batch import SamplerShape, unpack_sampler
from jaxserve.device.step_batch import BatchShape, LatestTokens, sampler_part, unpack
from jaxserve.device.steps import (
    PromptTokens,
    StepOutput,
    attention_settings,
    keep_tokens,
    run_layers,
    sample_rows,
    score_prompt,
)
from jaxserve.layers.rows import ROW_TILE
from jaxserve.sampling.logprobs import TokenLogprobs, no_logprobs
from jaxserve.sampling.penalties import SlotTables
from jaxserve.sampling.sampler import VARIANTS


class ModelOutput(NamedTuple):
    """What the model's program gives beside the state.

    Attributes:
        logits: Logits after the token that each sample comes after, float32.
        sampler_part: The part of the step's buffer that the sampler reads.
        prompt: What the scorer reads, of the size of the largest step; None in decode shapes.
        sums: See ``StepOutput``.
    """

    logits: Float[Array, "samples V"]
    sampler_part: Int[Array, " size"]
    prompt: PromptTokens | None
    sums: Float[Array, "R D"] | None


class SamplerOutput(NamedTuple):
    """What the sampler gives.

    Attributes:
        latest: The latest token of each slot.
        tables: The slots' tables, given up to the sampler, where it counts drafts; else None, and it only reads them.
        tokens: See ``StepOutput``.
        logprobs: See ``StepOutput``.
    """

    latest: LatestTokens
    tables: SlotTables | None
    tokens: Int[Array, " samples"]
    logprobs: TokenLogprobs


@dataclasses.dataclass(frozen=True)
class SplitStep:
    """The compiled programs of a batch shape; a call takes and gives what that of ``steps.trace_step`` does.

    Attributes:
        model: Compiled ``trace_model``.
        sampler: Compiled ``trace_sampler`` for the shape.
        scorer: Compiled ``trace_scorer``; None for a step that scores no prompt.
    """

    model: jax.stages.Compiled
    sampler: jax.stages.Compiled
    scorer: jax.stages.Compiled | None

    def __call__(
        self,
        params: tuple[jax.Array, ...],
        state: StepState,
        buffer: np.ndarray,
        mask: Int[Array | np.ndarray, "R words"],
    ) -> tuple[StepState, StepOutput]:
        """Launches the programs one after the other, without waiting for them."""
        state, found = self.model(params, state, buffer)
        sampled = self.sampler(found.logits, state.latest, state.tables, found.sampler_part, mask)
        prompt = None if self.scorer is None else self.scorer(params, found.prompt)
        state = state._replace(latest=sampled.latest, tables=sampled.tables or state.tables)
        return state, StepOutput(sampled.tokens, sampled.logprobs, prompt, found.sums)


def trace_model(program: ModelProgram, shape: BatchShape, max_tokens: int) -> jax.stages.Traced:
    """Traces the steps of a batch shape up to their logits.

    The traced function takes (packed parameters, ``StepState``, buffer) and gives (``StepState``, ``ModelOutput``); the
    state is donated. The sampler has yet to replace its latest tokens.

    Args:
        program: The model.
        shape: Sizes of the step.
        max_tokens: Query tokens of the largest step, for which the scorer is compiled.
    """
    attention = attention_settings(program, shape)

    def model(
        arrays: tuple[Array, ...], state: StepState, buffer: Int[Array, " size"]
    ) -> tuple[StepState, ModelOutput]:
        module = program.model(arrays)
        batch = unpack(buffer, shape, state.latest, program.page_size, program.num_pages)
        state, hidden, sums = run_layers(module, state, batch, attention, program.row_tile)
        logits = module.logits(hidden[batch.sampled_tokens], batch.sampler.num_rows, program.layer_tile)
        prompt = None
        if not shape.decode_only:
            padding = (0, max_tokens - shape.num_tokens)
            targets = jnp.pad(batch.targets, padding, constant_values=-1)
            prompt = PromptTokens(jnp.pad(hidden, (padding, (0, 0))), targets, batch.num_target_tokens)
        return state, ModelOutput(logits, sampler_part(buffer, shape, batch), prompt, sums)

    state, buffer = program.abstract_state(), program.whole((shape.buffer_size,), jnp.int32)
    gives = (shardings(state), program.replicated)
    return program.trace(model, (program.abstract_params, state, buffer), gives, donated=[1])


def trace_sampler(program: ModelProgram, shape: SamplerShape) -> jax.stages.Traced:
    """Traces the sampler of all steps of a shape, which chooses its variant when it runs.

    The traced function takes (logits, latest tokens, ``SlotTables``, the sampler's part of the buffer, vocabulary mask)
    and gives ``SamplerOutput``; the latest tokens are donated, and the tables too where it counts drafts. Every device
    of the mesh computes the same.
    """
    settings, num_samples = program.sampler, shape.num_samples
    tile = sampler_tile(num_samples, program.row_tile)
    counts_drafts = shape.max_samples > 1

    def sampler(
        logits: Float[Array, "samples V"],
        latest: LatestTokens,
        tables: SlotTables,
        part: Int[Array, " size"],
        mask: Int[Array, "R words"],
    ) -> SamplerOutput:
        batch = unpack_sampler(part, shape)

        def greedy() -> tuple[Int[Array, " samples"], TokenLogprobs]:
            nothing = no_logprobs(num_samples, settings.max_logprobs, tables.tracked_ids.shape[1])
            return settings.argmax.argmax(logits, batch.num_rows), nothing

        def chosen() -> tuple[Int[Array, " samples"], TokenLogprobs]:
            return sample_rows(_unchanged, logits, mask, tables, batch, batch.variant, settings, tile)

        tokens, logprobs = lax.cond(batch.variant == VARIANTS.index("greedy"), greedy, chosen)
        latest, tables, tokens = keep_tokens(latest, tables, batch, tokens)
        return SamplerOutput(latest, tables if counts_drafts else None, tokens, logprobs)

    state = program.abstract_state()
    logits = program.whole((num_samples, program.config.vocab_size), jnp.float32)
    part = program.whole((shape.size,), jnp.int32)
    mask = program.whole(program.mask_shape(shape.num_rows), jnp.int32)
    donated = [1, 2] if counts_drafts else [1]
    return program.trace(sampler, (logits, state.latest, state.tables, part, mask), donated=donated)


def sampler_tile(num_rows: int, row_tile: int | None) -> int | None:
    """Rows that the sampler takes together; None takes all.

    A step with few of its rows in use skips the tiles of the others. With 49,152 tokens in the vocabulary, 64 rows take
    half the time in tiles of 8, since what is computed of a tile stays in the caches.

    Args:
        num_rows: Samples of the step; where 8 does not divide them, tiles have 4 or 2 rows.
        row_tile: Rows of a tile in the deterministic mode, which the sampler then takes too.
    """
    if row_tile is not None or num_rows <= ROW_TILE:
        return row_tile
    tile = math.gcd(num_rows, ROW_TILE)
    return tile if tile > 1 else None


def _unchanged(logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
    return logits


def trace_scorer(program: ModelProgram, max_tokens: int) -> jax.stages.Traced:
    """Traces the scoring of prompts: takes (packed parameters, ``PromptTokens``) and gives their ``TokenLogprobs``."""

    def scorer(arrays: tuple[Array, ...], prompt: PromptTokens) -> TokenLogprobs:
        return score_prompt(program.model(arrays), prompt, program.sampler, program.row_tile)

    hidden = program.whole((max_tokens, program.config.hidden_size), program.policy.activations_dtype)
    prompt = PromptTokens(hidden, program.whole((max_tokens,), jnp.int32), program.whole((), jnp.int32))
    return program.trace(scorer, (program.abstract_params, prompt))
