"""Grouped-query attention (arXiv:2305.13245); multi-head and multi-query attention are special cases."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, AttentionInputs, AttentionSettings, Pools
from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.norm import RMSNorm, split_mean_squares
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows, rows_of, stack_rows, vector
from jaxserve.layers.residual import block_input
from jaxserve.layers.rows import ROW_TILE, map_rows
from pallas_kernels.qkv_write import Heads, QkNorms, Rotation

QkNorm = Literal["none", "head", "width"]


class OutputGate(NamedTuple):
    """Gates of the attention output, computed from the layer's input: ``output(attended * activation(gate(x)))``.

    Attributes:
        module: Their projection in checkpoints.
        activation: ``sigmoid`` (Trinity, Muse Glimmer) or ``softplus`` (Laguna), in float32.
        is_per_head: Whether there is one gate for each head, rather than for each feature of each head.
        follows_query: Whether the module is that of queries, where each head's gates follow its query (Qwen3-Next).
    """

    module: str
    activation: Literal["sigmoid", "softplus"]
    is_per_head: bool = False
    follows_query: bool = False


class GroupedQueryAttention(Attention):
    """Attention with a fused projection; each device has its query, key and value heads, in this order.

    Devices that share the tokens of pages have all key and value heads.

    Args:
        hidden_size: D.
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads; divides N.
        head_dim: H.
        scope: Scope of the module.
        qkv: Query, key and value projections in checkpoints: three modules, or one with the rows of q, k, then v.
        is_interleaved: Whether that one module has the rows of q, k and v of the first head, then of the second, …
        out: Output projection in checkpoints.
        is_transposed: Whether checkpoints have the weights of the projections as ``[in, out]``.
        qkv_bias: Whether these have a bias.
        out_bias: Whether the output projection has a bias.
        qk_norm: RMSNorm of queries and keys: none, over each head (Qwen3), or over all heads at once (OLMo-2).
        has_sinks: Whether each query head has a sink (GPT-OSS).
        norm_eps: Epsilon of that norm.
        norm_offset: Offset of its weight.
        norm_names: Modules of the norms of queries and keys.
        has_norm_weights: Whether these have weights.
        is_normed_last: Whether the norm over each head follows the rotary embedding (Hunyuan).
        has_value_norm: Whether values are normalized over each head too, without a weight (Gemma 4).
        reads: Index of the layer whose keys and values it reads, having none of its own; None for its own.
        gate: Gates of the attention output; None for none.
        input_size: Number of input features; None: ``hidden_size``.
        paired_dim: Features of a head that rotate in pairs (2 i, 2 i + 1) in checkpoints; they are stored with the even
            ones first, so that they rotate as all others do, (i, i + half). 0: they are in this order.
        options: Further options of ``Attention``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scope: Scope,
        qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        is_interleaved: bool = False,
        out: str = "o_proj",
        is_transposed: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: QkNorm = "none",
        has_sinks: bool = False,
        norm_eps: float = 1e-6,
        norm_offset: float = 0.0,
        norm_names: tuple[str, str] = ("q_norm", "k_norm"),
        has_norm_weights: bool = True,
        is_normed_last: bool = False,
        has_value_norm: bool = False,
        reads: int | None = None,
        gate: OutputGate | None = None,
        paired_dim: int = 0,
        input_size: int | None = None,
        **options: Any,
    ):
        super().__init__(num_heads, num_kv_heads, head_dim, scope=scope, **options)
        scope = scope.over(self.mesh_axis)
        self.qk_norm, self.kv_spec = qk_norm, self.kv_spec._replace(reads=reads)
        q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        rows = _qkv_rows(qkv, (q_width, kv_width), head_dim, is_interleaved, gate)
        rows = [each._replace(is_transposed=is_transposed) for each in rows[: 3 if reads is None else 1]]
        rows[1:] = [each._replace(is_whole=self.kv_axis != self.mesh_axis) for each in rows[1:]]
        self.qkv = self._projection(input_size or hidden_size, rows, qkv_bias, scope, paired_dim)
        self.out = RowParallelLinear(
            q_width,
            hidden_size,
            inner_axis="q_heads",
            mesh_axis=self.mesh_axis,
            bias=out_bias,
            scope=scope.at(out),
            is_transposed=is_transposed,
        )
        self.gate, self.is_normed_last = gate, is_normed_last
        self.gates = None if gate is None else self._gates(gate, hidden_size, num_heads, scope, qkv_bias)
        self.tile = ROW_TILE if scope.policy.is_native else None
        sinks = stack_rows(scope, [Rows("sinks", num_heads)], "")
        self.sinks = vector(sinks, "q_heads", scope) if has_sinks else None
        norm = partial(RMSNorm, head_dim, eps=norm_eps, axis="head_dim")
        self.v_norm = norm(scope=scope, has_weight=False) if has_value_norm else None
        q_scope, k_scope = (scope.at(name) for name in norm_names)
        if qk_norm == "head":
            norm = partial(norm, offset=norm_offset, has_weight=has_norm_weights)
            self.q_norm, self.k_norm = norm(scope=q_scope), None if reads is not None else norm(scope=k_scope)
        elif qk_norm == "width":
            self._add_wide_norms((q_width, kv_width), (q_scope, k_scope), norm_eps)

    def _projection(
        self, input_size: int, rows: Sequence[Rows], bias: bool, scope: Scope, paired_dim: int
    ) -> ColumnParallelLinear:
        """Return the projection to queries, keys and values."""
        return ColumnParallelLinear(
            input_size,
            rows,
            outer_axis="q_heads",
            mesh_axis=self.mesh_axis,
            bias=bias,
            scope=scope,
            order=self._order(paired_dim) if paired_dim else None,
        )

    def _add_wide_norms(self, widths: tuple[int, int], scopes: tuple[Scope, Scope], eps: float) -> None:
        """Add the norms over all queries, and over all keys."""
        (q_width, kv_width), (q_scope, k_scope) = widths, scopes
        norm = partial(RMSNorm, eps=eps, unit=self.head_dim)
        self.q_norm = norm(q_width, scope=q_scope, axis="q_heads")
        self.k_norm = norm(kv_width, scope=k_scope.over(self.kv_axis), axis="kv_heads")

    def _gates(
        self, gate: OutputGate, hidden_size: int, num_heads: int, scope: Scope, qkv_bias: bool
    ) -> ColumnParallelLinear:
        """Return the projection of the gates of this device's query heads."""
        bias = gate.follows_query and qkv_bias
        unit = 1 if gate.is_per_head else self.head_dim
        rows = [Rows(gate.module, num_heads * unit, unit)]
        if gate.follows_query:
            rows = [rows[0]._replace(start=unit, total=2 * num_heads * unit, stride=2 * unit)]
        return ColumnParallelLinear(
            hidden_size, rows, outer_axis="q_heads", mesh_axis=self.mesh_axis, bias=bias, scope=scope
        )

    def _order(self, paired_dim: int) -> tuple[int, ...]:
        """Return the indices of each device's rows with the even features of each query and key before the odd ones."""
        head = np.arange(self.head_dim)
        head[:paired_dim] = np.concatenate([np.arange(0, paired_dim, 2), np.arange(1, paired_dim, 2)])
        num_rotated = self.num_heads + self.num_kv_heads
        rows = np.arange((num_rotated + self.num_kv_heads) * self.head_dim).reshape(-1, self.head_dim)
        rows[:num_rotated] = rows[:num_rotated, head]
        return tuple(rows.reshape(-1).tolist())

    @property
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse its norms with the neighbouring matmuls."""
        return self.qk_norm != "width" and super().has_fused_norms

    @property
    def head_norms(self) -> QkNorms | None:
        """Norms over each head of queries and keys, before the rotary embedding."""
        if self.qk_norm != "head" or self.is_normed_last:
            return None
        key_norm = self.q_norm if self.k_norm is None else self.k_norm  # without keys, there is nothing to normalize
        return QkNorms(self.q_norm.gain, key_norm.gain, self.q_norm.eps)

    @property
    def head_sinks(self) -> Float[Array, " N"] | None:
        """Logit of each query head that is one more term of its softmax's denominator, without a value."""
        return None if self.sinks is None else self.sinks[...].astype(jnp.float32)

    def project(
        self, x: Float[Array, "T D"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        """Project normalized tokens to queries, keys and values, each with its heads one after the other."""
        qkv = self.qkv(x, norm=norm, num_rows=num_rows)
        if self.qk_norm != "width":
            return qkv
        q_width, k_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        assert self.k_norm is not None, "this layer reads the keys of another"
        query, key, value = jnp.split(qkv, [q_width, q_width + k_width], axis=1)
        query_square, key_square = split_mean_squares(query, key, self.mesh_axis)
        return jnp.concatenate(
            [self.q_norm.scaled(query, query_square), self.k_norm.scaled(key, key_square), value], axis=1
        )

    def heads(self, qkv: Float[Array, "T width"], rotation: Rotation | None) -> Heads:
        """Split the projection into heads, normalize them and apply RoPE."""
        heads = super().heads(qkv, rotation)
        if self.is_normed_last and self.k_norm is not None:
            heads = heads._replace(query=self.q_norm(heads.query), key=self.k_norm(heads.key))
        return heads if self.v_norm is None else heads._replace(value=self.v_norm(heads.value))

    def gated(
        self,
        attended: Float[Array, "T N H"],
        x: Float[Array, "rows D"],
        *,
        norm: RMSNorm | None = None,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "T N H"]:
        """Multiply the attention output by the gates of the layer's input, if there are any."""
        if self.gates is None:
            return attended
        x, norm = block_input(x, norm, self.residual_axis)
        gates = self.gates.in_float32(x, norm=norm, num_rows=num_rows)
        tile = self.tile if self.tile is not None and len(x) % self.tile == 0 else None
        return map_rows(self._gated, (attended, gates), len(x) if num_rows is None else num_rows, tile)

    def _gated(self, attended: Float[Array, "T N H"], gates: Float[Array, "T width"]) -> Float[Array, "T N H"]:
        assert self.gate is not None
        factors = jax.nn.sigmoid(gates) if self.gate.activation == "sigmoid" else jax.nn.softplus(gates)
        factors = factors.reshape(*attended.shape[:2], -1)
        return (attended.astype(jnp.float32) * factors).astype(attended.dtype)

    def write_projected(
        self, qkv: Float[Array, "T width"], pools: Pools, inputs: AttentionInputs, settings: AttentionSettings
    ) -> tuple[Float[Array, "T N H"], Pools]:
        """Return the queries, and this layer's pools with the step's keys and values, using the kernel's own writer."""
        if not self.is_normed_last and self.v_norm is None:
            return super().write_projected(qkv, pools, inputs, settings)
        heads = self.heads(qkv, self.rotation(inputs))
        ready = jnp.concatenate([each.reshape(len(qkv), -1) for each in heads], axis=1)
        return self.write_ready(ready, pools, inputs, settings)


def _qkv_rows(
    modules: Sequence[str], widths: tuple[int, int], head_dim: int, is_interleaved: bool, gate: OutputGate | None
) -> list[Rows]:
    """Return the rows of queries, keys and values in checkpoints.

    Args:
        modules: Their modules: three, or one with all of the rows.
        widths: Features of all queries, and of all keys.
        head_dim: H.
        is_interleaved: Whether the one module has the rows of each head together.
        gate: Gates, which may follow the queries in their module.
    """
    q_width, kv_width = widths
    rows = rows_of(modules, (q_width, kv_width, kv_width), (head_dim,) * 3)
    if is_interleaved:
        rows = [each._replace(start=i * head_dim, stride=3 * head_dim) for i, each in enumerate(rows)]
    if gate is not None and gate.follows_query:
        rows[0] = rows[0]._replace(total=2 * q_width, stride=2 * head_dim)
    return rows
