"""The sampler's inputs of a step, and the layout of arrays in the buffer that carries a step's inputs."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxserve.api.sampling_options import SAMPLING_OPTIONS, OptionValues
from jaxserve.sampling.penalties import SamplerInputs
from jaxserve.sampling.verification import NOWHERE, Verification

SLOT_PARAMS = ("seeds", *SAMPLING_OPTIONS)
"""Sampling parameters that are constant while a request has its slot, in buffer order; ``arguments`` follow them."""
FLOAT_FIELDS = frozenset(
    ("arguments", *(name for name, option in SAMPLING_OPTIONS.items() if isinstance(option.neutral, float)))
)
"""Arrays of the buffer with float32 elements; all others are int32."""


class Field(NamedTuple):
    """Position, shape and dtype of an array in the buffer."""

    start: int
    stop: int
    shape: tuple[int, ...]
    is_float: bool


def lay_out(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Field]:
    """Lay out arrays contiguously, in order."""
    fields, start = {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        fields[name] = Field(start, stop, shape, name in FLOAT_FIELDS)
        start = stop
    return fields


def unpack_arrays(buffer: Int[Array, " size"], fields: Mapping[str, Field]) -> dict[str, Array]:
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
        num_samples: Most samples per step; equal to ``num_rows`` without drafts.
        max_samples: Most samples per row: one plus the number of drafts.
        num_arguments: Logits processor arguments per row.
    """

    num_rows: int
    num_samples: int
    max_samples: int = 1
    num_arguments: int = 0

    @property
    def from_model(self) -> tuple[str, ...]:
        """Names of the arrays that the model's program fills in; they come first."""
        return ("next_positions",) if self.max_samples == 1 else ("next_positions", "followed")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the sampler's inputs, in order."""
        verified = {} if self.max_samples == 1 else {"sample_rows": (self.num_samples,), "num_samples": ()}
        return {
            **dict.fromkeys(self.from_model, (self.num_samples,)),
            **dict.fromkeys(("slots", "sampled_slots", *SLOT_PARAMS), (self.num_rows,)),
            "arguments": (self.num_arguments, self.num_rows),
            **dict.fromkeys(("num_rows", "variant"), ()),
            **verified,
        }

    @property
    def size(self) -> int:
        """Number of elements of the sampler's part of the buffer."""
        return sum(map(math.prod, self.shapes.values()))


class SamplerBatch(NamedTuple):
    """The sampler's inputs of a step. Each row has one sample, or one plus the number of its drafts.

    Attributes:
        inputs: Sampling parameters of each sample.
        sampled_slots: Slot of each sample; out of range for rows that do not sample.
        num_rows: Number of samples in use.
        variant: Index of the sampler variant in ``sampler.VARIANTS``.
        verification: Row and draft of each sample; None without drafts.
    """

    inputs: SamplerInputs
    sampled_slots: Int[Array, " samples"]
    num_rows: Int[Array, ""]
    variant: Int[Array, ""]
    verification: Verification | None = None


def unpack_sampler(part: Int[Array, " size"], shape: SamplerShape) -> SamplerBatch:
    """Return the sampler's inputs from its part of the buffer, inside a program."""
    return make_sampler_batch(unpack_arrays(part, lay_out(shape.shapes)), shape)


def make_sampler_batch(arrays: Mapping[str, Array], shape: SamplerShape) -> SamplerBatch:
    """Return the sampler's inputs from the arrays of its part of the buffer."""
    verification, sampled_slots = None, arrays["sampled_slots"]
    if shape.max_samples > 1:
        verification = Verification(arrays["sample_rows"], arrays["followed"])
        sampled_slots = sampled_slots.at[verification.rows].get(mode="fill", fill_value=NOWHERE)
    params = {name: _of_samples(arrays[name], verification) for name in ("slots", *SLOT_PARAMS)}
    inputs = SamplerInputs(
        options=OptionValues(**{name: params[name] for name in SAMPLING_OPTIONS}),
        seeds=params["seeds"],
        positions=arrays["next_positions"],
        slots=params["slots"],
        arguments=_of_samples(arrays["arguments"].T, verification),
        drafts=None if verification is None else verification.drafts_before(shape.max_samples - 1),
    )
    num_samples = arrays["num_rows" if verification is None else "num_samples"]
    return SamplerBatch(inputs, sampled_slots, num_samples, arrays["variant"], verification)


def _of_samples(values: Array, verification: Verification | None) -> Array:
    """Return the value of each sample's row; undefined for samples not in use."""
    return values if verification is None else values.at[verification.rows].get(mode="clip")
