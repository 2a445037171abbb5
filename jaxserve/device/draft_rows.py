"""The rows of a step as its drafter sees them, and where their tokens are in the batch that it takes in."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxserve.api.sampling_options import SAMPLING_OPTIONS, OptionValues
from jaxserve.device.sampler_batch import SLOT_PARAMS
from jaxserve.device.sharded_model import Drafter, ShardedModel
from jaxserve.device.step_batch import LatestTokens
from jaxserve.sampling.penalties import SamplerInputs


class DraftRows(NamedTuple):
    """The rows of a step, for the drafter.

    Attributes:
        is_used: Whether there is such a row.
        samples: Whether it has sampled a token.
        token: That token, its latest.
        position: Position of that token.
        limits: Most tokens that its request can reach.
        page_table: Its pages, in the page table that the drafter uses.
        inputs: Sampling parameters, without positions.
    """

    is_used: Bool[Array, " R"]
    samples: Bool[Array, " R"]
    token: Int[Array, " R"]
    position: Int[Array, " R"]
    limits: Int[Array, " R"]
    page_table: Int[Array, "R M"]
    inputs: SamplerInputs

    @classmethod
    def of(
        cls, fields: Mapping[str, Array], latest: LatestTokens, sharded: ShardedModel, drafter: Drafter
    ) -> "DraftRows":
        """Return the rows of a step with these arrays, which has left these latest tokens."""
        slots = fields["sampled_slots"]
        samples = slots < sharded.num_slots
        options = {name: fields[name] for name in SLOT_PARAMS}
        inputs = SamplerInputs(
            options=OptionValues(**{name: options[name] for name in SAMPLING_OPTIONS}),
            seeds=fields["seeds"],
            positions=slots,
            slots=slots,
            arguments=fields["arguments"].T,
        )
        return cls(
            is_used=jnp.arange(len(slots)) < fields["num_rows"],
            samples=samples,
            token=latest.token_ids.at[slots].get(mode="clip"),
            position=jnp.where(samples, latest.positions.at[slots].get(mode="clip"), 0),
            limits=fields["row_limits"],
            page_table=fields["page_tables"][drafter.table],
            inputs=inputs,
        )

    def num_before_next(self, fields: Mapping[str, Array], goes_back: bool) -> Int[Array, " R"]:
        """Return how many tokens of each row come before the first of the next row of its slot.

        Args:
            fields: Arrays of the step.
            goes_back: Whether the row after rejected drafts begins with the accepted ones; see
                ``scheduling.draft_states``.
        """
        lens = fields["query_lens"]
        num_kept = jnp.where(self.samples, self.position - fields["starts"], lens)
        if not goes_back:
            return num_kept
        num_samples = jnp.zeros_like(lens).at[fields["sample_rows"]].add(1, mode="drop")
        return jnp.where(num_kept < lens, lens - num_samples + 1, num_kept)

    @property
    def num_used(self) -> Int[Array, ""]:
        """Number of rows."""
        return self.is_used.sum(dtype=jnp.int32)


class DraftTokens(NamedTuple):
    """The tokens that a drafter takes in: for each row those that the step has kept, then what it has sampled.

    Attributes:
        begins: Index of each row's first token; out of range for an empty row.
        lens: Number of tokens of each row.
        sampled: Index of the token that each row has sampled; out of range where it has none.
        moved_to: Index of each of the step's tokens; out of range for padding and for drafts that were rejected.
        row_of: Row of each token; out of range for padding.
        tokens: Token ids.
        positions: Position of each; 0 for padding.
    """

    begins: Int[Array, " R"]
    lens: Int[Array, " R"]
    sampled: Int[Array, " R"]
    moved_to: Int[Array, " step"]
    row_of: Int[Array, " T"]
    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]

    @classmethod
    def of(
        cls,
        fields: Mapping[str, Array],
        rows: DraftRows,
        num_tokens: int,
        num_added: Int[Array, ""] | int = 1,
        mask_token: int = 0,
    ) -> "DraftTokens":
        """Return them for a step.

        Args:
            fields: Arrays of the step.
            rows: Its rows.
            num_tokens: T.
            num_added: Most tokens of a row that the step did not have: the sampled one, and mask tokens after it as far
                as the request can reach.
            mask_token: The mask token.
        """
        starts, step_rows = fields["starts"], fields["token_rows"]
        num_kept = jnp.where(rows.samples, rows.position - starts, fields["query_lens"])
        added = jnp.where(rows.samples, jnp.minimum(num_added, jnp.maximum(rows.limits - rows.position, 1)), 0)
        lens = jnp.where(rows.is_used, num_kept + added, 0)
        ends = jnp.cumsum(lens, dtype=jnp.int32)
        begins = jnp.where(rows.is_used, ends - lens, num_tokens)

        index = jnp.arange(len(step_rows), dtype=jnp.int32)
        in_row = index - fields["query_starts"].at[step_rows].get(mode="fill", fill_value=0)
        is_kept = in_row < num_kept.at[step_rows].get(mode="fill", fill_value=0)
        moved_to = begins.at[step_rows].get(mode="fill", fill_value=num_tokens) + in_row
        moved_to = jnp.where(is_kept & (step_rows < len(starts)), moved_to, num_tokens)

        index = jnp.arange(num_tokens, dtype=jnp.int32)
        row_of = (ends <= index[:, None]).sum(1, dtype=jnp.int32)
        in_row = index - begins.at[row_of].get(mode="fill", fill_value=0)
        after = in_row - num_kept.at[row_of].get(mode="fill", fill_value=0)
        tokens = jnp.zeros(num_tokens, jnp.int32).at[moved_to].set(fields["tokens"], mode="drop")
        added = jnp.where(after == 0, rows.token.at[row_of].get(mode="clip"), mask_token)
        positions = starts.at[row_of].get(mode="fill", fill_value=0) + in_row
        return cls(
            begins=begins,
            lens=lens,
            sampled=jnp.where(rows.samples, begins + num_kept, num_tokens),
            moved_to=moved_to,
            row_of=row_of,
            tokens=jnp.where(after >= 0, added, tokens),
            positions=jnp.where(row_of < len(starts), positions, 0),
        )
