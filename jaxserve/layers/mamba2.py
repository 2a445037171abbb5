"""Mamba-2 (arXiv:2405.21060), the state-space mixer of Nemotron-H, Granite 4, Bamba and Falcon-H1."""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.kv_layout import StateArray
from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows, Split
from jaxserve.layers.recurrent import CausalConvolution, Mixed, Recurrent, StateArrays, head_vector
from pallas_kernels.mamba2 import GroupNorm, Mamba2Kernel, Mamba2Sizes, Mamba2Weights, StepLimits
from pallas_kernels.recurrent_states import StateRows, States
from sharding.collectives import all_gather, axis_index, axis_size


class Mamba2Options(NamedTuple):
    """What families choose.

    Attributes:
        taps: Tokens that the convolution spans.
        limits: Limits of the step size.
        norm_eps: Added to the mean square of each group of the output; None for no norm.
        norm_groups: Groups of the norm, which need not be those of B and C.
        is_norm_before_gate: Whether the norm precedes the gate.
        conv_bias: Whether the convolution has a bias.
        proj_bias: Whether the input projection has a bias.
        out_bias: Whether the output projection has one.
        multipliers: Factors of z, x, B, C and dt of the projection (Falcon-H1); None for none.
    """

    taps: int = 4
    limits: StepLimits = StepLimits()
    norm_eps: float | None = 1e-5
    norm_groups: int = 1
    is_norm_before_gate: bool = False
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    multipliers: tuple[float, float, float, float, float] | None = None


class Mamba2(Recurrent):
    """A state-space model with a scalar decay per head; devices share heads, and have the groups of B and C of these.

    Args:
        hidden_size: D.
        sizes: Heads of all devices.
        options: What families choose.
        scope: Scope of the module.
    """

    def __init__(self, hidden_size: int, sizes: Mamba2Sizes, options: Mamba2Options, *, scope: Scope):
        heads, groups, norm_groups = sizes.num_heads, sizes.num_groups, options.norm_groups
        super().__init__(
            scope,
            (
                Split(heads, f"{heads} Mamba heads"),
                Split(groups, f"{groups} Mamba groups", may_repeat=True),
                Split(norm_groups, f"{norm_groups} groups of Mamba norms", may_repeat=True),
            ),
        )
        own, axis = scope.over(self.mesh_axis), self.mesh_axis
        parts = own.parallel.size
        self.options = options
        self.sizes = sizes._replace(num_heads=heads // parts, num_groups=max(1, groups // parts))
        inner, group_width, total = sizes.inner, groups * sizes.state_dim, sizes.width
        starts = (0, inner, 2 * inner, 2 * inner + group_width, 2 * inner + 2 * group_width)
        widths = (inner, inner, group_width, group_width, heads)
        units = (sizes.head_dim, sizes.head_dim, sizes.state_dim, sizes.state_dim, 1)
        rows = [Rows("in_proj", *each, total) for each in zip(widths, units, starts, strict=True)]
        self.projection = ColumnParallelLinear(
            hidden_size, rows, outer_axis="q_heads", mesh_axis=axis, bias=options.proj_bias, scope=own
        )
        channels = [
            each._replace(module="conv1d", start=each.start - inner, total=sizes.num_channels) for each in rows[1:4]
        ]
        self.convolution = CausalConvolution(
            channels, options.taps, has_bias=options.conv_bias, scope=own, mesh_axis=axis
        )
        self.a_log, self.dt_bias, self.d = (
            head_vector([Rows("", heads)], own, name) for name in ("A_log", "dt_bias", "D")
        )
        has_norm = options.norm_eps is not None
        self.norm = head_vector([Rows("norm", inner, sizes.head_dim)], own, "weight", 1.0) if has_norm else None
        self.out = RowParallelLinear(
            inner,
            hidden_size,
            inner_axis="q_heads",
            mesh_axis=axis,
            bias=options.out_bias,
            scope=scope.at("out_proj"),
        )
        self.kernel = cast(
            Mamba2Kernel, self.load_kernel("mamba2", scope, taps=options.taps, state_dim=sizes.state_dim)
        )
        shape = self.kernel.state_shape(self.sizes.num_heads, sizes.state_dim, sizes.head_dim)
        self.state_spec = (self.convolution.tail, StateArray(shape, "float32"))
        self.shares_groups = parts > norm_groups
        self.local_norm_groups = max(1, norm_groups // parts)

    def update(self, projected: Float[Array, "T width"], states: StateArrays, rows: StateRows) -> Mixed:
        """Take the tokens of each row into its state.

        Where devices share the groups of the norm, the gate follows the result, for ``finished`` to norm both.
        """
        weights = Mamba2Weights(self.convolution.arrays, self.a_log[...], self.dt_bias[...], self.d[...])
        if self.options.multipliers is not None:
            projected = projected * self._multipliers(self.options.multipliers)
        eps, is_before = self.options.norm_eps, self.options.is_norm_before_gate
        norm = None
        if self.norm is not None and eps is not None and not self.shares_groups:
            norm = GroupNorm(self.norm[...], eps, self.local_norm_groups, is_before)
        is_gated = not (self._norms_later and is_before)
        mixed, after = self.kernel.update(
            projected,
            weights,
            States(*states),
            rows,
            sizes=self.sizes,
            limits=self.options.limits,
            norm=norm,
            is_gated=is_gated,
        )
        if not is_gated:
            mixed = jnp.concatenate([mixed, projected[:, : self.sizes.inner].astype(mixed.dtype)], axis=1)
        return Mixed(mixed, (*after,))

    def _multipliers(self, factors: tuple[float, ...]) -> Float[Array, " width"]:
        """Return the factor of each feature of this device's projection."""
        sizes = self.sizes
        group_width = sizes.num_groups * sizes.state_dim
        widths = sizes.inner, sizes.inner, group_width, group_width, sizes.num_heads
        return jnp.concatenate([jnp.full(width, factor) for width, factor in zip(widths, factors, strict=True)])

    @property
    def has_fused_norms(self) -> bool:
        """Whether kernels can fuse the norm before it with its projection, and compute each row of it separately."""
        return super().has_fused_norms and not self.shares_groups and self.options.multipliers is None

    @property
    def _norms_later(self) -> bool:
        return self.norm is not None and self.shares_groups

    def finished(self, mixed: Float[Array, "T _"]) -> Float[Array, "T inner"]:
        """Norm the groups that devices share, each with the mean square of all its features."""
        eps = self.options.norm_eps
        if self.norm is None or eps is None or not self.shares_groups:
            return mixed
        values, gates = mixed[:, : self.sizes.inner], mixed[:, self.sizes.inner :]
        sums = all_gather(jnp.square(values).sum(-1)[None], self.mesh_axis, 0)  # [devices, T]
        num_groups = self.options.norm_groups
        per_group = axis_size(self.mesh_axis) // num_groups
        sums = sums.reshape(num_groups, per_group, -1).sum(1)[axis_index(self.mesh_axis) // per_group]
        normed = values * jax.lax.rsqrt(sums / (self.sizes.inner * per_group) + eps)[:, None] * self.norm[...]
        return normed * jax.nn.silu(gates) if self.options.is_norm_before_gate else normed
