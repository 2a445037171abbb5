"""Multi-head latent attention (MLA, arXiv:2405.04434) in absorbed form: the cache holds one latent per token.

Keys and values of all heads are projections of the latent, ``k = W_k c`` and ``v = W_v c``, beside one rotated key that
the heads share. Instead of expanding the latents of the context, queries are projected to latents, ``W_k^T q``, and the
weighted sum of latents is projected to values. A token is computed in the same way in decode and in prefill.

With n devices along the tensor axis each has N / n heads, and the whole latent of every token, or of every n-th token
if they share the tokens of pages.
"""

from typing import Any, cast

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, AttentionSettings, Pools
from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows, matrix, stack_rows
from pallas_kernels import AttentionBatch, LatentAttention
from pallas_kernels.attention_parts import LatentPartAttention
from pallas_kernels.qkv_write import Heads, Rotation, apply_rope

_NORM_EPS = 1e-6  # of the latents' norms, whatever the model's other norms have


class MultiHeadLatentAttention(Attention):
    """Attention to latents.

    Args:
        hidden_size: D.
        num_heads: N.
        query_rank: Size of the queries' latent; None for queries that are projected directly.
        rank: Size of the latent of keys and values.
        plain_dim: Features of a head's query and key that are not rotated.
        rotated_dim: Features that are rotated.
        value_dim: Features of a head's value.
        bias: Whether the projections from and to the hidden size have a bias, except a direct one of queries.
        is_interleaved: Whether pairs of features (2 i, 2 i + 1) rotate, instead of (i, i + rotated_dim / 2).
        scope: Scope of the module.
        options: Further options of ``Attention``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        query_rank: int | None,
        rank: int,
        plain_dim: int,
        rotated_dim: int,
        value_dim: int,
        bias: bool,
        is_interleaved: bool,
        scope: Scope,
        **options: Any,
    ):
        super().__init__(num_heads, 1, rank + rotated_dim, scope=scope, **options)
        scope = scope.over(self.mesh_axis)
        self.kv_spec = self.kv_spec._replace(value_dim=rank)
        self.rank, self.query_rank, self.is_interleaved = rank, query_rank, is_interleaved
        self.plain_dim, self.query_dim, self.value_dim = plain_dim, plain_dim + rotated_dim, value_dim
        latent = [Rows("kv_a_proj_with_mqa", rank + rotated_dim)]
        self.down = ColumnParallelLinear(
            hidden_size,
            latent if query_rank is None else [Rows("q_a_proj", query_rank), *latent],
            outer_axis=None,
            mesh_axis=None,
            bias=bias,
            scope=scope.unsplit(),
        )
        self.kv_norm = RMSNorm(rank, eps=_NORM_EPS, scope=scope.at("kv_a_layernorm"))
        self.q_norm = (
            None if query_rank is None else RMSNorm(query_rank, eps=_NORM_EPS, scope=scope.at("q_a_layernorm"))
        )
        self.query = ColumnParallelLinear(
            hidden_size if query_rank is None else query_rank,
            [Rows("q_proj" if query_rank is None else "q_b_proj", num_heads * self.query_dim, self.query_dim)],
            outer_axis="q_heads",
            mesh_axis=self.mesh_axis,
            bias=False,
            scope=scope,
        )
        self.key_up, self.value_up = self._latent_projections(num_heads, scope)
        self.out = RowParallelLinear(
            num_heads * value_dim,
            hidden_size,
            inner_axis="q_heads",
            mesh_axis=self.mesh_axis,
            bias=bias,
            scope=scope.at("o_proj"),
        )

    def _latent_projections(self, num_heads: int, scope: Scope) -> tuple[Any, Any]:
        """Declare the matrices from latents to keys and to values, [N * features, rank] each; checkpoints alternate the
        rows of a head's key and value."""
        stride = self.plain_dim + self.value_dim
        rows = Rows("kv_b_proj", 0, total=num_heads * stride, stride=stride)
        keys = rows._replace(num_rows=num_heads * self.plain_dim, unit=self.plain_dim)
        values = rows._replace(num_rows=num_heads * self.value_dim, unit=self.value_dim, start=self.plain_dim)
        outputs = (self.num_heads * self.rank, self.num_heads * self.value_dim)
        key_up, value_up = (
            matrix(stack_rows(scope, [each], "weight", self.rank), ("q_heads", None), scope, count)
            for each, count in zip((keys, values), outputs, strict=True)
        )
        return key_up, value_up

    @property
    def has_fused_norms(self) -> bool:
        """Return False: no kernel fuses the norm of the latents."""
        return False

    def project(
        self, x: Float[Array, "T D"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        """Project normalized tokens to each head's query, then to the latent and the shared key, not yet rotated."""
        down = self.down(x, norm=norm, num_rows=num_rows)
        if self.query_rank is None:
            return jnp.concatenate([self.query(x, norm=norm, num_rows=num_rows), down], axis=1)
        query_latent, latent = jnp.split(down, [self.query_rank], axis=1)
        return jnp.concatenate([self.query(query_latent, norm=self.q_norm, num_rows=num_rows), latent], axis=1)

    def heads(self, qkv: Float[Array, "T width"], rotation: Rotation | None) -> Heads:
        """Return queries projected to latents, [T, N, rank + rotated], the rotated keys and the normalized latents."""
        query, latent, key = jnp.split(
            qkv, [self.num_heads * self.query_dim, self.num_heads * self.query_dim + self.rank], axis=1
        )
        plain, rotated = jnp.split(query.reshape(len(query), -1, self.query_dim), [self.plain_dim], axis=2)
        key_up = self.key_up[...].reshape(-1, self.plain_dim, self.rank)
        # In the other order XLA multiplies ten times as slowly on CPUs in float32, and not at all in bfloat16.
        absorbed = jnp.swapaxes(_einsum("nhr,tnh->ntr", key_up, plain, key_up.dtype), 0, 1).astype(qkv.dtype)
        rotated, key = (rotate_pairs(x, rotation, self.is_interleaved) for x in (rotated, key[:, None]))
        return Heads(jnp.concatenate([absorbed, rotated], axis=2), key, self.kv_norm(latent)[:, None])

    def attend(
        self, query: Float[Array, "T N H"], pools: Pools, batch: AttentionBatch, settings: AttentionSettings
    ) -> Float[Array, "T N latent"]:
        """Return the weighted sums of latents."""
        latents = cast(tuple[Array], pools)
        options: dict[str, Any] = {
            "page_size": settings.page_size,
            "value_dim": self.rank,
            "scale": self.scale,
            "decode_only": settings.decode_only,
            "row_tile": settings.row_tile,
        }
        if self.tokens_axis is None:
            return cast(LatentAttention, settings.kernel).attend(query, latents, batch, **options)
        kernel, part = cast(LatentPartAttention, settings.kernel), self.token_part()
        partial = kernel.attend_part(self.all_heads(query), latents, batch, part, **options)
        return self.combined(partial, batch, settings).astype(query.dtype)

    def output(
        self,
        attended: Float[Array, "T N latent"],
        *,
        residual: Float[Array, "rows D"] | None = None,
        scale: float = 1.0,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "rows D"]:
        """Project latents to values, then compute ``residual + scale * projection`` of all heads."""
        value_up = self.value_up[...].reshape(-1, self.value_dim, self.rank)
        values = _einsum("tnr,nvr->tnv", attended, value_up, value_up.dtype).astype(attended.dtype)
        return super().output(values, residual=residual, scale=scale, num_rows=num_rows)


def rotate_pairs(x: Float[Array, "T N H"], rotation: Rotation | None, is_interleaved: bool) -> Float[Array, "T N H"]:
    """Apply RoPE; interleaved features are put in the order of halves first, in queries and keys alike."""
    if is_interleaved:
        x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    return x if rotation is None else apply_rope(x, *rotation)


def _einsum(subscripts: str, left: Float[Array, "..."], right: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    """Multiply each head by its matrix, in a dtype, accumulated in float32."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(
        subscripts, left.astype(dtype), right.astype(dtype), precision=precision, preferred_element_type=jnp.float32
    )
