"""The arrays of a step, and the one buffer that carries them to the device.

A step takes all its numbers in one int32 buffer (floats by their bits), so that one transfer carries them; ``unpack``
cuts it up again on the device.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.sampling.penalties import SamplerInputs
from pallas_kernels import AttentionBatch

FLOAT_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
SLOT_NUMBERS = ("top_k", "seeds", *FLOAT_NUMBERS)
"""Numbers of a row's request that stay while it has its slot, one behind the other in the buffer; then arguments."""


class Field(NamedTuple):
    """Where an array lies in the buffer."""

    start: int
    stop: int
    shape: tuple[int, ...]
    is_float: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a compiled step.

    Attributes:
        num_tokens: T, query tokens; equal to ``num_rows`` in a decode step.
        num_rows: R, sequences.
        table_pages: M, pages of the longest context.
        decode_only: Every row has one token.
        scores_prompt: Prompt tokens get logprobs where asked for.
        num_arguments: Numbers of each row for the engine's logits processors.
    """

    num_tokens: int
    num_rows: int
    table_pages: int
    decode_only: bool
    scores_prompt: bool = False
    num_arguments: int = 0

    @functools.cached_property
    def fields(self) -> dict[str, Field]:
        """Place of each array in the buffer, in order."""
        tokens, rows, scalar = (self.num_tokens,), (self.num_rows,), ()
        shapes = {
            **dict.fromkeys(("tokens", "positions", "lengths", "token_pages", "token_offsets", "targets"), tokens),
            "page_table": (self.num_rows, self.table_pages),
            **dict.fromkeys(("context_lens", "query_starts", "query_lens", "slots"), rows),
            **dict.fromkeys(("sampled_slots", "sampled_tokens", "counted_slots"), rows),
            **dict.fromkeys(("pooled_from", "carried_slots"), (0,) if self.decode_only else rows),
            **dict.fromkeys(SLOT_NUMBERS, rows),
            "arguments": (self.num_arguments, self.num_rows),
            **dict.fromkeys(("num_decode", "num_rows", "num_shared_pages", "num_target_tokens", "variant"), scalar),
        }
        fields, start = {}, 0
        for name, shape in shapes.items():
            stop = start + math.prod(shape)
            fields[name] = Field(start, stop, shape, name in (*FLOAT_NUMBERS, "arguments"))
            start = stop
        return fields

    @functools.cached_property
    def slot_numbers(self) -> Field:
        """Place of all ``SLOT_NUMBERS`` and arguments together, a line each."""
        first, last = self.fields[SLOT_NUMBERS[0]], self.fields["arguments"]
        return Field(first.start, last.stop, (len(SLOT_NUMBERS) + self.num_arguments, self.num_rows), False)

    @functools.cached_property
    def buffer_size(self) -> int:
        """Elements of the buffer."""
        return max(field.stop for field in self.fields.values())


class StepBatch(NamedTuple):
    """A step's arrays on the device; see ``AttentionBatch`` for what attention reads.

    Attributes:
        tokens: Token ids; -1 stands for the latest token of the row's slot (rows and tokens agree there).
        positions: Place of each token in its context.
        lengths: Most tokens its request can have.
        targets: Prompt token behind each token, where its logprob is asked for; else -1.
        attention: What attention reads.
        slots: Slot of each row; out of range for an empty row.
        sampled_slots: The same where the row samples; out of range where it does not.
        sampled_tokens: Query token behind which the row samples.
        counted_slots: Slot of each row whose token is to be counted for its penalties; out of range for the others.
        pooled_from: Query token from which on the row's hidden states are summed up; behind the row for none. Decode
            steps have none of these.
        carried_slots: Slot whose sum goes on in the row; out of range where it begins.
        top_k: Candidates kept, 0 for all.
        seeds: Seed of each row's random numbers.
        temperature: 0 for the likeliest token.
        top_p: Probability mass kept.
        min_p: Probability kept, relative to the likeliest token's.
        presence_penalty: See ``jaxserve.engine.plan.Sampling``.
        frequency_penalty: See there.
        repetition_penalty: See there.
        arguments: Numbers for the engine's logits processors.
        num_target_tokens: Tokens up to the last with a target; 0 for none.
        variant: Index of the sampler the rows need, in ``sampler.VARIANTS``.
    """

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    lengths: Int[Array, " T"]
    targets: Int[Array, " T"]
    attention: AttentionBatch
    slots: Int[Array, " R"]
    sampled_slots: Int[Array, " R"]
    sampled_tokens: Int[Array, " R"]
    counted_slots: Int[Array, " R"]
    pooled_from: Int[Array, " pooled"]
    carried_slots: Int[Array, " pooled"]
    top_k: Int[Array, " R"]
    seeds: Int[Array, " R"]
    temperature: Float[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    presence_penalty: Float[Array, " R"]
    frequency_penalty: Float[Array, " R"]
    repetition_penalty: Float[Array, " R"]
    arguments: Float[Array, "arguments R"]
    num_target_tokens: Int[Array, ""]
    variant: Int[Array, ""]


def unpack(buffer: Int[Array, " size"], shape: BatchShape) -> StepBatch:
    """The arrays of a step, on the device."""
    arrays = {}
    for name, field in shape.fields.items():
        part = lax.slice(buffer, (field.start,), (field.stop,)).reshape(field.shape)
        arrays[name] = lax.bitcast_convert_type(part, jnp.float32) if field.is_float else part
    attention = AttentionBatch(**{name: arrays.pop(name) for name in AttentionBatch._fields})
    return StepBatch(attention=attention, **arrays)


def sampler_inputs(batch: StepBatch) -> SamplerInputs:
    """What the sampler reads of a step."""
    numbers = {name: getattr(batch, name) for name in SLOT_NUMBERS}
    return SamplerInputs(
        positions=batch.attention.context_lens, slots=batch.slots, arguments=batch.arguments.T, **numbers
    )
