"""Applies a request's masks, bias and penalties to its logits before sampling.

In vLLM's order: masks, logit bias, the engine's processors, then the repetition penalty on tokens of prompt or output,
then frequency and presence penalties on tokens of the output. NaN propagates through all of them, so no mask hides it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.api.sampling_options import OptionValues
from jaxserve.sampling.logits_processors import LogitsProcessor, apply_processors
from jaxserve.sampling.vocab_split import WHOLE, VocabSplit

IN_PROMPT = 1 << 30
"""Added to a token's count if it is in the prompt."""

MAX_TRACKED = 128
"""Largest number of tokens whose logprobs a request can ask for by their ids."""


class SlotTables(NamedTuple):
    """Data on the device for the request in each slot, one row per slot; V is the device's part of the vocabulary.

    Attributes:
        token_counts: Occurrences of each token in the output, plus ``IN_PROMPT`` if it is in the prompt; maintained
            only for requests with penalties.
        bias: Added to the logits; zeros for requests without a bias.
        tracked_ids: Tokens whose logprobs are reported, padded with 0; set only for requests that have some.
    """

    token_counts: Int[Array, "slots V"]
    bias: Float[Array, "slots V"]
    tracked_ids: Int[Array, "slots tracked"]


class SamplerInputs(NamedTuple):
    """Sampling parameters of each row; see ``jaxserve.scheduling.plan.Sampling``.

    Attributes:
        options: An array [R] for each of ``SAMPLING_OPTIONS``, float32 or int32.
        seeds: 32-bit seeds.
        positions: Positions of the next tokens.
        slots: The rows' slots; out of range for an empty row.
        arguments: Arguments of the engine's logits processors.
        drafts: Draft tokens before the next token that the slot's counts do not include, padded with ids outside the
            vocabulary; None if no row can have any.
    """

    options: OptionValues
    seeds: Int[Array, " R"]
    positions: Int[Array, " R"]
    slots: Int[Array, " R"]
    arguments: Float[Array, "R arguments"]
    drafts: Int[Array, "R drafts"] | None = None


def adjust(
    logits: Float[Array, "R V"],
    inputs: SamplerInputs,
    mask: Int[Array, "R words"],
    tables: SlotTables,
    processors: Sequence[LogitsProcessor],
    split: VocabSplit = WHOLE,
) -> Float[Array, "R V"]:
    """Apply everything that can change the argmax; processors see whole rows, which are gathered for them."""
    width = logits.shape[1]
    bits = (split.part(mask, width // 32)[:, :, None] >> jnp.arange(32)) & 1
    is_allowed = bits.reshape(mask.shape[0], -1)[:, :width] == 1
    logits = jnp.where(is_allowed | jnp.isnan(logits), logits, -jnp.inf)
    logits = logits + tables.bias.at[inputs.slots].get(mode="clip")
    if processors:
        whole = apply_processors(split.whole(logits), processors, inputs.arguments, inputs.positions)
        logits = split.part(whole, width, -jnp.inf)
    counts = tables.token_counts.at[inputs.slots].get(mode="clip")
    if inputs.drafts is not None:
        drafts = split.columns(inputs.drafts, width)
        counts = counts.at[jnp.arange(len(counts))[:, None], drafts].add(1, mode="drop")
    return _penalized(logits, inputs, counts)


def _penalized(logits: Float[Array, "R V"], inputs: SamplerInputs, counts: Int[Array, "R V"]) -> Float[Array, "R V"]:
    repetition = inputs.options.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    in_output = counts & (IN_PROMPT - 1)
    logits = logits - inputs.options.frequency_penalty[:, None] * in_output
    return logits - jnp.where(in_output > 0, inputs.options.presence_penalty[:, None], 0.0)


def counted(
    counts: Int[Array, "slots V"], slots: Int[Array, " R"], tokens: Int[Array, " R"], split: VocabSplit = WHOLE
) -> Int[Array, "slots V"]:
    """Return the counts with each row's token added in its slot; out-of-range slots are skipped."""
    return counts.at[slots, split.columns(tokens, counts.shape[1])].add(1, mode="drop")
