"""The arrays of a step, and the one buffer that carries them to the device.

A step takes all its numbers in one int32 buffer (floats by their bits), so that one transfer carries them; ``unpack``
cuts it up again on the device. What the sampler reads comes last and lies the same in all shapes with the same
``SamplerShape``, so that a sampler of its own (``jaxserve.device.split_steps.trace_sampler``) serves all of them.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.device.sampler_batch import (
    SLOT_NUMBERS,
    Field,
    SamplerBatch,
    SamplerShape,
    arrays_in,
    laid_out,
    make_sampler_batch,
)
from pallas_kernels import AttentionBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a compiled step.

    Attributes:
        num_tokens: T, query tokens; equal to ``num_rows`` in a decode step.
        num_rows: R, sequences.
        table_pages: M, pages of the longest context.
        decode_only: Every row has one token.
        scores_prompt: Prompt tokens get logprobs where asked for.
        max_samples: Most tokens that a row samples: one, and one for each draft.
        num_arguments: Numbers of each row for the engine's logits processors.
        num_tables: Page tables of each row.
    """

    num_tokens: int
    num_rows: int
    table_pages: int
    decode_only: bool
    scores_prompt: bool = False
    max_samples: int = 1
    num_arguments: int = 0
    num_tables: int = 1

    @functools.cached_property
    def fields(self) -> dict[str, Field]:
        """Place of each array in the buffer, in order."""
        tokens, rows, scalar = (self.num_tokens,), (self.num_rows,), ()
        shapes = {
            **dict.fromkeys(("tokens", "token_rows", "targets"), tokens),
            "page_tables": (self.num_tables, self.num_rows, self.table_pages),
            **dict.fromkeys(("starts", "row_limits", "query_starts", "query_lens"), rows),
            "sampled_tokens": (self.sampler.num_samples,),
            "counted_slots": rows,
            **dict.fromkeys(("pooled_from", "carried_slots"), (0,) if self.decode_only else rows),
            "num_shared_pages": (self.num_tables,),
            "num_target_tokens": scalar,
            **self.sampler.shapes,
        }
        return laid_out(shapes)

    @functools.cached_property
    def sampler(self) -> SamplerShape:
        """Sizes of the sampler; a row that samples nothing takes the place of one sample too."""
        num_samples = min(self.num_tokens, self.num_rows * self.max_samples)
        return SamplerShape(self.num_rows, num_samples, self.max_samples, self.num_arguments)

    @property
    def sampler_start(self) -> int:
        """Where the part of the buffer that the sampler reads starts; it ends with the buffer."""
        return self.buffer_size - self.sampler.size

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
        tokens: Token ids.
        positions: Position of each token in its context.
        lengths: Most tokens its request can have.
        targets: Prompt token after each token, where its logprob is asked for; else -1.
        attention: What attention reads, for each page table.
        slots: Slot of each row; out of range for an empty row.
        sampled_tokens: Query token that each sample comes after.
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
    attention: tuple[AttentionBatch, ...]
    slots: Int[Array, " R"]
    sampled_tokens: Int[Array, " samples"]
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
        page_size: Tokens per page.
        num_pages: Usable pages; the null page comes after them, and then the page that padding tokens write to.
    """
    arrays = arrays_in(buffer, shape.fields)
    lens, rows, tokens = arrays["query_lens"], arrays["token_rows"], arrays["tokens"]
    latest = LatestTokens(*(values.at[arrays["slots"]].get(mode="clip") for values in latest))
    starts = jnp.where(arrays["starts"] < 0, latest.positions, arrays["starts"])
    token = jnp.where(rows < shape.num_rows, jnp.arange(shape.num_tokens, dtype=jnp.int32), 0)
    positions = _of_rows(starts - arrays["query_starts"], rows) + token
    arrays |= {
        "tokens": jnp.where(tokens < 0, _of_rows(latest.token_ids, rows), tokens),
        "positions": positions,
        "lengths": _of_rows(arrays["row_limits"], rows),
        "token_pages": positions // page_size,
        "token_offsets": positions % page_size,
        "context_lens": starts + lens,
        "next_positions": starts + lens,
    }
    if shape.max_samples > 1:
        arrays |= {
            "next_positions": positions.at[arrays["sampled_tokens"]].get(mode="clip") + 1,
            "followed": arrays["tokens"].at[arrays["sampled_tokens"]].get(mode="clip"),
        }
    attention = tuple(_of_table(arrays, table, rows, num_pages + 1) for table in range(shape.num_tables))
    others = {name: arrays[name] for name in StepBatch._fields if name in arrays}
    return StepBatch(attention=attention, sampler=make_sampler_batch(arrays, shape.sampler), **others)


def _of_table(arrays: Mapping[str, Array], table: int, rows: Int[Array, " T"], padding_page: int) -> AttentionBatch:
    """What attention reads with one of the page tables; ``token_pages`` are indices in the table as yet."""
    page_table = arrays["page_tables"][table]
    own = {
        "page_table": page_table,
        "token_pages": page_table.at[rows, arrays["token_pages"]].get(mode="fill", fill_value=padding_page),
        "num_shared_pages": arrays["num_shared_pages"][table],
    }
    return AttentionBatch(
        **own, **{name: arrays[name] for name in AttentionBatch._fields if name in arrays and name not in own}
    )


def sampler_part(buffer: Int[Array, " size"], shape: BatchShape, batch: StepBatch) -> Int[Array, " part"]:
    """Return what ``unpack_sampler`` takes: a part of the buffer, with what ``unpack`` found."""
    found = [batch.sampler.inputs.positions]
    if batch.sampler.verification is not None:
        found.append(batch.sampler.verification.followed)
    after = buffer[shape.sampler_start + len(found) * shape.sampler.num_samples :]
    return jnp.concatenate([*found, after])


def _of_rows(values: Int[Array, " R"], rows: Int[Array, " T"]) -> Int[Array, " T"]:
    """Values of each token's row; 0 for padding tokens."""
    return values.at[rows].get(mode="fill", fill_value=0)
