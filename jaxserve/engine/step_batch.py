"""The arrays of a step, and the one buffer that carries them to the device.

A step takes all its numbers in one int32 buffer (floats by their bits), so that one transfer carries them; ``unpack``
cuts it up again on the device. What the sampler reads comes last and lies the same in all shapes with the same number
of rows, so that a sampler of its own (``jaxserve.engine.split_steps.trace_sampler``) serves all of them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxserve.sampling.penalties import SamplerInputs
from jaxserve.sampling_options import SAMPLING_OPTIONS, OptionValues
from pallas_kernels import AttentionBatch

SLOT_NUMBERS = ("seeds", *SAMPLING_OPTIONS)
"""Numbers of a row's request that stay while it has its slot, one after the other in the buffer; then arguments."""
FLOATS = frozenset(
    ("arguments", *(name for name, option in SAMPLING_OPTIONS.items() if isinstance(option.neutral, float)))
)
"""Arrays of the buffer that hold float32."""

_FIRST_OF_SAMPLER = "next_positions"


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
            **dict.fromkeys(("tokens", "token_rows", "targets"), tokens),
            "page_table": (self.num_rows, self.table_pages),
            **dict.fromkeys(("starts", "row_limits", "query_starts", "query_lens"), rows),
            **dict.fromkeys(("sampled_tokens", "counted_slots"), rows),
            **dict.fromkeys(("pooled_from", "carried_slots"), (0,) if self.decode_only else rows),
            **dict.fromkeys(("num_shared_pages", "num_target_tokens"), scalar),
            **_sampler_shapes(self.num_rows, self.num_arguments),
        }
        return _laid_out(shapes)

    @property
    def sampler_start(self) -> int:
        """Where the part of the buffer that the sampler reads starts; it ends with the buffer."""
        return self.fields[_FIRST_OF_SAMPLER].start

    @functools.cached_property
    def slot_numbers(self) -> Field:
        """Place of all ``SLOT_NUMBERS`` and arguments together, a line each."""
        first, last = self.fields[SLOT_NUMBERS[0]], self.fields["arguments"]
        return Field(first.start, last.stop, (len(SLOT_NUMBERS) + self.num_arguments, self.num_rows), False)

    @functools.cached_property
    def buffer_size(self) -> int:
        """Elements of the buffer."""
        return max(field.stop for field in self.fields.values())


def sampler_size(num_rows: int, num_arguments: int) -> int:
    """Elements of the part of the buffer that the sampler reads."""
    return max(field.stop for field in _laid_out(_sampler_shapes(num_rows, num_arguments)).values())


def _sampler_shapes(num_rows: int, num_arguments: int) -> dict[str, tuple[int, ...]]:
    """Shapes of what the sampler reads, in order; they depend on nothing else."""
    return {
        **dict.fromkeys((_FIRST_OF_SAMPLER, "slots", "sampled_slots", *SLOT_NUMBERS), (num_rows,)),
        "arguments": (num_arguments, num_rows),
        **dict.fromkeys(("num_rows", "variant"), ()),
    }


def _laid_out(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Field]:
    """Arrays one after the other."""
    fields, start = {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        fields[name] = Field(start, stop, shape, name in FLOATS)
        start = stop
    return fields


class SamplerBatch(NamedTuple):
    """What the sampler reads of a step.

    Attributes:
        inputs: Numbers of each row.
        sampled_slots: Slot of each row that samples; out of range for the others.
        num_rows: Rows in use.
        variant: Index of the sampler the rows need, in ``sampler.VARIANTS``.
    """

    inputs: SamplerInputs
    sampled_slots: Int[Array, " R"]
    num_rows: Int[Array, ""]
    variant: Int[Array, ""]


class StepBatch(NamedTuple):
    """A step's arrays on the device; see ``AttentionBatch`` for what attention reads.

    Attributes:
        tokens: Token ids.
        positions: Position of each token in its context.
        lengths: Most tokens its request can have.
        targets: Prompt token after each token, where its logprob is asked for; else -1.
        attention: What attention reads.
        slots: Slot of each row; out of range for an empty row.
        sampled_tokens: Query token after which the row samples.
        counted_slots: Slot of each row whose token is to be counted for its penalties; out of range for the others.
        pooled_from: Query token from which on the row's hidden states are summed up; after the row's end for none.
            Decode steps have none of these.
        carried_slots: Slot whose sum goes on in the row; out of range where it begins.
        num_target_tokens: Tokens up to the last with a target; 0 for none.
        sampler: What the sampler reads.
    """

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    lengths: Int[Array, " T"]
    targets: Int[Array, " T"]
    attention: AttentionBatch
    slots: Int[Array, " R"]
    sampled_tokens: Int[Array, " R"]
    counted_slots: Int[Array, " R"]
    pooled_from: Int[Array, " pooled"]
    carried_slots: Int[Array, " pooled"]
    num_target_tokens: Int[Array, ""]
    sampler: SamplerBatch


class LatestTokens(NamedTuple):
    """The latest token of each slot, and its position: where the next row of the slot starts."""

    token_ids: Int[Array, " slots"]
    positions: Int[Array, " slots"]


def unpack(
    buffer: Int[Array, " size"], shape: BatchShape, latest: LatestTokens, page_size: int, num_pages: int
) -> StepBatch:
    """Return the arrays of a step, on the device.

    Args:
        buffer: As ``BatchBuilder`` makes it.
        shape: Sizes of the step.
        latest: What the host left to the device.
        page_size: Tokens a page.
        num_pages: Usable pages; the null page comes after them, and then the page that padding tokens write to.
    """
    arrays = _arrays(buffer, shape.fields)
    lens, rows, tokens = arrays["query_lens"], arrays["token_rows"], arrays["tokens"]
    latest = LatestTokens(*(values.at[arrays["slots"]].get(mode="clip") for values in latest))
    starts = jnp.where(arrays["starts"] < 0, latest.positions, arrays["starts"])
    token = jnp.where(rows < shape.num_rows, jnp.arange(shape.num_tokens, dtype=jnp.int32), 0)
    positions = _of_rows(starts - arrays["query_starts"], rows) + token
    pages = arrays["page_table"].at[rows, positions // page_size].get(mode="fill", fill_value=num_pages + 1)
    arrays |= {
        "tokens": jnp.where(tokens < 0, _of_rows(latest.token_ids, rows), tokens),
        "positions": positions,
        "lengths": _of_rows(arrays["row_limits"], rows),
        "token_pages": pages,
        "token_offsets": positions % page_size,
        "context_lens": starts + lens,
        "next_positions": starts + lens,
    }
    attention = AttentionBatch(**{name: arrays[name] for name in AttentionBatch._fields})
    others = {name: arrays[name] for name in StepBatch._fields if name in arrays}
    return StepBatch(attention=attention, sampler=_sampler_batch(arrays), **others)


def sampler_part(buffer: Int[Array, " size"], shape: BatchShape, batch: StepBatch) -> Int[Array, " part"]:
    """Return what ``unpack_sampler`` takes: a part of the buffer, and the positions that ``unpack`` found."""
    after = buffer[shape.sampler_start + shape.num_rows :]
    return jnp.concatenate([batch.sampler.inputs.positions, after])


def _of_rows(values: Int[Array, " R"], rows: Int[Array, " T"]) -> Int[Array, " T"]:
    """Values of each token's row; 0 for padding tokens."""
    return values.at[rows].get(mode="fill", fill_value=0)


def unpack_sampler(part: Int[Array, " size"], num_rows: int, num_arguments: int) -> SamplerBatch:
    """What the sampler reads, on the device, from its part of the buffer."""
    return _sampler_batch(_arrays(part, _laid_out(_sampler_shapes(num_rows, num_arguments))))


def _sampler_batch(arrays: Mapping[str, Array]) -> SamplerBatch:
    inputs = SamplerInputs(
        options=OptionValues(**{name: arrays[name] for name in SAMPLING_OPTIONS}),
        seeds=arrays["seeds"],
        positions=arrays["next_positions"],
        slots=arrays["slots"],
        arguments=arrays["arguments"].T,
    )
    return SamplerBatch(inputs, arrays["sampled_slots"], arrays["num_rows"], arrays["variant"])


def _arrays(buffer: Int[Array, " size"], fields: Mapping[str, Field]) -> dict[str, Array]:
    """The arrays in a buffer."""
    arrays = {}
    for name, field in fields.items():
        part = lax.slice(buffer, (field.start,), (field.stop,)).reshape(field.shape)
        arrays[name] = lax.bitcast_convert_type(part, jnp.float32) if field.is_float else part
    return arrays
