"""The compiled step: tokens in, tokens out, in one program; the only place that puts the model into shard_map."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.engine.program import ModelProgram, StepState
from jaxserve.engine.step_batch import BatchShape, StepBatch, sampler_inputs, unpack
from jaxserve.layers.attention import AttentionSettings
from jaxserve.layers.row_sums import add_tokens
from jaxserve.layers.rows import map_rows
from jaxserve.models.causal_lm import CausalLM
from jaxserve.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxserve.sampling.penalties import SamplerInputs, counted
from jaxserve.sampling.sampler import SamplerSettings, sample

__all__ = ["ModelProgram", "StepOutput", "StepSettings", "StepState", "run_step", "trace_step"]

_LOGPROB_TILE = 32  # prompt tokens whose logits exist at a time


class StepOutput(NamedTuple):
    """What a step gives.

    Attributes:
        tokens: The sampled token of each row; ``sampler.NO_TOKEN`` where its logits have NaN.
        logprobs: Its logprobs, where the sampler computes any.
        prompt_logprobs: Those of the prompt tokens behind each query token; None unless the shape scores prompts.
        sums: Hidden states summed up over each row's prompt, where it pools them; None in decode shapes.
    """

    tokens: Int[Array, " R"]
    logprobs: TokenLogprobs
    prompt_logprobs: TokenLogprobs | None
    sums: Float[Array, "R D"] | None


def trace_step(program: ModelProgram, shape: BatchShape, variant: str) -> jax.stages.Traced:
    """Traces the step of a batch shape and sampler variant (one of ``sampler.VARIANTS``, or ``any``).

    The traced function takes (packed parameters, ``StepState``, buffer, vocabulary mask) and gives (``StepState``,
    ``StepOutput``); the state is donated.
    """
    tile = program.row_tile
    assert tile is None or (shape.num_rows % tile == 0 and shape.num_tokens % tile == 0), (shape, tile)
    graphdef, treedef, params, _ = program.abstract_model
    attention = AttentionSettings(program.kernel, program.page_size, shape.decode_only, row_tile=tile)
    settings = StepSettings(attention, program.sampler, variant, shape.scores_prompt)

    def body(
        arrays: tuple[Array, ...], state: StepState, buffer: Int[Array, " size"], mask: Int[Array, "R words"]
    ) -> tuple[StepState, StepOutput]:
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, program.packing.unpack(arrays)))
        return run_step(model, state, unpack(buffer, shape), mask, settings)

    buffer = program.whole((shape.buffer_size,), jnp.int32)
    mask = program.whole(program.mask_shape(shape.num_rows), jnp.int32)
    packed = program.packing.structs(tuple(params.values()))
    arguments = (packed, program.abstract_state(), buffer, mask)
    in_specs = jax.tree.map(lambda struct: struct.sharding.spec, arguments)
    sharded = jax.shard_map(
        body, mesh=program.mesh, in_specs=in_specs, out_specs=(in_specs[1], program.replicated.spec), check_vma=False
    )
    return jax.jit(sharded, donate_argnums=1).trace(*arguments)


class StepSettings(NamedTuple):
    """What is fixed when a step is compiled: attention, sampler, its variant, and whether prompts are scored."""

    attention: AttentionSettings
    sampler: SamplerSettings
    variant: str
    scores_prompt: bool


def run_step(
    model: CausalLM, state: StepState, batch: StepBatch, mask: Int[Array, "R words"], settings: StepSettings
) -> tuple[StepState, StepOutput]:
    """One step on one device of the mesh: embed, layers, head, sampler, and what the slots keep."""
    size = batch.slots.shape[0]
    known = batch.tokens[:size]
    known = jnp.where(known < 0, state.latest.at[batch.slots].get(mode="clip"), known)
    tokens = jnp.concatenate([known, batch.tokens[size:]])
    tables = state.tables._replace(token_counts=counted(state.tables.token_counts, batch.counted_slots, known))
    attention = batch.attention
    hidden, pools = model.hidden(
        tokens, batch.positions, batch.lengths, list(state.pools), attention, settings.attention
    )
    variant = batch.variant if settings.variant == "any" else settings.variant

    num_rows = attention.num_rows if settings.attention.row_tile is None else None

    def sampled_rows(hidden: Float[Array, "R D"], mask: Int[Array, "R words"], *numbers: Array) -> Any:
        return sample(model.logits(hidden, num_rows), SamplerInputs(*numbers), mask, tables, variant, settings.sampler)

    rows = (hidden[batch.sampled_tokens], mask, *sampler_inputs(batch))
    sampled, logprobs = map_rows(sampled_rows, rows, attention.num_rows, settings.attention.row_tile)
    latest = state.latest.at[batch.sampled_slots].set(jnp.maximum(sampled, 0), mode="drop")
    prompt = _prompt_logprobs(model, hidden, batch, settings) if settings.scores_prompt else None
    kept, sums = state.sums, None
    if not settings.attention.decode_only:
        kept, sums = _pooled(model, hidden, kept, batch, settings.attention.row_tile)
    return StepState(tuple(pools), latest, tables, kept), StepOutput(sampled, logprobs, prompt, sums)


def _pooled(
    model: CausalLM, hidden: Float[Array, "T D"], kept: Float[Array, "slots D"], batch: StepBatch, row_tile: int | None
) -> tuple[Float[Array, "slots D"], Float[Array, "R D"]]:
    """The slots' sums of hidden states and those of the rows, with what the step adds."""
    end = batch.attention.query_starts + batch.attention.query_lens
    before = kept.at[batch.carried_slots].get(mode="fill", fill_value=0)
    sums = add_tokens(before, hidden, batch.pooled_from, end, model.final, row_tile)
    targets = jnp.where(batch.pooled_from < end, batch.slots, len(kept))
    return kept.at[targets].set(sums, mode="drop"), sums


def _prompt_logprobs(
    model: CausalLM, hidden: Float[Array, "T D"], batch: StepBatch, settings: StepSettings
) -> TokenLogprobs:
    """Logprobs of the prompt tokens behind each query token, a tile of logits at a time."""
    num_tokens = hidden.shape[0]
    tile = settings.attention.row_tile or min(_LOGPROB_TILE, num_tokens)
    padding = -num_tokens % tile
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    targets = jnp.pad(jnp.maximum(batch.targets, 0), (0, padding))

    def scored_rows(hidden: Float[Array, "T D"], targets: Int[Array, " T"]) -> TokenLogprobs:
        untracked = jnp.zeros((targets.shape[0], 0), jnp.int32)
        logits, sampler = model.logits(hidden), settings.sampler
        return token_logprobs(logits, targets, untracked, sampler.max_logprobs, sampler.is_normalized)

    filled = map_rows(scored_rows, (hidden, targets), batch.num_target_tokens, tile)
    return jax.tree.map(lambda array: array[:num_tokens], filled)
