"""Drafting a block at once (DFlash): mask tokens after the sampled one, of which each sees all others.

A head keeps keys and values of the tokens that the target has seen, made from the target's hidden states of these very
tokens. What a block leaves in the pages is overwritten by the next step, which takes in the tokens that are there then.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.device.draft_rows import DraftRows, DraftTokens
from jaxserve.layers.attention import AttentionSettings, Pools
from jaxserve.models.causal_lm import CausalLM
from jaxserve.models.drafters.dflash import BlockBatch, DFlashHead
from pallas_kernels import AttentionBatch

Places = tuple[Int[Array, " _"], Int[Array, " _"]]
"""Page and offset of each token's entry."""


class BlockTokens(NamedTuple):
    """The latest token of each row and the mask tokens after it, one row's after the other's.

    Attributes:
        num_used: Tokens in use.
        row: Row of each.
        tokens: Token ids.
        positions: Position of each; 0 for padding.
        is_used: Whether a row has the token, and a page for it.
        ends: Number of tokens of its row's context up to the end of the block.
    """

    num_used: Int[Array, ""]
    row: Int[Array, " N"]
    tokens: Int[Array, " N"]
    positions: Int[Array, " N"]
    is_used: Bool[Array, " N"]
    ends: Int[Array, " N"]

    @classmethod
    def of(
        cls,
        rows: DraftRows,
        num_drafts: Int[Array, ""],
        most_drafts: int,
        mask_token: int,
        page_size: int,
        num_pages: int,
    ) -> "BlockTokens":
        """Return them for rows that draft ``num_drafts`` tokens each; for none there are none."""
        num_rows = len(rows.position)
        index = jnp.arange(num_rows * (1 + most_drafts), dtype=jnp.int32)
        row, count = index // (1 + num_drafts), index % (1 + num_drafts)
        num_used = jnp.where(num_drafts > 0, rows.num_used * (1 + num_drafts), 0)
        positions = rows.position.at[row].get(mode="clip") + count
        pages = rows.page_table.at[row, positions // page_size].get(mode="fill", fill_value=num_pages)
        is_used = (index < num_used) & rows.samples.at[row].get(mode="clip") & (pages < num_pages)
        is_used &= positions < rows.limits.at[row].get(mode="clip")
        ends = rows.position.at[row].add(is_used, mode="drop")
        return cls(
            num_used=num_used,
            row=row,
            tokens=jnp.where(count == 0, rows.token.at[row].get(mode="clip"), mask_token),
            positions=jnp.where(is_used, positions, 0),
            is_used=is_used,
            ends=ends.at[row].get(mode="clip"),
        )


def take_in_block(
    head: DFlashHead,
    target: CausalLM,
    rows: DraftRows,
    block: BlockTokens,
    context: DraftTokens,
    states: Float[Array, "T D"],
    places: tuple[Places, Places],
    pools: tuple[Pools, ...],
    settings: AttentionSettings,
) -> tuple[Float[Array, "N D"], tuple[Pools, ...]]:
    """Take in what the target has seen in a step, and the blocks after it.

    Args:
        head: The head.
        target: The model that it drafts for.
        rows: The rows.
        block: The tokens of blocks.
        context: The step's tokens that are kept, and no others.
        states: The head's state of each of the step's tokens.
        places: Where the entries of blocks and of contexts are.
        pools: The head's pools.
        settings: Settings of attention, for rows of one token.

    Returns:
        The hidden state of each token of a block, and the pools.
    """
    kept = jnp.zeros((len(context.tokens), states.shape[1]), states.dtype).at[context.moved_to].set(states, mode="drop")
    index = jnp.arange(len(block.row), dtype=jnp.int32)
    attention = AttentionBatch(
        page_table=rows.page_table.at[block.row].get(mode="clip"),
        context_lens=jnp.where(block.is_used, block.ends, 0),
        query_starts=index,
        query_lens=block.is_used.astype(jnp.int32),
        num_rows=block.num_used,
        token_pages=jnp.concatenate([places[0][0], places[1][0]]),
        token_offsets=jnp.concatenate([places[0][1], places[1][1]]),
        num_shared_pages=jnp.int32(0),
    )
    batch = BlockBatch(
        positions=jnp.concatenate([block.positions, context.positions]),
        lengths=rows.limits.at[jnp.concatenate([block.row, context.row_of])].get(mode="fill", fill_value=0),
        num_block=block.num_used,
        num_context=context.lens.sum(dtype=jnp.int32),
        attention=attention,
    )
    return head.hidden(head.embedded(target, block.tokens), kept, batch, pools, settings)
