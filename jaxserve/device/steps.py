"""The forward pass of a step: embedding, layers, head, sampler.

``trace_step`` compiles it to one program, for accelerators; ``jaxserve.device.split_steps`` splits it for CPUs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.device.draft_inputs import step_tokens
from jaxserve.device.drafting import Drafted, draft
from jaxserve.device.handed_over import abstract_input
from jaxserve.device.sampler_batch import SamplerBatch
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape, LatestTokens, StepBatch
from jaxserve.device.step_state import StepState
from jaxserve.device.structs import shardings
from jaxserve.layers.attention import AttentionSettings, Pools
from jaxserve.layers.attention_chunks import chunks_of
from jaxserve.layers.row_sums import add_tokens
from jaxserve.layers.rows import map_rows
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.layer_stack import side_by_side
from jaxserve.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxserve.sampling.penalties import SlotTables, counted
from jaxserve.sampling.sampler import NO_TOKEN, SamplerSettings, sample
from jaxserve.sampling.verification import NOWHERE
from jaxserve.sampling.vocab_split import VocabSplit

_LOGPROB_TILE = 32  # prompt tokens whose logits are in memory at a time


class StepOutput(NamedTuple):
    """Outputs of a step.

    Attributes:
        tokens: Sampled tokens; ``sampler.NO_TOKEN`` if logits are NaN, or after a rejected draft.
        logprobs: Logprobs of the sampled tokens; undefined unless the sampler variant computes them.
        prompt_logprobs: Logprobs of the prompt token after each query token; None unless the step scores prompts.
        sums: Sum of hidden states over each row's prompt so far, for pooling; None in decode shapes.
        expert_tokens: Tokens routed to each expert of each layer with experts; None unless the program counts them.
            The runner adds those of other stages.
    """

    tokens: Int[Array, " samples"]
    logprobs: TokenLogprobs
    prompt_logprobs: TokenLogprobs | None
    sums: Float[Array, "R D"] | None
    expert_tokens: Int[Array, "layers E"] | None


class PromptTokens(NamedTuple):
    """Inputs for computing prompt logprobs.

    Attributes:
        hidden: Hidden state of each query token, before the final normalization.
        targets: Prompt token after each token if its logprob is requested; else -1.
        num_target_tokens: Number of tokens up to the last with a target; 0 for none.
    """

    hidden: Float[Array, "T D"]
    targets: Int[Array, " T"]
    num_target_tokens: Int[Array, " 1"]


def trace_step(sharded: ShardedModel, shape: BatchShape, variant: str) -> jax.stages.Traced:
    """Trace the step of a batch shape and sampler variant (one of ``sampler.VARIANTS``, or ``any``) as one program.

    The traced function maps (packed parameters, ``StepState``, buffer, vocabulary mask) to (``StepState``,
    ``StepOutput``) and donates the state. After other stages, ``abstract_input`` are further arguments.
    """
    sharded = sharded.for_shape(shape)
    attention = attention_settings(sharded, shape)
    settings = StepSettings(
        attention, sharded.sampler, variant, shape.scores_prompt, sharded.row_tile, sharded.aux_layers or ()
    )

    def step(
        arrays: tuple[Array, ...],
        state: StepState,
        buffer: Int[Array, " size"],
        mask: Int[Array, "samples words"],
        *given: Float[Array, "T _"],
    ) -> tuple[StepState, StepOutput]:
        batch = sharded.unpack(buffer, shape, state.latest)
        layers, output = run_step(sharded.model(arrays), state, batch, mask, settings, given)
        state = layers.state
        if sharded.drafter is not None:
            seen = step_tokens(batch)._replace(hidden=layers.hidden, aux=layers.aux)
            state = draft(sharded, arrays, Drafted.before(state), buffer, seen, shape, variant).put_into(state)
        return state, output

    state, buffer = sharded.abstract_state(), sharded.rows_struct((shape.buffer_size,), jnp.int32)
    mask = sharded.rows_struct(sharded.mask_shape(shape.sampler.num_samples), jnp.int32)
    out_shardings = (shardings(state), sharded.rows_sharding)
    given = abstract_input(sharded, shape.num_tokens)
    return sharded.trace(step, (sharded.program_params, state, buffer, mask, *given), out_shardings, donated=[1])


class HiddenOutput(NamedTuple):
    """Outputs of a stage besides its pages.

    Attributes:
        hidden: Hidden state of each query token after the stage's last layer.
        expert_tokens: Tokens routed to each expert of each of its layers with experts; None unless they are counted.
        aux: Inputs of the layers so far that a draft head reads, side by side; None if it reads none of them.
    """

    hidden: Float[Array, "T D"]
    expert_tokens: Int[Array, "layers E"] | None
    aux: Float[Array, "T aux"] | None


def trace_hidden(sharded: ShardedModel, shape: BatchShape) -> jax.stages.Traced:
    """Trace a stage that is not the last, for the steps of a batch shape.

    The traced function maps (packed parameters, pools, ``LatestTokens``, buffer, ``abstract_input``) to (pools,
    ``HiddenOutput``) and donates the pools. The first stage is given no hidden states.
    """
    sharded = sharded.for_shape(shape)
    attention = attention_settings(sharded, shape)

    def stage(
        arrays: tuple[Array, ...],
        pools: tuple[Pools, ...],
        latest: LatestTokens,
        buffer: Int[Array, " size"],
        x: Float[Array, "T D"] | None = None,
        aux: Float[Array, "T aux"] | None = None,
    ) -> tuple[tuple[Pools, ...], HiddenOutput]:
        batch = sharded.unpack(buffer, shape, latest)
        found = sharded.model(arrays).hidden(batch, pools, attention, x, sharded.aux_layers or ())
        return tuple(found.pools), HiddenOutput(found.x, found.expert_tokens, side_by_side(aux, found.aux))

    pools, buffer = sharded.abstract_all_pools(), sharded.rows_struct((shape.buffer_size,), jnp.int32)
    given = abstract_input(sharded, shape.num_tokens)
    arguments = (sharded.program_params, pools, sharded.abstract_latest(), buffer, *given)
    return sharded.trace(stage, arguments, (shardings(pools), sharded.rows_sharding), donated=[1])


def attention_settings(sharded: ShardedModel, shape: BatchShape) -> AttentionSettings:
    """Return the static settings of attention in steps of a shape."""
    tile = sharded.row_tile
    assert tile is None or (shape.num_rows % tile == 0 and shape.num_tokens % tile == 0), (shape, tile)
    indices = sharded.kv_layout.layer_indices
    return AttentionSettings(
        sharded.kernel,
        sharded.own_page_size,
        shape.decode_only and (sharded.splits_rows or not shape.has_drafts),
        sharded.layer_tile,
        indices,
        sharded.layout.rows_axis,
        sharded.counts_expert_tokens,
        sharded.row_tile,
        chunks_of(sharded.kv_layout.chunks, sharded.page_size),
    )


class StepSettings(NamedTuple):
    """Static settings of a step.

    Attributes:
        attention: Settings of attention.
        sampler: Settings of the sampler.
        variant: Sampler variant; ``any`` selects it at run time.
        scores_prompt: Whether the step computes prompt logprobs.
        row_tile: See ``ShardedModel.row_tile``.
        aux_layers: See ``ShardedModel.aux_layers``.
    """

    attention: AttentionSettings
    sampler: SamplerSettings
    variant: str
    scores_prompt: bool
    row_tile: int | None
    aux_layers: tuple[int, ...] = ()


def run_step(
    model: CausalLM,
    state: StepState,
    batch: StepBatch,
    mask: Int[Array, "samples words"],
    settings: StepSettings,
    given: Sequence[Float[Array, "T _"]] = (),
) -> "tuple[LayersOutput, StepOutput]":
    """Run a step on one device of the mesh: embedding, layers, head, sampler, slot updates.

    After other stages, ``given`` is what they hand over, and there is no embedding.

    Returns:
        The state with the sampled tokens, with the hidden states; the outputs.
    """
    split, tile = settings.sampler.split, settings.row_tile
    layers = run_layers(model, state, batch, settings.attention, tile, split, given, settings.aux_layers)
    state, hidden, variant = layers.state, layers.hidden, settings.variant
    variant = batch.sampler.variant if variant == "any" else variant
    rows = hidden[batch.sampled_tokens]
    tokens, logprobs = sample_rows(
        model.logits, rows, mask, state.tables, batch.sampler, variant, settings.sampler, tile
    )
    prompt = None
    if settings.scores_prompt:
        tokens_to_score = PromptTokens(hidden, batch.targets, batch.num_target_tokens[None])
        prompt = score_prompt(model, tokens_to_score, settings.sampler, tile)
    latest, tables, tokens = keep_tokens(state.latest, state.tables, batch.sampler, tokens, split)
    output = StepOutput(tokens, logprobs, prompt, layers.sums, layers.expert_tokens)
    return layers._replace(state=state._replace(latest=latest, tables=tables)), output


class LayersOutput(NamedTuple):
    """Outputs of the layers.

    Attributes:
        state: The state, without the tokens that the step is going to sample.
        hidden: Hidden state of each query token, before the final normalization.
        sums: See ``StepOutput``.
        expert_tokens: See ``StepOutput``.
        aux: See ``HiddenOutput``.
    """

    state: StepState
    hidden: Float[Array, "T D"]
    sums: Float[Array, "R D"] | None
    expert_tokens: Int[Array, "layers E"] | None
    aux: Float[Array, "T aux"] | None


def run_layers(
    model: CausalLM,
    state: StepState,
    batch: StepBatch,
    settings: AttentionSettings,
    row_tile: int | None,
    split: VocabSplit,
    given: Sequence[Float[Array, "T _"]] = (),
    aux_layers: tuple[int, ...] = (),
) -> LayersOutput:
    """Run embedding and layers on one device of the mesh; pool hidden states ``row_tile`` tokens at a time.

    After other stages, ``given`` is what they hand over, and there is no embedding.
    """
    x, aux, *_ = (*given, None, None)
    latest = batch.tokens.at[batch.counted_tokens].get(mode="clip")
    tables = state.tables._replace(token_counts=counted(state.tables.token_counts, batch.counted_slots, latest, split))
    hidden, pools, expert_tokens, own_aux = model.hidden(batch, state.pools, settings, x, aux_layers)
    kept, sums = state.sums, None
    if len(batch.pooled_from):
        kept, sums = _pool_hidden(model, hidden, kept, batch, row_tile)
    state = state._replace(pools=tuple(pools), tables=tables, sums=kept)
    return LayersOutput(state, hidden, sums, expert_tokens, side_by_side(aux, own_aux))


def sample_rows(
    score: Callable[[Float[Array, "samples n"]], Float[Array, "samples V"]],
    rows: Float[Array, "samples n"],
    mask: Int[Array, "samples words"],
    tables: SlotTables,
    batch: SamplerBatch,
    variant: str | Int[Array, ""],
    settings: SamplerSettings,
    tile: int | None,
) -> tuple[Int[Array, " samples"], TokenLogprobs]:
    """Return tokens and logprobs of all samples, one tile at a time; ``score`` computes a tile's logits."""

    values, structure = jax.tree.flatten(batch.inputs)

    def sampled_rows(rows: Float[Array, "samples n"], mask: Int[Array, "samples words"], *values: Array) -> Any:
        inputs = jax.tree.unflatten(structure, values)
        return sample(score(rows), inputs, mask, tables, variant, settings)

    return map_rows(sampled_rows, (rows, mask, *values), batch.num_rows, tile)


class KeptState(NamedTuple):
    """The slots' state after sampling, and the sampled tokens, with ``NO_TOKEN`` after a rejected draft."""

    latest: LatestTokens
    tables: SlotTables
    tokens: Int[Array, " samples"]


def keep_tokens(
    latest: LatestTokens, tables: SlotTables, batch: SamplerBatch, tokens: Int[Array, " samples"], split: VocabSplit
) -> KeptState:
    """Update each slot's latest token, and count accepted drafts for penalties."""
    slots = batch.sampled_slots
    if batch.verification is not None:
        kept = batch.verification.keep(tokens)
        before_latest = jnp.where(kept.is_kept & ~kept.is_latest, slots, NOWHERE)
        tables = tables._replace(token_counts=counted(tables.token_counts, before_latest, tokens, split))
        slots = jnp.where(kept.is_latest, slots, NOWHERE)
        tokens = jnp.where(kept.is_kept, tokens, NO_TOKEN)
    latest = latest._replace(
        token_ids=latest.token_ids.at[slots].set(jnp.maximum(tokens, 0), mode="drop"),
        positions=latest.positions.at[slots].set(batch.inputs.positions, mode="drop"),
    )
    return KeptState(latest, tables, tokens)


def _pool_hidden(
    model: CausalLM, hidden: Float[Array, "T D"], kept: Float[Array, "slots D"], batch: StepBatch, row_tile: int | None
) -> tuple[Float[Array, "slots D"], Float[Array, "R D"]]:
    """Add the step's hidden states to the sums; return those of all slots and those of the rows."""
    attention = batch.attention[0]
    end = attention.query_starts + attention.query_lens
    before = kept.at[batch.carried_slots].get(mode="fill", fill_value=0)
    sums = add_tokens(before, hidden, batch.pooled_from, end, model.final, row_tile)
    targets = jnp.where(batch.pooled_from < end, batch.slots, len(kept))
    return kept.at[targets].set(sums, mode="drop"), sums


def score_prompt(
    model: CausalLM, prompt: PromptTokens, settings: SamplerSettings, row_tile: int | None
) -> TokenLogprobs:
    """Return the logprobs of the prompt token after each query token, one tile of logits at a time."""
    num_tokens = prompt.hidden.shape[0]
    tile = row_tile or min(_LOGPROB_TILE, num_tokens)
    padding = -num_tokens % tile
    hidden = jnp.pad(prompt.hidden, ((0, padding), (0, 0)))
    targets = jnp.pad(jnp.maximum(prompt.targets, 0), (0, padding))

    def scored_rows(hidden: Float[Array, "T D"], targets: Int[Array, " T"]) -> TokenLogprobs:
        untracked = jnp.zeros((targets.shape[0], 0), jnp.int32)
        logits = model.logits(hidden)
        return token_logprobs(logits, targets, untracked, settings.max_logprobs, settings.is_normalized, settings.split)

    filled = map_rows(scored_rows, (hidden, targets), prompt.num_target_tokens[0], tile)
    return jax.tree.map(lambda array: array[:num_tokens], filled)
