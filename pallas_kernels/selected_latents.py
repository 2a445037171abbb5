"""Attention to the latents that an index selects (DeepSeek Sparse Attention, arXiv:2512.02556), on any kernel's pages.

A token's page entry has an index key after its latent and rotated key: [latent + rotated + I]. A query's score of a
token is ``sum_h w_h relu(q_h . k / sqrt(I))`` over the index heads h, and it attends to the ``num_selected`` tokens of
its context with the highest scores, the earlier one of equals. A query that sees no more tokens attends to all of them,
in the kernel. Which way a query goes depends on its own context alone, so no result depends on the batch.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax, nn
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.latent_attention import LatentAttention, Pools
from pallas_kernels.paged_attention import AttentionBatch, token_contexts

_BLOCK = 8  # queries at a time: each gathers latents of its own
_TILE = 512  # tokens whose index keys are read at a time


class IndexQuery(NamedTuple):
    """Queries of the index.

    Attributes:
        heads: Rotated query of each index head.
        weights: Factor of each head's score.
    """

    heads: Float[Array, "T n I"]
    weights: Float[Array, "T n"]


class Settings(NamedTuple):
    """Static settings of a layer.

    Attributes:
        page_size: Tokens per page.
        key_dim: Features of a latent and its rotated key, before the index key.
        value_dim: Features of the latent.
        scale: Factor of the scores of attention.
        num_selected: Most tokens that a query attends to.
    """

    page_size: int
    key_dim: int
    value_dim: int
    scale: float
    num_selected: int


class Selection(NamedTuple):
    """Attention of each query, and the positions that those with more than ``num_selected`` tokens attended to."""

    attended: Float[Array, "T N latent"]
    positions: Int[Array, "T k"]


def attend_selected(
    kernel: LatentAttention,
    query: Float[Array, "T N H"],
    pools: Pools,
    batch: AttentionBatch,
    index: IndexQuery | Int[Array, "T k"],
    settings: Settings,
    *,
    decode_only: bool,
    row_tile: int | None = None,
) -> Selection:
    """Return each query token's attention; the results of padding tokens are undefined but finite.

    Args:
        kernel: Implementation of attention to all latents, whose pages hold this step's already.
        query: Queries of latents and rotated keys, H = ``key_dim``.
        pools: The layer's pool.
        batch: The batch.
        index: The queries of the index, or the positions that an earlier layer's selected.
        settings: Settings of the layer.
        decode_only: Whether every row has one token.
        row_tile: See ``LatentAttention.attend``.
    """
    num_tokens, page_size, most = len(query), settings.page_size, settings.num_selected
    index_dim = pools[0].size // (pools[0].shape[0] * page_size) - settings.key_dim
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, index_dim)))
    dense = kernel.attend(
        padded,
        pools,
        _cut_short(batch, most),
        page_size=page_size,
        value_dim=settings.value_dim,
        scale=settings.scale,
        decode_only=decode_only,
        row_tile=row_tile,
    )
    table_tokens = batch.page_table.shape[1] * page_size
    if table_tokens <= most:
        return Selection(dense, jnp.zeros((num_tokens, min(most, table_tokens)), jnp.int32))
    padding = -num_tokens % _BLOCK + _BLOCK  # never a single block, which a compiler hoists out of the loop
    rows, visible = token_contexts(batch, num_tokens + padding)
    spread = (jnp.pad(each, ((0, padding), *[(0, 0)] * (each.ndim - 1))) for each in (query, *_arrays(index)))
    queries, *given = spread

    def block(i: Int[Array, ""], found: Selection) -> Selection:
        own, own_rows, seen = (lax.dynamic_slice_in_dim(a, i * _BLOCK, _BLOCK) for a in (queries, rows, visible))
        parts = [lax.dynamic_slice_in_dim(array, i * _BLOCK, _BLOCK) for array in given]
        table = jnp.take(batch.page_table, own_rows, axis=0, mode="clip") + batch.first_page

        def compute(found: Selection) -> Selection:
            chosen = parts[0] if len(parts) == 1 else _select(kernel, IndexQuery(*parts), pools, table, seen, settings)
            attended = _attend(kernel, own, pools, table, chosen, seen, settings)
            update = partial(lax.dynamic_update_slice_in_dim, start_index=i * _BLOCK, axis=0)
            return Selection(update(found.attended, attended.astype(query.dtype)), update(found.positions, chosen))

        return lax.cond((seen > most).any(), compute, lambda found: found, found)

    size = num_tokens + padding
    none = Selection(
        jnp.zeros((size, query.shape[1], settings.value_dim), query.dtype), jnp.zeros((size, most), jnp.int32)
    )
    sparse = lax.fori_loop(0, -(-batch.query_lens.sum() // _BLOCK), block, none)
    is_sparse = (visible > most)[:num_tokens, None, None]
    return Selection(jnp.where(is_sparse, sparse.attended[:num_tokens], dense), sparse.positions[:num_tokens])


def _arrays(index: IndexQuery | Int[Array, "T k"]) -> tuple[Array, ...]:
    return index if isinstance(index, IndexQuery) else (index,)


def _cut_short(batch: AttentionBatch, most: int) -> AttentionBatch:
    """Return the rows with no context before their query tokens where each of these sees more than ``most`` tokens."""
    is_cut = batch.context_lens - batch.query_lens >= most
    return batch._replace(
        context_lens=jnp.where(is_cut, batch.query_lens, batch.context_lens),
        num_shared_pages=jnp.where(is_cut.any(), 0, batch.num_shared_pages),
    )


def _select(
    kernel: LatentAttention,
    index: IndexQuery,
    pools: Pools,
    table: Int[Array, "B M"],
    seen: Int[Array, " B"],
    settings: Settings,
) -> Int[Array, "B k"]:
    """Return the positions with the highest scores, of queries that see the first ``seen`` tokens of their row."""
    num_pages = max(1, min(_TILE // settings.page_size, table.shape[1]))
    tile = num_pages * settings.page_size
    num_tiles = -(-table.shape[1] // num_pages)
    scale = index.heads.shape[2] ** -0.5

    def score(i: Int[Array, ""], scores: Float[Array, "B S"]) -> Float[Array, "B S"]:
        columns = jnp.minimum(i * num_pages + jnp.arange(num_pages), table.shape[1] - 1)
        keys = kernel.read_pages(pools, table[:, columns], settings.page_size)[..., settings.key_dim :]
        keys = keys.reshape(len(table), tile, -1)
        products = nn.relu(_dot("bni,bti->bnt", index.heads, keys) * scale)
        summed = (products * index.weights.astype(jnp.float32)[:, :, None]).sum(1)
        is_seen = i * tile + jnp.arange(tile) < seen[:, None]
        return lax.dynamic_update_slice_in_dim(scores, jnp.where(is_seen, summed, -jnp.inf), i * tile, 1)

    empty = jnp.full((len(table), num_tiles * tile), -jnp.inf)
    scores = lax.fori_loop(0, -(-seen.max() // tile), score, empty)
    return lax.top_k(scores, settings.num_selected)[1].astype(jnp.int32)


def _attend(
    kernel: LatentAttention,
    query: Float[Array, "B N H"],
    pools: Pools,
    table: Int[Array, "B M"],
    chosen: Int[Array, "B k"],
    seen: Int[Array, " B"],
    settings: Settings,
) -> Float[Array, "B N latent"]:
    """Attend to the chosen positions; those that a query does not see count nothing."""
    is_seen: Bool[Array, "B k"] = chosen < seen[:, None]
    pages = jnp.take_along_axis(table, chosen // settings.page_size, axis=1)
    keys = kernel.read_tokens(pools, pages, chosen % settings.page_size, settings.page_size)[..., : settings.key_dim]
    keys = jnp.where(is_seen[..., None], keys, 0)
    scores = _dot("bnh,bkh->bnk", query, keys) * settings.scale
    weights = nn.softmax(jnp.where(is_seen[:, None], scores, -1e30), axis=-1)
    return _dot("bnk,bkv->bnv", weights, keys[..., : settings.value_dim])


def _dot(subscripts: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiply with float32 accumulation; operands have the precision of the pool's dtype."""
    precision = lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
    return jnp.einsum(
        subscripts, left.astype(right.dtype), right, precision=precision, preferred_element_type=jnp.float32
    )
