"""Steps on CPUs: model, sampler and prompt scoring are separate programs.

On accelerators the gaps between programs would cost time, so ``jaxserve.device.steps`` makes one program per step. On
CPUs the gaps are negligible, and compiling the sampler into every program would slow startup. So there is one model
program per batch shape, one sampler per number of rows, and one scorer for all steps.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.device.draft_inputs import DraftInputs, step_tokens, widened
from jaxserve.device.drafting import Drafted
from jaxserve.device.handed_over import abstract_input
from jaxserve.device.sampler_batch import SamplerShape, unpack_sampler
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape, LatestTokens, sampler_part
from jaxserve.device.step_state import StepState
from jaxserve.device.steps import (
    PromptTokens,
    StepOutput,
    attention_settings,
    keep_tokens,
    run_layers,
    sample_rows,
    score_prompt,
)
from jaxserve.device.structs import shardings
from jaxserve.layers.rows import ROW_TILE
from jaxserve.sampling.logprobs import TokenLogprobs, no_logprobs
from jaxserve.sampling.penalties import SlotTables
from jaxserve.sampling.sampler import VARIANTS


class ModelOutput(NamedTuple):
    """Outputs of the model's program besides the state.

    Attributes:
        logits: Logits of each sample, float32; split over devices if the layout splits logits.
        sampler_part: The sampler's part of the step's buffer.
        prompt: The scorer's input, padded to the largest step; None in decode shapes.
        sums: See ``StepOutput``.
        expert_tokens: See ``StepOutput``.
        drafting: Inputs of the drafter; None without one.
    """

    logits: Float[Array, "samples V"]
    sampler_part: Int[Array, " size"]
    prompt: PromptTokens | None
    sums: Float[Array, "R D"] | None
    expert_tokens: Int[Array, "layers E"] | None
    drafting: DraftInputs | None


class SamplerOutput(NamedTuple):
    """Outputs of the sampler's program.

    Attributes:
        latest: Latest token of each slot.
        tables: Updated tables, if the sampler counts drafts; else None, as it only reads them.
        tokens: See ``StepOutput``.
        logprobs: See ``StepOutput``.
    """

    latest: LatestTokens
    tables: SlotTables | None
    tokens: Int[Array, " samples"]
    logprobs: TokenLogprobs


@dataclasses.dataclass(frozen=True)
class SplitStep:
    """The compiled programs of a batch shape, called like the program of ``steps.trace_step``.

    Attributes:
        model: Compiled ``trace_model``.
        sampler: Compiled ``trace_sampler`` for the shape.
        scorer: Compiled ``trace_scorer``; None for a step without prompt logprobs.
        drafts: Compiled ``trace_drafts``; None without a drafter.
    """

    model: jax.stages.Compiled
    sampler: jax.stages.Compiled
    scorer: jax.stages.Compiled | None
    drafts: jax.stages.Compiled | None = None

    def __call__(
        self,
        params: tuple[jax.Array, ...],
        state: StepState,
        buffer: np.ndarray,
        mask: Int[Array | np.ndarray, "samples words"],
        *hidden: jax.Array,
    ) -> tuple[StepState, StepOutput]:
        """Launch the programs in order, without waiting for them."""
        state, output, inputs = self.without_drafting(params, state, buffer, mask, *hidden)
        if self.drafts is not None:
            state = self.drafts(params, Drafted.before(state), inputs).put_into(state)
        return state, output

    def without_drafting(
        self,
        params: tuple[jax.Array, ...],
        state: StepState,
        buffer: np.ndarray,
        mask: Int[Array | np.ndarray, "samples words"],
        *hidden: jax.Array,
    ) -> tuple[StepState, StepOutput, DraftInputs | None]:
        """Launch all programs but the drafter's, whose inputs are returned too."""
        state, output = self.model(params, state, buffer, *hidden)
        sampled = self.sampler(output.logits, state.latest, state.tables, output.sampler_part, mask)
        prompt = None if self.scorer is None else self.scorer(params, output.prompt)
        state = state._replace(latest=sampled.latest, tables=sampled.tables or state.tables)
        found = StepOutput(sampled.tokens, sampled.logprobs, prompt, output.sums, output.expert_tokens)
        return state, found, output.drafting


def trace_model(
    sharded: ShardedModel, shape: BatchShape, max_tokens: int, drafting: BatchShape | None = None
) -> jax.stages.Traced:
    """Trace the steps of a batch shape up to their logits.

    The traced function maps (packed parameters, ``StepState``, buffer) to (``StepState``, ``ModelOutput``) and donates
    the state. The state's latest tokens are left to the sampler. After other stages, it also has their hidden states as
    an argument.

    Args:
        sharded: The model.
        shape: Batch shape.
        max_tokens: Query tokens of the largest step, for which the scorer is compiled.
        drafting: Shape for which the drafter is compiled; None without one.
    """
    sharded = sharded.for_shape(shape)
    attention = attention_settings(sharded, shape)

    def model(
        arrays: tuple[Array, ...],
        state: StepState,
        buffer: Int[Array, " size"],
        *given: Float[Array, "T _"],
    ) -> tuple[StepState, ModelOutput]:
        module = sharded.model(arrays)
        batch = sharded.unpack(buffer, shape, state.latest)
        state, hidden, sums, expert_tokens, aux = run_layers(
            module, state, batch, attention, sharded.row_tile, sharded.split, given, sharded.aux_layers or ()
        )
        logits = module.logits(hidden[batch.sampled_tokens], batch.sampler.num_rows, sharded.layer_tile)
        prompt = None
        if not shape.decode_only:
            padding = (0, max_tokens - shape.num_tokens)
            targets = jnp.pad(batch.targets, padding, constant_values=-1)
            prompt = PromptTokens(jnp.pad(hidden, (padding, (0, 0))), targets, batch.num_target_tokens[None])
        inputs = None
        if drafting is not None:
            seen = step_tokens(batch)
            if sharded.aux_layers is not None:
                seen = seen._replace(hidden=hidden, aux=aux)
            inputs = widened(sharded, DraftInputs(buffer, seen), shape, drafting)
        return state, ModelOutput(logits, sampler_part(buffer, shape, batch), prompt, sums, expert_tokens, inputs)

    state, buffer = sharded.abstract_state(), sharded.rows_struct((shape.buffer_size,), jnp.int32)
    rows = sharded.rows_sharding
    out_shardings = (shardings(state), ModelOutput._make([sharded.vocab_sharding, *[rows] * 5]))
    given = abstract_input(sharded, shape.num_tokens)
    return sharded.trace(model, (sharded.program_params, state, buffer, *given), out_shardings, donated=[1])


def trace_sampler(sharded: ShardedModel, shape: SamplerShape) -> jax.stages.Traced:
    """Trace a sampler that selects its variant at run time.

    The traced function maps (logits, latest tokens, ``SlotTables``, the sampler's part of the buffer, vocabulary mask)
    to ``SamplerOutput``. It donates the latest tokens and, if it counts drafts, the tables. Devices with the
    same rows compute the same.
    """
    settings, num_samples = sharded.sampler, shape.num_samples
    tile = sampler_tile(num_samples, sharded.row_tile)
    counts_drafts = shape.max_samples > 1

    def sampler(
        logits: Float[Array, "samples V"],
        latest: LatestTokens,
        tables: SlotTables,
        part: Int[Array, " size"],
        mask: Int[Array, "samples words"],
    ) -> SamplerOutput:
        batch = unpack_sampler(part, shape)

        def greedy() -> tuple[Int[Array, " samples"], TokenLogprobs]:
            empty = no_logprobs(num_samples, settings.max_logprobs, tables.tracked_ids.shape[1])
            return settings.split.argmax(settings.argmax, logits, batch.num_rows), empty

        def by_variant() -> tuple[Int[Array, " samples"], TokenLogprobs]:
            return sample_rows(_unchanged, logits, mask, tables, batch, batch.variant, settings, tile)

        tokens, logprobs = lax.cond(batch.variant == VARIANTS.index("greedy"), greedy, by_variant)
        latest, tables, tokens = keep_tokens(latest, tables, batch, tokens, settings.split)
        return SamplerOutput(latest, tables if counts_drafts else None, tokens, logprobs)

    state = sharded.abstract_state()
    logits = sharded.vocab_struct(num_samples, jnp.float32)
    part = sharded.rows_struct((shape.size,), jnp.int32)
    mask = sharded.rows_struct(sharded.mask_shape(num_samples), jnp.int32)
    donated, rows = [1, 2] if counts_drafts else [1], sharded.rows_sharding
    out_shardings = SamplerOutput._make([rows, shardings(state.tables) if counts_drafts else None, rows, rows])
    return sharded.trace(sampler, (logits, state.latest, state.tables, part, mask), out_shardings, donated)


def sampler_tile(num_rows: int, row_tile: int | None) -> int | None:
    """Return the number of rows that the sampler processes at a time; None for all.

    Tiles without rows in use are skipped. With a vocabulary of 49,152, tiles of 8 halve the time for 64 rows, because a
    tile's intermediates stay in cache.

    Args:
        num_rows: Samples of the step; if not a multiple of 8, tiles have 4 or 2 rows.
        row_tile: Tile size of deterministic mode, which takes precedence.
    """
    if row_tile is not None or num_rows <= ROW_TILE:
        return row_tile
    tile = math.gcd(num_rows, ROW_TILE)
    return tile if tile > 1 else None


def _unchanged(logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
    return logits


def trace_scorer(sharded: ShardedModel, max_tokens: int) -> jax.stages.Traced:
    """Trace prompt scoring, which maps (packed parameters, ``PromptTokens``) to ``TokenLogprobs``."""

    def scorer(arrays: tuple[Array, ...], prompt: PromptTokens) -> TokenLogprobs:
        return score_prompt(sharded.model(arrays), prompt, sharded.sampler, sharded.row_tile)

    hidden = sharded.rows_struct((max_tokens, sharded.config.hidden_size), sharded.policy.activations_dtype)
    targets, count = (sharded.rows_struct((size,), jnp.int32) for size in (max_tokens, 1))
    prompt = PromptTokens(hidden, targets, count)
    return sharded.trace(scorer, (sharded.program_params, prompt))
