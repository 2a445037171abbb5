"""Drafting on the device: after the sampler, a draft model guesses the tokens of each slot's next row.

The draft model takes in every token that the model took in and kept during the step, and the sampled ones, so that its
keys and values are in the same pages at the same positions, whatever happened to a context before. Each further draft
takes a pass over one token per row, unless the drafter guesses all in one (``parallel_drafting``). The host says
how many drafts the next rows want. Drafts stay on the device (``LatestTokens.drafts``), where the slot's next row reads
them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.device.block_drafting import BlockTokens, take_in_block
from jaxserve.device.draft_inputs import DraftInputs, StepTokens, abstract_tokens
from jaxserve.device.draft_rows import DraftRows, DraftTokens
from jaxserve.device.head_states import HeadStates
from jaxserve.device.parallel_drafting import sample_at_masks
from jaxserve.device.sampler_batch import unpack_arrays
from jaxserve.device.sharded_model import Drafter, ShardedModel
from jaxserve.device.step_batch import BatchShape, LatestTokens, TokenPlaces, row_of_each_token, token_places
from jaxserve.device.step_state import StepState
from jaxserve.device.structs import shardings
from jaxserve.layers.attention import AttentionSettings, Pools
from jaxserve.layers.rows import map_rows
from jaxserve.models.causal_lm import CausalLM, TokenBatch
from jaxserve.models.drafters.dflash import DFlashHead
from jaxserve.models.drafters.draft_head import ChainHead, DraftHead
from jaxserve.sampling.penalties import SamplerInputs
from jaxserve.sampling.sampler import VARIANTS, sample_plainly
from jaxserve.sampling.verification import NOWHERE
from pallas_kernels import AttentionBatch


def trace_drafts(sharded: ShardedModel, shape: BatchShape) -> jax.stages.Traced:
    """Trace the drafting of a batch shape as a program of its own, for CPUs.

    The traced function maps (packed parameters, ``Drafted``, ``DraftInputs``) to ``Drafted``, which it donates.
    """

    def drafts(arrays: tuple[Array, ...], before: Drafted, inputs: DraftInputs) -> Drafted:
        return draft(sharded, arrays, before, inputs.buffer, inputs.given, shape, "any")

    buffer = sharded.rows_struct((shape.buffer_size,), jnp.int32)
    before = Drafted(sharded.abstract_all_pools(), sharded.abstract_latest(), sharded.abstract_states())
    inputs = DraftInputs(buffer, abstract_tokens(sharded, shape))
    return sharded.trace(drafts, (sharded.program_params, before, inputs), shardings(before), donated=[1])


class Drafted(NamedTuple):
    """What drafting changes of the state; see ``StepState``."""

    pools: tuple[Pools, ...]
    latest: LatestTokens
    states: HeadStates | None

    @classmethod
    def before(cls, state: StepState) -> "Drafted":
        """Return these parts of the state before drafting."""
        return cls(state.pools, state.latest, state.states)

    def put_into(self, state: StepState) -> StepState:
        """Return the state with these parts."""
        return state._replace(pools=self.pools, latest=self.latest, states=self.states)


def draft(
    sharded: ShardedModel,
    arrays: tuple[Array, ...],
    before: Drafted,
    buffer: Int[Array, " size"],
    given: StepTokens,
    shape: BatchShape,
    variant: str,
) -> Drafted:
    """Draft the tokens after each row that has sampled.

    Args:
        sharded: The model, with its drafter.
        arrays: Packed parameters of the model and the drafter.
        before: The state after the sampler; the drafter's pools are the last.
        buffer: The step's buffer.
        given: What the step has instead of the buffer's ``ON_DEVICE`` values.
        shape: Batch shape.
        variant: Sampler variant; ``any``: the buffer's.
    """
    drafter, (pools, latest, states) = sharded.drafter, before
    assert drafter is not None and latest.drafts is not None
    fields = unpack_arrays(buffer, shape.fields) | {"tokens": given.tokens, "starts": given.starts}
    rows, num_drafts = DraftRows.of(fields, latest, sharded, drafter), fields["num_drafts"]
    first, seen = len(sharded.own_pools()), None
    run = _Run.of(sharded, arrays, rows, fields["variant"] if variant == "any" else jnp.int32(VARIANTS.index(variant)))
    most_drafts, num_query = latest.drafts.shape[1], jnp.where(rows.is_used, fields["query_lens"], 0).sum()
    if isinstance(run.model, DFlashHead):
        own, begin = run.seen(given, num_query), 1 + jnp.arange(shape.num_rows, dtype=jnp.int32) * (1 + num_drafts)
        hidden, drafted_pools = run.take_in_block(fields, pools[first:], num_drafts, most_drafts, own)
    else:
        tokens = _tokens(fields, rows, shape, drafter, most_drafts)
        if states is not None:
            own = run.seen(given, num_query)
            kept = run.kept(states, own, fields, shape.has_states and shape.max_samples > 1)
            seen, states = _Seen(own, run.before(states._replace(pages=kept.pages), fields)), kept
        hidden, drafted_pools = run.take_in(fields, pools[first:], shape, tokens, seen)
        begin = tokens.sampled
    filled = jnp.zeros((most_drafts, shape.num_rows), jnp.int32)

    def at_round(i: Int[Array, ""]) -> _Run:
        return _Run.of(sharded, _for_round(sharded, drafter, arrays, i), rows, run.variant)

    if drafter.mask_token is None:
        taken = _Taken(drafted_pools, hidden.at[begin].get(mode="clip"))
        drafted_pools, filled = _draft_in_turn(taken, filled, num_drafts, at_round)
    else:
        most = shape.sampler.num_samples
        filled = sample_at_masks(
            hidden, begin, rows, num_drafts, filled, most, lambda i, *given: at_round(i).sampled(*given)
        )
    slots = jnp.where(rows.samples, fields["sampled_slots"], sharded.num_slots)
    latest = latest._replace(drafts=latest.drafts.at[slots].set(filled.T, mode="drop"))
    return Drafted((*pools[:first], *drafted_pools), latest, states)


def _tokens(
    fields: Mapping[str, Array], rows: DraftRows, shape: BatchShape, drafter: Drafter, most_drafts: int
) -> DraftTokens:
    """Return the tokens that a drafter takes in after a step."""
    if drafter.mask_token is None:
        return DraftTokens.of(fields, rows, shape.num_tokens + shape.num_rows)
    num_tokens, num_added = shape.num_tokens + shape.num_rows * most_drafts, jnp.maximum(fields["num_drafts"], 1)
    return DraftTokens.of(fields, rows, num_tokens, num_added, drafter.mask_token)


def _draft_in_turn(
    taken: "_Taken",
    empty: Int[Array, "drafts R"],
    num_drafts: Int[Array, ""],
    at_round: Callable[[Int[Array, ""]], "_Run"],
) -> tuple[tuple[Pools, ...], Int[Array, "drafts R"]]:
    """Return the drafter's pools and the drafts, each of which takes a pass over the one before it."""

    def one_more(i: Int[Array, ""], carry: tuple[_Taken, Int[Array, "drafts R"]]) -> Any:
        taken, filled = carry
        run = at_round(i)
        num_passes = jnp.minimum(i, 1)  # none before the first draft; a condition might copy the pages
        taken = lax.fori_loop(0, num_passes, lambda _, taken: run.go_on(taken, filled[i - 1], i), taken)
        inputs = run.rows.inputs._replace(positions=run.rows.position + i + 1)
        return taken, filled.at[i].set(run.sampled(taken.hidden, inputs, run.rows.num_used))

    taken, filled = lax.fori_loop(0, num_drafts, one_more, (taken, empty))
    return taken.pools, filled


def _for_round(
    sharded: ShardedModel, drafter: Drafter, arrays: tuple[Array, ...], i: Int[Array, ""]
) -> tuple[Array, ...]:
    """Return the packed parameters for round ``i`` of a loop, on which those outside of layers seem to depend.

    XLA on CPUs would otherwise convert the whole embedding to float32 before the loop, for the rows looked up in it.
    """
    models = (sharded, drafter.sharded)
    names = [[*model.abstract_model.params][group[0]] for model in models for group in model.packing.groups]
    indices = [index for index, name in enumerate(names) if not name.startswith("layers.")]
    tables, _ = lax.optimization_barrier(([arrays[index] for index in indices], i))
    changed = dict(zip(indices, tables, strict=True))
    return tuple(changed.get(index, array) for index, array in enumerate(arrays))


class _Seen(NamedTuple):
    """States of tokens that the target has seen, for a draft head.

    Attributes:
        own: Of the step's query tokens.
        first: Of the token before each row's first.
    """

    own: Float[Array, "T D"]
    first: Float[Array, "R D"]

    def before(self, tokens: DraftTokens, mask: Float[Array, " D"] | None) -> Float[Array, "tokens D"]:
        """Return the state before each token that the drafter takes in; ``mask`` before mask tokens."""
        shape, moved_to, begins = (len(tokens.tokens), self.own.shape[1]), tokens.moved_to, tokens.begins
        empty = (
            jnp.zeros(shape, self.own.dtype) if mask is None else jnp.broadcast_to(mask.astype(self.own.dtype), shape)
        )
        return empty.at[moved_to + 1].set(self.own, mode="drop").at[begins].set(self.first, mode="drop")


class _Taken(NamedTuple):
    """What a pass of the drafter leaves to the next.

    Attributes:
        pools: The drafter's pools.
        hidden: The hidden state of each row's latest token, from which the next is drafted.
    """

    pools: tuple[Pools, ...]
    hidden: Float[Array, "R D"]


class _Run(NamedTuple):
    """A drafter at work inside a program.

    Attributes:
        model: The module.
        target: The model that it drafts for, if it is a draft head.
        drafter: What is fixed about it.
        rows: The step's rows.
        variant: Index of the step's sampler variant.
    """

    model: CausalLM | DraftHead
    target: CausalLM | None
    drafter: Drafter
    rows: DraftRows
    variant: Int[Array, ""]

    @classmethod
    def of(cls, sharded: ShardedModel, arrays: tuple[Array, ...], rows: DraftRows, variant: Int[Array, ""]) -> "_Run":
        """Return the drafter of a model, with the packed parameters of both."""
        drafter = sharded.drafter
        assert drafter is not None
        own = arrays[-len(drafter.sharded.abstract_params) :]
        if drafter.sharded.head is None:
            return cls(drafter.sharded.model(own), None, drafter, rows, variant)
        whole = sharded if sharded.parallel.residual_axis is None else sharded.with_whole_rows
        return cls(drafter.sharded.draft_head(own), whole.model(arrays), drafter, rows, variant)

    def seen(self, given: StepTokens, num_tokens: Int[Array, ""]) -> Float[Array, "T D"]:
        """Return the states of the step's ``num_tokens`` tokens; those of padding are undefined."""
        assert isinstance(self.model, DraftHead) and self.target is not None and given.hidden is not None
        return self.model.seen_state(self.target, given.hidden, given.aux, num_tokens).astype(given.hidden.dtype)

    def before(self, states: HeadStates, fields: Mapping[str, Array]) -> Float[Array, "R D"]:
        """Return the states of the tokens before the rows; ``states`` have those of pages that the step fills, as a
        row may begin after a page that another row of the same step fills."""
        page_size = self.drafter.sharded.page_size
        return states.before(fields["starts"], fields["slots"], self.rows.page_table, page_size)

    def kept(self, states: HeadStates, own: Float[Array, "T D"], fields: Mapping[str, Array], back: bool) -> HeadStates:
        """Return what a draft head keeps after the step, whose tokens have the states ``own``."""
        rows, row_of, starts = self.rows, fields["token_rows"], fields["starts"]
        offsets = (starts - fields["query_starts"]).at[row_of].get(mode="fill", fill_value=0)
        positions, page_size = offsets + jnp.arange(len(own), dtype=jnp.int32), self.drafter.sharded.page_size
        pages = rows.page_table.at[row_of, positions // page_size].get(mode="fill", fill_value=NOWHERE)
        num_kept = rows.num_before_next(fields, back)
        slots = jnp.where(rows.is_used, fields["slots"], NOWHERE)
        return states.updated(own, positions, pages, fields["query_starts"] + num_kept - 1, slots, page_size)

    def take_in(
        self,
        fields: Mapping[str, Array],
        pools: tuple[Pools, ...],
        shape: BatchShape,
        tokens: DraftTokens,
        seen: _Seen | None,
    ) -> tuple[Float[Array, "T D"], tuple[Pools, ...]]:
        """Take in the tokens after a step; return their hidden states and the pools."""
        rows = self.rows
        batch: dict[str, Array] = {
            "page_tables": rows.page_table[None],
            "context_lens": fields["starts"] + tokens.lens,
            "query_starts": tokens.begins,
            "query_lens": tokens.lens,
            "num_rows": fields["num_rows"],
        }
        splits = shape.decode_only and self.drafter.sharded.splits_rows
        if splits:
            given = {"positions": tokens.positions, "token_rows": tokens.row_of}
            batch = row_of_each_token(batch | given, tokens.row_of < shape.num_rows)
        places = self._places(tokens.positions, tokens.row_of, rows.page_table)
        before = None
        if seen is not None:
            assert isinstance(self.model, ChainHead) and self.target is not None
            before = seen.before(tokens, self.model.mask_state(self.target))
        return self._through(tokens.tokens, tokens.positions, tokens.row_of, batch, places, pools, splits, before)

    def take_in_block(
        self,
        fields: Mapping[str, Array],
        pools: tuple[Pools, ...],
        num_drafts: Int[Array, ""],
        most_drafts: int,
        states: Float[Array, "T D"],
    ) -> tuple[Float[Array, "N D"], tuple[Pools, ...]]:
        """Take in the tokens of a step, whose states are given, and a block after each row; return the hidden states of
        the blocks and the pools."""
        rows, sharded, mask_token = self.rows, self.drafter.sharded, self.drafter.mask_token
        assert isinstance(self.model, DFlashHead) and self.target is not None and mask_token is not None
        block = BlockTokens.of(rows, num_drafts, most_drafts, mask_token, sharded.page_size, sharded.num_pages)
        context = DraftTokens.of(fields, rows, len(states), 0)
        places = (
            self._places(block.positions, jnp.where(block.is_used, block.row, len(rows.position)), rows.page_table),
            self._places(context.positions, context.row_of, rows.page_table),
        )
        settings = self._settings(decode_only=True)
        return take_in_block(self.model, self.target, rows, block, context, states, places, pools, settings)

    def go_on(self, taken: _Taken, drafts: Int[Array, " R"], count: Int[Array, ""]) -> _Taken:
        """Take in the latest draft of each row, which is ``count`` tokens after its sampled one."""
        rows, row = self.rows, jnp.arange(len(drafts), dtype=jnp.int32)
        positions = jnp.maximum(jnp.minimum(rows.position + count, rows.limits - 1), 0)
        batch = {
            "page_tables": rows.page_table[None],
            "context_lens": jnp.where(rows.is_used, positions + 1, 0),
            "query_starts": row,
            "query_lens": rows.is_used.astype(jnp.int32),
            "num_rows": rows.num_used,
        }
        places = self._places(positions, jnp.where(rows.samples, row, len(row)), rows.page_table)
        state = None
        if isinstance(self.model, ChainHead):
            state = self.model.next_state(taken.hidden).astype(taken.hidden.dtype)
        hidden, pools = self._through(drafts, positions, row, batch, places, taken.pools, True, state)
        return _Taken(pools, hidden)

    def _places(
        self, positions: Int[Array, " T"], rows: Int[Array, " T"], page_table: Int[Array, "R M"]
    ) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
        """Return page and offset of each token's entry: the page for padding where its row has none yet."""
        sharded = self.drafter.sharded
        places: TokenPlaces = token_places(
            positions, rows, len(page_table), sharded.page_size, sharded.layout.mesh_axis("tokens")
        )
        pages = page_table.at[places.rows, places.pages].get(mode="fill", fill_value=sharded.num_pages)
        return jnp.where(pages < sharded.num_pages, pages, sharded.num_pages + 1), places.offsets

    def _settings(self, decode_only: bool) -> AttentionSettings:
        sharded = self.drafter.sharded
        return AttentionSettings(
            sharded.kernel,
            sharded.own_page_size,
            decode_only,
            sharded.layer_tile,
            sharded.kv_layout.layer_indices,
            sharded.layout.rows_axis,
            False,
            sharded.row_tile,
        )

    def _through(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        rows: Int[Array, " T"],
        batch: Mapping[str, Array],
        places: tuple[Int[Array, " T"], Int[Array, " T"]],
        pools: tuple[Pools, ...],
        decode_only: bool,
        before: Float[Array, "T D"] | None,
    ) -> tuple[Float[Array, "T D"], tuple[Pools, ...]]:
        """Return the hidden states of tokens, and the pools with their entries; a draft head reads the state before
        each."""
        attention = AttentionBatch(
            page_table=batch["page_tables"][0],
            context_lens=batch["context_lens"],
            query_starts=batch["query_starts"],
            query_lens=batch["query_lens"],
            num_rows=batch["num_rows"],
            token_pages=places[0],
            token_offsets=places[1],
            num_shared_pages=jnp.int32(0),
        )
        settings = self._settings(decode_only)
        lengths = self.rows.limits.at[rows].get(mode="fill", fill_value=0)
        own = TokenBatch(tokens, positions, lengths, (attention,))
        if isinstance(self.model, CausalLM):
            found = self.model.hidden(own, pools, settings)
        else:
            assert isinstance(self.model, ChainHead) and self.target is not None and before is not None
            found = self.model.hidden(self.model.embedded(self.target, tokens), before, own, pools, settings)
        return found.x, tuple(found.pools)

    def sampled(self, hidden: Float[Array, "N D"], inputs: SamplerInputs, num_rows: Int[Array, ""]) -> Int[Array, " N"]:
        """Return the tokens after the first ``num_rows`` hidden states, drawn with the noise of their positions."""
        sharded = self.drafter.sharded
        if isinstance(self.model, CausalLM):
            logits = self.model.logits(hidden, num_rows, sharded.layer_tile)
        else:
            assert self.target is not None
            logits = self.model.logits(self.target, hidden)
            if self.model.head is not None:
                width = sharded.vocab_width // sharded.parallel.parts(sharded.parallel.vocab)
                logits = sharded.split.part(logits, width, -jnp.inf)
        is_greedy = (self.variant == VARIANTS.index("greedy")) | self.drafter.is_greedy
        values, structure = jax.tree.flatten(inputs)

        def tokens_of(logits: Float[Array, "R V"], *values: Array) -> Int[Array, " R"]:
            return sample_plainly(logits, jax.tree.unflatten(structure, values), is_greedy, sharded.sampler)

        return jnp.maximum(map_rows(tokens_of, (logits, *values), num_rows, sharded.row_tile), 0)
