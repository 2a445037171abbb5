"""What the sampler reads of a step, and how arrays lie in the buffer that carries a step's numbers."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxserve.sampling.penalties import SamplerInputs
from jaxserve.sampling.verification import NOWHERE, Verification
from jaxserve.sampling_options import SAMPLING_OPTIONS, OptionValues

SLOT_NUMBERS = ("seeds", *SAMPLING_OPTIONS)
"""Numbers of a row's request that stay while it has its slot, one after the other in the buffer; then arguments."""
FLOATS = frozenset(
    ("arguments", *(name for name, option in SAMPLING_OPTIONS.items() if isinstance(option.neutral, float)))
)
"""Arrays of the buffer that hold float32."""


class Field(NamedTuple):
    """Where an array lies in the buffer."""

    start: int
    stop: int
    shape: tuple[int, ...]
    is_float: bool


def laid_out(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Field]:
    """Return the places of arrays one after the other."""
    fields, start = {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        fields[name] = Field(start, stop, shape, name in FLOATS)
        start = stop
    return fields


def arrays_in(buffer: Int[Array, " size"], fields: Mapping[str, Field]) -> dict[str, Array]:
    """Return the arrays in a buffer, on the device."""
    arrays = {}
    for name, field in fields.items():
        part = lax.slice(buffer, (field.start,), (field.stop,)).reshape(field.shape)
        arrays[name] = lax.bitcast_convert_type(part, jnp.float32) if field.is_float else part
    return arrays


class SamplerShape(NamedTuple):
    """Sizes that a sampler is compiled for.

    Attributes:
        num_rows: R, sequences.
        num_samples: Tokens sampled; equal to ``num_rows`` where a row samples one.
        max_samples: Most tokens that a row samples: one, and one for each draft.
        num_arguments: Numbers of each row for the engine's logits processors.
    """

    num_rows: int
    num_samples: int
    max_samples: int = 1
    num_arguments: int = 0

    @property
    def from_model(self) -> tuple[str, ...]:
        """Names of the arrays, first in the sampler's part, that the model's program fills in."""
        return ("next_positions",) if self.max_samples == 1 else ("next_positions", "followed")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what the sampler reads, in order; they depend on nothing else."""
        verified = {} if self.max_samples == 1 else {"sample_rows": (self.num_samples,), "num_samples": ()}
        return {
            **dict.fromkeys(self.from_model, (self.num_samples,)),
            **dict.fromkeys(("slots", "sampled_slots", *SLOT_NUMBERS), (self.num_rows,)),
            "arguments": (self.num_arguments, self.num_rows),
            **dict.fromkeys(("num_rows", "variant"), ()),
            **verified,
        }

    @property
    def size(self) -> int:
        """Elements of the part of the buffer that the sampler reads."""
        return sum(map(math.prod, self.shapes.values()))


class SamplerBatch(NamedTuple):
    """What the sampler reads of a step: a sample for each row, or several where rows carry drafts.

    Attributes:
        inputs: Numbers of each sample.
        sampled_slots: Slot of each sample; out of range for those of rows that do not sample.
        num_rows: Samples in use.
        variant: Index of the sampler the rows need, in ``sampler.VARIANTS``.
        verification: How samples belong together; None where each row has one.
    """

    inputs: SamplerInputs
    sampled_slots: Int[Array, " samples"]
    num_rows: Int[Array, ""]
    variant: Int[Array, ""]
    verification: Verification | None = None

    def mask_of_samples(self, mask: Int[Array, "R words"]) -> Int[Array, "samples words"]:
        """Return the mask of each sample, given that of each row."""
        return _of_samples(mask, self.verification)


def unpack_sampler(part: Int[Array, " size"], shape: SamplerShape) -> SamplerBatch:
    """Return what the sampler reads, on the device, from its part of the buffer."""
    return make_sampler_batch(arrays_in(part, laid_out(shape.shapes)), shape)


def make_sampler_batch(arrays: Mapping[str, Array], shape: SamplerShape) -> SamplerBatch:
    """Return what the sampler reads, given the arrays of its part of the buffer."""
    verification, sampled_slots = None, arrays["sampled_slots"]
    if shape.max_samples > 1:
        verification = Verification(arrays["sample_rows"], arrays["followed"])
        sampled_slots = sampled_slots.at[verification.rows].get(mode="fill", fill_value=NOWHERE)
    numbers = {name: _of_samples(arrays[name], verification) for name in ("slots", *SLOT_NUMBERS)}
    inputs = SamplerInputs(
        options=OptionValues(**{name: numbers[name] for name in SAMPLING_OPTIONS}),
        seeds=numbers["seeds"],
        positions=arrays["next_positions"],
        slots=numbers["slots"],
        arguments=_of_samples(arrays["arguments"].T, verification),
        drafts=None if verification is None else verification.drafts_before(shape.max_samples - 1),
    )
    num_samples = arrays["num_rows" if verification is None else "num_samples"]
    return SamplerBatch(inputs, sampled_slots, num_samples, arrays["variant"], verification)


def _of_samples(values: Array, verification: Verification | None) -> Array:
    """What the row of each sample has; samples that are not in use have anything."""
    return values if verification is None else values.at[verification.rows].get(mode="clip")
