"""Latent attention to the tokens that an index selects: DeepSeek Sparse Attention (arXiv:2512.02556).

The index has a few heads of its own. Each token's index key lies in the layer's pages beside its latent; the indices of
the selected tokens can serve the layers after it too, which then have no index. Every device has the whole index.
"""

from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.api.errors import ConfigError
from jaxserve.layers.attention import AttentionInputs, AttentionSettings, Pools
from jaxserve.layers.decoder import Attended, PreNormLayer
from jaxserve.layers.latent_attention import MultiHeadLatentAttention, rotate_pairs
from jaxserve.layers.linear import ColumnParallelLinear
from jaxserve.layers.norm import LayerNorm, RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows
from pallas_kernels import LatentAttention
from pallas_kernels.qkv_write import Heads, Rotation
from pallas_kernels.selected_latents import IndexQuery, Settings, attend_selected

_NORM_EPS = 1e-6  # of the index keys' norm, whatever the model's other norms have


class IndexConfig(NamedTuple):
    """The index of a model.

    Attributes:
        num_heads: Heads of the index.
        head_dim: Features of an index head and of a token's index key.
        num_selected: Tokens that a query attends to.
        is_interleaved: Whether pairs of features (2 i, 2 i + 1) rotate, instead of (i, i + rotated_dim / 2).
    """

    num_heads: int
    head_dim: int
    num_selected: int
    is_interleaved: bool


class IndexedHeads(NamedTuple):
    """What a layer computes of each token: what is written, and its queries of attention and index."""

    heads: Heads
    queries: IndexQuery | None


class SparseLatentAttention(MultiHeadLatentAttention):
    """Attention to selected latents.

    Args:
        hidden_size: D.
        num_heads: N.
        query_rank: Size of the queries' latent.
        rank: Size of the latent of keys and values.
        rotated_dim: Features that are rotated, of a head and of an index head.
        index: The index.
        selects_as: Layer whose selection this one uses, having no index of its own; None for its own.
        scope: Scope of the module.
        options: Further options of ``MultiHeadLatentAttention``.

    Raises:
        ConfigError: The layout splits the tokens of pages over devices.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        query_rank: int,
        rank: int,
        rotated_dim: int,
        index: IndexConfig,
        selects_as: int | None,
        scope: Scope,
        **options: Any,
    ):
        if scope.parallel.tokens is not None:
            raise ConfigError(
                "layers that attend to selected tokens need all of a context on every device; use a layout that does "
                "not split the tokens of pages"
            )
        super().__init__(
            hidden_size,
            num_heads,
            query_rank=query_rank,
            rank=rank,
            rotated_dim=rotated_dim,
            scope=scope,
            **options,
        )
        has_index = selects_as is None
        key_dim, width = rank + rotated_dim, index.head_dim if has_index else 0
        self.kv_spec = self.kv_spec._replace(head_dim=key_dim + width, selects_as=selects_as)
        self.index, self.has_index, self.rotated_dim = index, has_index, rotated_dim
        self.query_width = self.num_heads * self.query_dim
        if not has_index:
            return
        own = scope.at("indexer").unsplit()
        split: dict[str, Any] = {"outer_axis": None, "mesh_axis": None, "bias": False, "scope": own}
        index_width = index.num_heads * index.head_dim
        self.index_query = ColumnParallelLinear(query_rank, [Rows("wq_b", index_width)], **split)
        self.index_key = ColumnParallelLinear(
            hidden_size, [Rows("wk", index.head_dim), Rows("weights_proj", index.num_heads)], **split
        )
        self.index_norm = LayerNorm(index.head_dim, eps=_NORM_EPS, scope=own.at("k_norm"))

    def project(
        self, x: Float[Array, "T D"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        """Project normalized tokens as latent attention does; then to the queries, the key and the weights of an
        index, if there is one."""
        down = self.down(x, norm=norm, num_rows=num_rows)
        query_latent, latent = jnp.split(down, [cast(int, self.query_rank)], axis=1)
        parts = [self.query(query_latent, norm=self.q_norm, num_rows=num_rows), latent]
        if self.has_index:
            parts.append(self.index_query(query_latent, norm=self.q_norm, num_rows=num_rows))
            parts.append(self.index_key(x, norm=norm, num_rows=num_rows))
        return jnp.concatenate(parts, axis=1)

    def indexed_heads(self, projected: Float[Array, "T width"], rotation: Rotation | None) -> IndexedHeads:
        """Return the heads of latent attention, and the queries of the index; its key follows the rotated key."""
        end = self.query_width + self.rank + self.rotated_dim
        heads = self.heads(projected[:, :end], rotation)
        if not self.has_index:
            return IndexedHeads(heads, None)
        num_heads, head_dim = self.index.num_heads, self.index.head_dim
        queries, key, weights = jnp.split(
            projected[:, end:], [num_heads * head_dim, (num_heads + 1) * head_dim], axis=1
        )
        queries = self._rotate_index(queries.reshape(len(queries), num_heads, head_dim), rotation)
        key = self._rotate_index(self.index_norm(key)[:, None], rotation)
        written = heads._replace(key=jnp.concatenate([heads.key, key], axis=2))
        return IndexedHeads(written, IndexQuery(queries, weights * num_heads**-0.5))

    def _rotate_index(self, x: Float[Array, "T n I"], rotation: Rotation | None) -> Float[Array, "T n I"]:
        """Rotate the first features of index heads."""
        rotated, plain = jnp.split(x, [self.rotated_dim], axis=2)
        return jnp.concatenate([rotate_pairs(rotated, rotation, self.index.is_interleaved), plain], axis=2)

    def attend_to(
        self,
        found: IndexedHeads,
        pools: Pools,
        inputs: AttentionInputs,
        settings: AttentionSettings,
    ) -> Attended:
        """Attend to pools that already have the step's latents and index keys."""
        index = inputs.selected if found.queries is None else found.queries
        assert index is not None, "the layer that selects tokens for this one has not run"
        selection = attend_selected(
            cast(LatentAttention, settings.kernel),
            self.scaled(found.heads.query, inputs),
            cast(tuple[Array], pools),
            inputs.batch,
            index,
            Settings(settings.page_size, self.rank + self.rotated_dim, self.rank, self.scale, self.index.num_selected),
            decode_only=settings.decode_only,
            row_tile=settings.row_tile,
        )
        return Attended(selection.attended, pools, selection.positions)


class SparseLatentLayer(PreNormLayer):
    """A layer with attention to selected latents."""

    def _attended(
        self, x: Float[Array, "rows D"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> Attended:
        """Return attention, the layer's pools with the step's latents and index keys, and the selected tokens."""
        attention = cast(SparseLatentAttention, self.attention)
        found = self._split(attention.indexed_heads, x, inputs, settings)
        kernel, heads = cast(LatentAttention, settings.kernel), found.heads
        own = cast(tuple[Array], pools)
        written = kernel.write_kv(own, heads.key, heads.value, inputs.batch, settings.page_size)
        return attention.attend_to(found, written, inputs, settings)
