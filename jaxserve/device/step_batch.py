"""The input arrays of a step, and the one buffer that carries them to the device.

All inputs are packed into one int32 buffer (floats are bitcast) to transfer them at once; ``unpack`` slices it on the
device. The sampler's inputs come last, with the same layout in all shapes with the same ``SamplerShape``, so that they
can share a separate sampler program (``jaxserve.device.split_steps.trace_sampler``).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxserve.device.sampler_batch import (
    SLOT_PARAMS,
    Field,
    SamplerBatch,
    SamplerShape,
    lay_out,
    make_sampler_batch,
    unpack_arrays,
)
from pallas_kernels import AttentionBatch
from pallas_kernels.attention_parts import Part
from pallas_kernels.recurrent_states import StateRows
from sharding.collectives import axis_index, axis_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a compiled step.

    Attributes:
        num_tokens: T, query tokens; equal to ``num_rows`` in a decode step without drafts.
        num_rows: R, sequences.
        table_pages: M, pages of the longest context.
        decode_only: Whether every row is a latest token and its drafts, if the shape has any, without prompts.
        scores_prompt: Whether the step computes prompt logprobs.
        max_samples: Most samples per row: one plus the number of drafts.
        max_step_samples: Most samples of all rows; None for as many as rows and tokens allow.
        num_arguments: Logits processor arguments per row.
        num_tables: Number of page tables per row.
        state_distance: Fewest tokens between states that are kept for their distance from others, where rows have
            states of recurrent layers; 0: they have none.
    """

    num_tokens: int
    num_rows: int
    table_pages: int
    decode_only: bool
    scores_prompt: bool = False
    max_samples: int = 1
    max_step_samples: int | None = None
    num_arguments: int = 0
    num_tables: int = 1
    state_distance: int = 0

    @property
    def has_states(self) -> bool:
        """Whether rows have states of recurrent layers."""
        return self.state_distance > 0

    @property
    def num_snapshots(self) -> int:
        """Most states that are kept from within rows: those by distance, and three of each row for other reasons."""
        if not self.has_states:
            return 0
        return min(self.num_tokens, self.num_tokens // self.state_distance + 4 * self.num_rows)

    @functools.cached_property
    def fields(self) -> dict[str, Field]:
        """Layout of the buffer: its arrays in order."""
        tokens, rows, scalar = (self.num_tokens,), (self.num_rows,), ()
        shapes = {
            **dict.fromkeys(("tokens", "token_rows", "targets"), tokens),
            "page_tables": (self.num_tables, self.num_rows, self.table_pages),
            **dict.fromkeys(("starts", "row_limits", "query_starts", "query_lens"), rows),
            "sampled_tokens": (self.sampler.num_samples,),
            "counted_slots": rows,
            **dict.fromkeys(("pooled_from", "carried_slots"), (0,) if self.decode_only else rows),
            "num_shared_pages": (self.num_tables,),
            **dict.fromkeys(("num_target_tokens", "num_drafts"), scalar),
            **({"state_pages": rows} if self.has_states else {}),
            **dict.fromkeys(("snapshot_tokens", "snapshot_pages") if self.has_states else (), (self.num_snapshots,)),
            **self.sampler.shapes,
        }
        return lay_out(shapes)

    @functools.cached_property
    def sampler(self) -> SamplerShape:
        """Sizes of the sampler; a row that does not sample counts as one sample."""
        num_samples = min(self.num_tokens, self.num_rows * self.max_samples, self.max_step_samples or self.num_tokens)
        return SamplerShape(self.num_rows, num_samples, self.max_samples, self.num_arguments)

    @property
    def has_drafts(self) -> bool:
        """Whether it is for decode steps with drafts."""
        return self.decode_only and self.max_samples > 1

    @property
    def sampler_start(self) -> int:
        """Start of the sampler's part, which extends to the end of the buffer."""
        return self.buffer_size - self.sampler.size

    @functools.cached_property
    def slot_params(self) -> Field:
        """All ``SLOT_PARAMS`` and arguments as one array, with a row for each."""
        first, last = self.fields[SLOT_PARAMS[0]], self.fields["arguments"]
        return Field(first.start, last.stop, (len(SLOT_PARAMS) + self.num_arguments, self.num_rows), False)

    @functools.cached_property
    def buffer_size(self) -> int:
        """Number of elements of the buffer."""
        return max(field.stop for field in self.fields.values())


class StepBatch(NamedTuple):
    """A step's arrays on the device; see ``AttentionBatch`` for what attention reads.

    Attributes:
        tokens: Token ids.
        positions: Position of each token in its context.
        lengths: Most tokens that its request can reach, prompt included.
        targets: Prompt token after each token if its logprob is requested; else -1.
        attention: Inputs of attention for each page table.
        slots: Slot of each row; out of range for an empty row.
        row_starts: Index of the first query token of each row.
        sampled_tokens: Index of the query token that each sample follows.
        counted_tokens: Index of the query token of each row that may count for penalties: the one that drafts follow.
        counted_slots: Slot of each row whose token counts for penalties; out of range for other rows.
        pooled_from: Index of the first query token of each row to pool; the row's end for none. Empty in decode steps.
        carried_slots: Slot whose sum the row continues; out of range if it starts a new sum.
        num_target_tokens: Number of tokens up to the last with a target; 0 for none.
        sampler: Inputs of the sampler.
        states: Where rows have their states; None unless the model has recurrent layers.
    """

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    lengths: Int[Array, " T"]
    targets: Int[Array, " T"]
    attention: tuple[AttentionBatch, ...]
    slots: Int[Array, " R"]
    row_starts: Int[Array, " R"]
    sampled_tokens: Int[Array, " samples"]
    counted_tokens: Int[Array, " R"]
    counted_slots: Int[Array, " R"]
    pooled_from: Int[Array, " pooled"]
    carried_slots: Int[Array, " pooled"]
    num_target_tokens: Int[Array, ""]
    sampler: SamplerBatch
    states: StateRows | None = None


class LatestTokens(NamedTuple):
    """Latest token of each slot, its position, where the slot's next row starts, and the drafts that follow it."""

    token_ids: Int[Array, " slots"]
    positions: Int[Array, " slots"]
    drafts: Int[Array, "slots drafts"] | None = None


class TokenPlaces(NamedTuple):
    """Where the entries of tokens are.

    Attributes:
        rows: Row of each token that this device writes; out of range for others.
        pages: Index of its page in the row's page table.
        offsets: Its index in the page, on the device that has it.
    """

    rows: Int[Array, " T"]
    pages: Int[Array, " T"]
    offsets: Int[Array, " T"]


def token_places(
    positions: Int[Array, " T"], rows: Int[Array, " T"], num_rows: int, page_size: int, tokens_axis: str | None
) -> TokenPlaces:
    """Return where the entries of tokens are, inside a program; the arguments are those of ``unpack``."""
    offsets = positions % page_size
    if tokens_axis is not None:
        part = Part(axis_index(tokens_axis), axis_size(tokens_axis))
        offsets, rows = offsets // part.num_devices, jnp.where(part.holds(positions), rows, num_rows)
    return TokenPlaces(rows, positions // page_size, offsets)


def unpack(
    buffer: Int[Array, " size"],
    shape: BatchShape,
    latest: LatestTokens,
    page_size: int,
    num_pages: int,
    tokens_axis: str | None = None,
    splits_rows: bool = False,
) -> StepBatch:
    """Return the arrays of a step, inside a program.

    Args:
        buffer: Buffer from ``batch.build``.
        shape: Batch shape.
        latest: Replaces the ``ON_DEVICE`` values of the buffer.
        page_size: Tokens per page.
        num_pages: Usable pages; the null page follows them, then the page that padding tokens write to.
        tokens_axis: Mesh axis of devices that share the tokens of pages, if any: each writes those of the others to the
            page of padding tokens.
        splits_rows: Whether attention has a row for each token of a decode step, draft or not.
    """
    arrays = unpack_arrays(buffer, shape.fields)
    lens, rows, tokens = arrays["query_lens"], arrays["token_rows"], arrays["tokens"]
    latest = jax.tree.map(lambda values: values.at[arrays["slots"]].get(mode="clip"), latest)
    starts = jnp.where(arrays["starts"] < 0, latest.positions, arrays["starts"])
    token = jnp.where(rows < shape.num_rows, jnp.arange(shape.num_tokens, dtype=jnp.int32), 0)
    positions = _of_rows(starts - arrays["query_starts"], rows) + token
    places = token_places(positions, rows, shape.num_rows, page_size, tokens_axis)
    written_rows = places.rows
    arrays |= {
        "tokens": jnp.where(tokens < 0, _latest_of_rows(latest, rows, positions), tokens),
        "positions": positions,
        "lengths": _of_rows(arrays["row_limits"], rows),
        "token_pages": places.pages,
        "token_offsets": places.offsets,
        "context_lens": starts + lens,
        "next_positions": starts + lens,
        "row_starts": arrays["query_starts"],
        "counted_tokens": arrays["query_starts"],
    }
    states = _state_rows(arrays, starts) if shape.has_states else None
    if shape.max_samples > 1:
        arrays |= {
            "next_positions": positions.at[arrays["sampled_tokens"]].get(mode="clip") + 1,
            "followed": arrays["tokens"].at[arrays["sampled_tokens"]].get(mode="clip"),
        }
    if shape.max_samples > 1 and shape.has_states:  # rows may begin with accepted drafts, which have been counted
        first_samples = jnp.searchsorted(arrays["sample_rows"], jnp.arange(shape.num_rows))
        arrays["counted_tokens"] = arrays["sampled_tokens"].at[first_samples].get(mode="clip")
    if splits_rows and shape.has_drafts:
        arrays |= row_of_each_token(arrays, rows < shape.num_rows)
        written_rows = jnp.where(written_rows < shape.num_rows, arrays["query_starts"], shape.num_tokens)
    attention = tuple(_of_table(arrays, table, written_rows, num_pages + 1) for table in range(shape.num_tables))
    others = {name: arrays[name] for name in StepBatch._fields if name in arrays}
    return StepBatch(attention=attention, sampler=make_sampler_batch(arrays, shape.sampler), states=states, **others)


def _state_rows(arrays: Mapping[str, Array], starts: Int[Array, " R"]) -> StateRows:
    """Return where the rows have their states; ``starts`` are positions of their first tokens."""
    return StateRows(
        starts=arrays["query_starts"],
        lens=arrays["query_lens"],
        are_new=starts == 0,
        pages=arrays["state_pages"],
        snapshot_tokens=arrays["snapshot_tokens"],
        snapshot_pages=arrays["snapshot_pages"],
    )


def _latest_of_rows(latest: LatestTokens, rows: Int[Array, " T"], positions: Int[Array, " T"]) -> Int[Array, " T"]:
    """Return the latest token of each token's row, or the draft for its position."""
    if latest.drafts is None:
        return _of_rows(latest.token_ids, rows)
    tokens = jnp.column_stack([latest.token_ids, latest.drafts])
    index = jnp.clip(positions - _of_rows(latest.positions, rows), 0, tokens.shape[1] - 1)
    return tokens.at[rows, index].get(mode="fill", fill_value=0)


def row_of_each_token(arrays: Mapping[str, Array], is_used: Bool[Array, " T"]) -> dict[str, Array]:
    """Return the inputs of attention with a row for each query token, as in a decode step without drafts."""
    lens = is_used.astype(jnp.int32)
    return {
        "page_tables": arrays["page_tables"].at[:, arrays["token_rows"]].get(mode="clip"),
        "context_lens": jnp.where(is_used, arrays["positions"] + 1, 0),
        "query_starts": jnp.arange(len(lens), dtype=jnp.int32),
        "query_lens": lens,
        "num_rows": lens.sum(dtype=jnp.int32),
    }


def _of_table(arrays: Mapping[str, Array], table: int, rows: Int[Array, " T"], padding_page: int) -> AttentionBatch:
    """Return the inputs of attention for one page table; ``arrays["token_pages"]`` are indices in the table, and
    ``rows`` are those of the tokens that this device writes."""
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
    """Return the input of ``unpack_sampler``: the end of the buffer, with the arrays that ``unpack`` computed."""
    computed = [batch.sampler.inputs.positions]
    if batch.sampler.verification is not None:
        computed.append(batch.sampler.verification.followed)
    after = buffer[shape.sampler_start + len(computed) * shape.sampler.num_samples :]
    return jnp.concatenate([*computed, after])


def _of_rows(values: Int[Array, " R"], rows: Int[Array, " T"]) -> Int[Array, " T"]:
    """Return the value of each token's row; 0 for padding tokens."""
    return values.at[rows].get(mode="fill", fill_value=0)
