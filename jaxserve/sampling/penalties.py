"""What a request's own numbers do to its logits before a token is chosen: masks, bias, penalties.

In vLLM's order: masks, logit bias, the engine's processors, then the repetition penalty on tokens of prompt or output,
then frequency and presence penalties on tokens of the output. NaN passes through all of them, so that no mask hides it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.sampling.logits_processors import LogitsProcessor, apply_processors
from jaxserve.sampling_options import OptionValues

IN_PROMPT = 1 << 30
"""Added to a token's count where the prompt has it."""

MAX_TRACKED = 128
"""Most tokens whose logprobs a request can ask for by their ids."""


class SlotTables(NamedTuple):
    """What the device knows of the request in each slot, a row a slot.

    Attributes:
        token_counts: How often the output has each token, plus ``IN_PROMPT`` if the prompt has it; only kept for
            requests with penalties.
        bias: Added to the logits; zeros for requests without a bias.
        tracked_ids: Tokens whose logprobs are reported, padded with 0; only kept for requests that have some.
    """

    token_counts: Int[Array, "slots V"]
    bias: Float[Array, "slots V"]
    tracked_ids: Int[Array, "slots tracked"]


class SamplerInputs(NamedTuple):
    """Numbers of each row; see ``jaxserve.scheduling.plan.Sampling``.

    Attributes:
        options: An array [R] of each of ``SAMPLING_OPTIONS``, float32 or int32.
        seeds: 32-bit seeds.
        positions: Those of the tokens to come.
        slots: The rows' slots; out of range for an empty row.
        arguments: Numbers for the engine's logits processors.
        drafts: Tokens before the token to come that the slot's counts do not have, padded with ids out of the
            vocabulary; None where no row can have any.
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
    processors: Iterable[LogitsProcessor],
) -> Float[Array, "R V"]:
    """Logits with everything applied that may change which token is the likeliest."""
    bits = (mask[:, :, None] >> jnp.arange(32)) & 1
    is_allowed = bits.reshape(mask.shape[0], -1)[:, : logits.shape[1]] == 1
    logits = jnp.where(is_allowed | jnp.isnan(logits), logits, -jnp.inf)
    logits = logits + tables.bias.at[inputs.slots].get(mode="clip")
    logits = apply_processors(logits, processors, inputs.arguments, inputs.positions)
    counts = tables.token_counts.at[inputs.slots].get(mode="clip")
    if inputs.drafts is not None:
        counts = counts.at[jnp.arange(len(counts))[:, None], inputs.drafts].add(1, mode="drop")
    return _penalized(logits, inputs, counts)


def _penalized(logits: Float[Array, "R V"], inputs: SamplerInputs, counts: Int[Array, "R V"]) -> Float[Array, "R V"]:
    repetition = inputs.options.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    in_output = counts & (IN_PROMPT - 1)
    logits = logits - inputs.options.frequency_penalty[:, None] * in_output
    return logits - jnp.where(in_output > 0, inputs.options.presence_penalty[:, None], 0.0)


def counted(counts: Int[Array, "slots V"], slots: Int[Array, " R"], tokens: Int[Array, " R"]) -> Int[Array, "slots V"]:
    """Count with one more of each row's token in its slot; slots out of range count nothing."""
    return counts.at[slots, tokens].add(1, mode="drop")
