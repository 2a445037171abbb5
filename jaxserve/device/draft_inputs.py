"""What drafting reads of a step, and the shapes for which it is compiled as a program of its own, on CPUs."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.device.handed_over import abstract_hidden
from jaxserve.device.sampler_batch import unpack_arrays
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape, StepBatch


class StepTokens(NamedTuple):
    """What a step's batch has instead of the ``ON_DEVICE`` values of its buffer.

    Attributes:
        tokens: Token ids.
        starts: Position of each row's first token.
        hidden: Hidden state of each token, before the norm of the head; None unless a draft head reads it.
        aux: Inputs of the layers that the draft head reads; None if it reads none.
    """

    tokens: Int[Array, " T"]
    starts: Int[Array, " R"]
    hidden: Float[Array, "T D"] | None = None
    aux: Float[Array, "T aux"] | None = None


class DraftInputs(NamedTuple):
    """Inputs of a program that drafts: a buffer of the shape for which it is compiled, and what replaces its values."""

    buffer: Int[Array, " size"]
    given: StepTokens


def abstract_tokens(sharded: ShardedModel, shape: BatchShape) -> StepTokens:
    """Return shapes and shardings for the steps of a shape; ``step_tokens`` leaves out the hidden states."""
    given = StepTokens(*(sharded.rows_struct((size,), jnp.int32) for size in (shape.num_tokens, shape.num_rows)))
    if sharded.aux_layers is None:
        return given
    num_aux = len(sharded.aux_layers)
    aux = abstract_hidden(sharded, shape.num_tokens, num_aux) if num_aux else None
    return given._replace(hidden=abstract_hidden(sharded, shape.num_tokens), aux=aux)


def step_tokens(batch: StepBatch) -> StepTokens:
    """Return them for a step's batch."""
    return StepTokens(batch.tokens, batch.positions.at[batch.row_starts].get(mode="clip"))


def drafting_shape(sharded: ShardedModel, shape: BatchShape, shapes: Sequence[BatchShape]) -> BatchShape:
    """Return the shape of the program that drafts after the steps of one of ``shapes``.

    Kernels that skip padding make it cost very little. One program then serves all decode steps, and one all
    others: compiling them takes longer than all else at startup. Heads have programs of their own for each shape, as
    they read hidden states, which would be padded too; they have few layers.
    """
    assert sharded.drafter is not None
    if sharded.drafter.sharded.head is not None or not skips_padding(sharded):
        return shape
    alike = [each for each in shapes if each.decode_only == shape.decode_only]
    largest = max(alike, key=lambda each: (each.num_rows, each.num_tokens))
    fits = shape.num_rows <= largest.num_rows and shape.num_tokens <= largest.num_tokens
    return largest if fits and shape.max_samples <= largest.max_samples else shape


def skips_padding(sharded: ShardedModel) -> bool:
    """Whether the drafter's kernels skip padding."""
    assert sharded.drafter is not None
    drafter = sharded.drafter.sharded
    return drafter.policy.is_native and drafter.kernel.name == "native" and drafter.row_tile is not None


def widened(sharded: ShardedModel, given: DraftInputs, shape: BatchShape, larger: BatchShape) -> DraftInputs:
    """Return the inputs after a step of a shape for a program of a larger one, inside a program.

    Args:
        sharded: The model.
        given: The step's own buffer, and tokens without hidden states.
        shape: Shape of the step.
        larger: Shape of the program.
    """
    if shape == larger:
        return given
    arrays = unpack_arrays(given.buffer, {name: field._replace(is_float=False) for name, field in shape.fields.items()})
    rows = arrays["token_rows"]
    arrays["token_rows"] = jnp.where(rows < shape.num_rows, rows, larger.num_rows)
    fills = {"token_rows": larger.num_rows, "page_tables": sharded.num_pages}
    fills |= dict.fromkeys(("slots", "sampled_slots"), sharded.num_slots)
    parts = list[Array]()
    for name, field in larger.fields.items():
        array = arrays.get(name, jnp.zeros(field.shape, jnp.int32))
        parts.append(_padded(array, field.shape, fills.get(name, 0)).ravel())
    tokens, starts = given.given.tokens, given.given.starts
    wide = StepTokens(_padded(tokens, (larger.num_tokens,)), _padded(starts, (larger.num_rows,)))
    return DraftInputs(jnp.concatenate(parts), wide)


def _padded(array: Int[Array, "..."], shape: tuple[int, ...], value: int = 0) -> Int[Array, "..."]:
    """Return an array with ``value`` after its elements in each dimension."""
    if array.shape == shape:
        return array
    widths = [(0, size - own) for size, own in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, widths, constant_values=value)
