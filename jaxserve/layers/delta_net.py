"""Gated delta net (arXiv:2412.06464), the linear attention of Qwen3-Next and Qwen3.5."""

from collections.abc import Sequence
from typing import cast

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.kv_layout import StateArray
from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows, Split
from jaxserve.layers.recurrent import CausalConvolution, Mixed, Recurrent, StateArrays, head_vector
from pallas_kernels.delta_net import DeltaNetKernel, DeltaNetSizes, DeltaNetWeights
from pallas_kernels.recurrent_states import StateRows, States


class DeltaNet(Recurrent):
    """The gated delta rule on a matrix per value head; devices share value heads, and have the key heads of these.

    Args:
        hidden_size: D.
        sizes: Heads of all devices.
        taps: Tokens that the convolution spans.
        norm_eps: Added to the mean square of each head of the output.
        rows: Rows of q, k, v, z, b and a of the projection, in checkpoints.
        scope: Scope of the module.
    """

    def __init__(
        self, hidden_size: int, sizes: DeltaNetSizes, taps: int, *, norm_eps: float, rows: Sequence[Rows], scope: Scope
    ):
        num_keys, num_values = sizes.num_key_heads, sizes.num_value_heads
        is_grouped = rows[0].stride is not None  # then devices cannot share the value heads of a key head
        super().__init__(
            scope,
            (
                Split(num_values, f"{num_values} value heads of linear attention"),
                Split(num_keys, f"{num_keys} key heads of linear attention", may_repeat=not is_grouped),
            ),
        )
        own, axis = scope.over(self.mesh_axis), self.mesh_axis
        parts = own.parallel.size
        self.sizes = sizes._replace(num_key_heads=max(1, num_keys // parts), num_value_heads=num_values // parts)
        self.projection = ColumnParallelLinear(
            hidden_size, rows, outer_axis="q_heads", mesh_axis=axis, bias=False, scope=own
        )
        key_width, total = num_keys * sizes.key_dim, sizes.num_channels
        channels = [
            Rows("conv1d", key_width, sizes.key_dim, 0, total),
            Rows("conv1d", key_width, sizes.key_dim, key_width, total),
            Rows("conv1d", sizes.inner, sizes.value_dim, 2 * key_width, total),
        ]
        self.convolution = CausalConvolution(channels, taps, has_bias=False, scope=own, mesh_axis=axis)
        per_head = [Rows("", num_values)]
        self.a_log, self.dt_bias = (head_vector(per_head, own, name) for name in ("A_log", "dt_bias"))
        self.norm = RMSNorm(sizes.value_dim, eps=norm_eps, axis="head_dim", scope=scope.at("norm"))
        self.out = RowParallelLinear(
            sizes.inner, hidden_size, inner_axis="q_heads", mesh_axis=axis, bias=False, scope=scope.at("out_proj")
        )
        self.kernel = cast(DeltaNetKernel, self.load_kernel("delta_net", scope, taps=taps, key_dim=sizes.key_dim))
        shape = self.kernel.state_shape(self.sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
        self.state_spec = (self.convolution.tail, StateArray(shape, "float32"))

    def update(self, projected: Float[Array, "T width"], states: StateArrays, rows: StateRows) -> Mixed:
        """Take the tokens of each row into its state."""
        weights = DeltaNetWeights(
            self.convolution.arrays, self.a_log[...], self.dt_bias[...], self.norm.gain.astype(jnp.float32)
        )
        mixed, after = self.kernel.update(
            projected, weights, States(*states), rows, sizes=self.sizes, eps=self.norm.eps
        )
        return Mixed(mixed, (*after,))


def delta_net_rows(sizes: DeltaNetSizes, names: tuple[str, str, str, str]) -> list[Rows]:
    """Return the rows of modules that have queries, keys and values, the gates, b, and a, each in order of heads."""
    qkv, z, b, a = names
    key_width, values = sizes.num_key_heads * sizes.key_dim, sizes.num_value_heads
    return [
        Rows(qkv, key_width, sizes.key_dim, 0, sizes.num_channels),
        Rows(qkv, key_width, sizes.key_dim, key_width, sizes.num_channels),
        Rows(qkv, sizes.inner, sizes.value_dim, 2 * key_width, sizes.num_channels),
        Rows(z, sizes.inner, sizes.value_dim),
        Rows(b, values),
        Rows(a, values),
    ]


def grouped_delta_net_rows(sizes: DeltaNetSizes, names: tuple[str, str]) -> list[Rows]:
    """Return the rows of modules with queries, keys, values and gates, and with b and a, in groups: all of the first
    key head with those of its value heads, then all of the second."""
    qkvz, ba = names
    num_groups, key_dim = sizes.num_key_heads, sizes.key_dim
    per_group = sizes.num_value_heads // num_groups
    value_dim = per_group * sizes.value_dim
    total, stride = 2 * num_groups * key_dim + 2 * sizes.inner, 2 * key_dim + 2 * value_dim
    qkvz_units = (key_dim, 0), (key_dim, key_dim), (value_dim, 2 * key_dim), (value_dim, 2 * key_dim + value_dim)
    rows = [Rows(qkvz, num_groups * unit, unit, start, total, stride) for unit, start in qkvz_units]
    width = 2 * sizes.num_value_heads
    rows += [Rows(ba, num_groups * per_group, per_group, start, width, 2 * per_group) for start in (0, per_group)]
    return rows
