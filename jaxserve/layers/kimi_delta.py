"""Kimi's delta attention (KDA, arXiv:2510.26692), the linear attention of Kimi-Linear."""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints import Piece, TensorRecipe
from jaxserve.layers.kv_layout import StateArray
from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows, Split, stack_rows
from jaxserve.layers.recurrent import CausalConvolution, Mixed, Recurrent, StateArrays, head_vector
from pallas_kernels.delta_net import DeltaNetKernel, DeltaNetSizes, DeltaNetWeights
from pallas_kernels.recurrent_states import StateRows, States


class KimiDelta(Recurrent):
    """The gated delta rule with a decay for every key feature; devices share heads.

    Decays and output gates are projections of low rank: every device computes the whole of the first matrix's result,
    and its own heads' of the second's.

    Args:
        hidden_size: D.
        num_heads: Heads of queries, keys and values alike.
        head_dim: Features of each, and the rank of the projections of decays and gates.
        taps: Tokens that the convolutions span.
        norm_eps: Added to the mean square of each head of the output.
        scope: Scope of the module.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, taps: int, *, norm_eps: float, scope: Scope):
        super().__init__(scope, (Split(num_heads, f"{num_heads} heads of linear attention"),))
        own, axis, inner = scope.over(self.mesh_axis), self.mesh_axis, num_heads * head_dim
        local = num_heads // own.parallel.size
        self.sizes = DeltaNetSizes(local, local, head_dim, head_dim, has_key_decays=True)
        self.projection = ColumnParallelLinear(
            hidden_size,
            [
                *(Rows(f"{name}_proj", inner, head_dim) for name in "qkv"),
                Rows("b_proj", num_heads),
                *(Rows(f"{name}_a_proj", head_dim, is_whole=True) for name in "fg"),
            ],
            outer_axis="q_heads",
            mesh_axis=axis,
            bias=False,
            scope=own,
        )
        self.forget, self.gate = (
            ColumnParallelLinear(
                head_dim,
                [Rows(f"{name}_b_proj", inner, head_dim)],
                outer_axis="q_heads",
                mesh_axis=axis,
                bias=False,
                scope=own,
            )
            for name in "fg"
        )
        channels = [Rows(f"{name}_conv1d", inner, head_dim) for name in "qkv"]
        self.convolution = CausalConvolution(channels, taps, has_bias=False, scope=own, mesh_axis=axis)
        self.a_log, self.dt_bias = _rates(num_heads, own), head_vector([Rows("", inner, head_dim)], own, "dt_bias")
        self.norm = RMSNorm(head_dim, eps=norm_eps, axis="head_dim", scope=scope.at("o_norm"))
        self.out = RowParallelLinear(
            inner, hidden_size, inner_axis="q_heads", mesh_axis=axis, bias=False, scope=scope.at("o_proj")
        )
        wanted = {"taps": taps, "key_dim": head_dim, "has_key_decays": True}
        self.kernel = cast(DeltaNetKernel, self.load_kernel("delta_net", scope, **wanted))
        shape = self.kernel.state_shape(local, head_dim, head_dim)
        self.state_spec = (self.convolution.tail, StateArray(shape, "float32"))

    def project_input(
        self, x: Float[Array, "rows D"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T width"]:
        """Return queries, keys, values, gates, and what the updates' factors and decays are computed from."""
        projected, sizes = super().project_input(x, norm=norm, num_rows=num_rows), self.sizes
        widths = [sizes.num_channels, sizes.num_value_heads, sizes.key_dim]
        qkv, b, *inner = jnp.split(projected, np.cumsum(widths), axis=1)
        forget, gate = (each.astype(self.projection.dtype) for each in inner)
        a, z = self.forget.in_float32(forget, num_rows=num_rows), self.gate.in_float32(gate, num_rows=num_rows)
        return jnp.concatenate([qkv, z, b, a], axis=1)

    def update(self, projected: Float[Array, "T width"], states: StateArrays, rows: StateRows) -> Mixed:
        """Take the tokens of each row into its state."""
        norm = self.norm.gain.astype(jnp.float32)
        weights = DeltaNetWeights(self.convolution.arrays, self.a_log[...].reshape(-1), self.dt_bias[...], norm)
        mixed, after = self.kernel.update(
            projected, weights, States(*states), rows, sizes=self.sizes, eps=self.norm.eps
        )
        return Mixed(mixed, (*after,))


def _rates(num_heads: int, scope: Scope) -> nnx.Param[Any]:
    """Return the logarithms of the heads' rates of decay, which checkpoints have as ``[1, 1, heads, 1]``."""
    flat = stack_rows(scope, [Rows("", num_heads)], "A_log")
    pieces = tuple(
        Piece(each.source, (0, 0, *each.source_start, 0), (0, 0, *each.target_start, 0), (1, 1, *each.shape, 1))
        for each in flat.pieces
    )
    shape, sources = (1, 1, *flat.shape, 1), tuple((name, (1, 1, *given, 1)) for name, given in flat.sources)
    recipe = TensorRecipe(shape, pieces, sources)
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=(None, None, "q_heads", None), recipe=recipe)
