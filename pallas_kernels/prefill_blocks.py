"""Assigns query tokens to programs of a prefill kernel, on the device, once per step."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.paged_attention import AttentionBatch


class BlockMap(NamedTuple):
    """The query tokens of each block.

    Attributes:
        rows: Row of the page table.
        tokens: First query token.
        counts: Query tokens in use; 0 in blocks after the last.
        positions: The first token's position in its context.
        visible: Tokens of context that the last token sees; 0 if the results are zeros.
    """

    rows: Int[Array, " blocks"]
    tokens: Int[Array, " blocks"]
    counts: Int[Array, " blocks"]
    positions: Int[Array, " blocks"]
    visible: Int[Array, " blocks"]


def block_map(batch: AttentionBatch, num_tokens: int, block_tokens: int) -> BlockMap:
    """Split the rows after the decode rows into blocks; then decode tokens and padding, as rows without context.

    All sizes are static, so that XLA computes it once for all layers of a step.
    """
    num_rows = batch.query_lens.shape[0]
    row = jnp.arange(num_rows)
    is_prefill = (row >= batch.num_single) & (row < batch.num_rows)
    lens = jnp.where(is_prefill, batch.query_lens, 0)
    used = batch.num_single + lens.sum()
    padding = num_tokens - used
    lens = jnp.concatenate([lens, jnp.stack([batch.num_single, padding])])
    starts = jnp.concatenate([batch.query_starts, jnp.stack([jnp.zeros_like(used), used])])
    contexts = jnp.concatenate([batch.context_lens, jnp.zeros(2, jnp.int32)])
    counts = -(-lens // block_tokens)
    ends = jnp.cumsum(counts)
    block = jnp.arange(-(-num_tokens // block_tokens) + num_rows)
    owner = jnp.minimum((ends[None, :] <= block[:, None]).sum(1), num_rows + 1)
    done = (block - (ends - counts)[owner]) * block_tokens
    count = jnp.clip(lens[owner] - done, 0, block_tokens)
    position = jnp.maximum(contexts[owner] - lens[owner], 0) + done
    visible = jnp.where((owner < num_rows) & (count > 0), position + count, 0)
    fields = (jnp.minimum(owner, num_rows - 1), starts[owner] + done, count, position, visible)
    return BlockMap(*(field.astype(jnp.int32) for field in fields))
