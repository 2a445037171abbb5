"""MLPs: the gated one (arXiv:2002.05202) with its two input projections fused, and the plain one."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows, Split, rows_of
from jaxserve.layers.residual import block_input
from pallas_kernels.linear import ACTIVATIONS

PLAIN_ACTIVATIONS = {**ACTIVATIONS, "relu2": lambda x: jnp.square(jax.nn.relu(x))}
"""Activations without gates."""


class GatedMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``; each device holds matching rows of gate and up.

    Args:
        hidden_size: D.
        ffn_size: F.
        activation: One of ``pallas_kernels.linear.ACTIVATIONS``.
        bias: Whether the projections have a bias.
        scope: Scope of the module.
        gate_up: Gate and up projections in checkpoints: two modules, or one with the rows of gate, then up.
        down: Down projection in checkpoints.
        gate_scale: Factor of the gates before their activation (Falcon-H1).
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: str,
        bias: bool = False,
        scope: Scope,
        gate_up: Sequence[str] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
        gate_scale: float = 1.0,
    ):
        mesh_axis, self.residual_axis = scope.parallel.ffn, scope.parallel.residual_axis
        is_fused = gate_scale == 1.0
        self.has_fused_norms = self.residual_axis is None and is_fused
        self.gate_scale, self.activation = gate_scale, activation
        self.splits = (Split(ffn_size, f"intermediate_size {ffn_size}"),)
        self.gate_up = ColumnParallelLinear(
            hidden_size,
            rows_of(gate_up, (ffn_size, ffn_size), (1, 1)),
            outer_axis="ffn",
            mesh_axis=mesh_axis,
            bias=bias,
            activation=activation if is_fused else None,
            scope=scope,
        )
        self.down = RowParallelLinear(
            ffn_size, hidden_size, inner_axis="ffn", mesh_axis=mesh_axis, bias=bias, scope=scope.at(down)
        )

    def __call__(
        self,
        x: Float[Array, "rows D"],
        *,
        norm: RMSNorm | None = None,
        residual: Float[Array, "rows D"] | None = None,
        scale: float = 1.0,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "rows D"]:
        """Compute ``residual + scale * mlp(norm(x))``; rows from ``num_rows`` on are undefined."""
        x, norm = block_input(x, norm, self.residual_axis)
        gated = self._gated(self.gate_up(x, norm=norm, num_rows=num_rows))
        return self.down(gated, residual=residual, scale=scale, num_rows=num_rows)

    def partial(self, x: Float[Array, "T D"], *, num_rows: Int[Array, ""] | None = None) -> Float[Array, "T D"]:
        """Compute this device's part of ``mlp(x)`` in float32, for an MLP without biases; see :meth:`__call__`."""
        return self.down.partial(self._gated(self.gate_up(x, num_rows=num_rows)), num_rows=num_rows)

    def _gated(self, projected: Float[Array, "T _"]) -> Float[Array, "T F"]:
        """Apply the gates, unless the projection has."""
        if self.gate_scale == 1.0:
            return projected
        gate, up = jnp.split(projected, 2, axis=1)
        return ACTIVATIONS[self.activation](gate * self.gate_scale) * up


class PlainMLP(nnx.Module):
    """``down(activation(up(x)))``; each device holds some of the inner features.

    Args:
        hidden_size: D.
        ffn_size: F.
        activation: One of ``PLAIN_ACTIVATIONS``, or one with parameters of its own.
        scope: Scope of the module.
        up: Input projection in checkpoints.
        down: Output projection in checkpoints.
        is_transposed: Whether checkpoints have their weights as ``[in, out]``.
        bias: Whether both have a bias.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: str | Callable[[Float[Array, "T F"]], Float[Array, "T F"]],
        scope: Scope,
        up: str,
        down: str,
        is_transposed: bool = False,
        bias: bool = True,
    ):
        mesh_axis, self.residual_axis = scope.parallel.ffn, scope.parallel.residual_axis
        self.splits = (Split(ffn_size, f"intermediate_size {ffn_size}"),)
        self.activation, self.has_fused_norms = activation, self.residual_axis is None
        rows = [Rows(up, ffn_size, is_transposed=is_transposed)]
        self.up = ColumnParallelLinear(hidden_size, rows, outer_axis="ffn", mesh_axis=mesh_axis, bias=bias, scope=scope)
        self.down = RowParallelLinear(
            ffn_size,
            hidden_size,
            inner_axis="ffn",
            mesh_axis=mesh_axis,
            bias=bias,
            scope=scope.at(down),
            is_transposed=is_transposed,
        )

    def __call__(
        self,
        x: Float[Array, "rows D"],
        *,
        norm: RMSNorm | None = None,
        residual: Float[Array, "rows D"] | None = None,
        scale: float = 1.0,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "rows D"]:
        """Compute ``residual + scale * mlp(norm(x))``; rows from ``num_rows`` on are undefined."""
        x, norm = block_input(x, norm, self.residual_axis)
        activation = PLAIN_ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        inner = activation(self.up(x, norm=norm, num_rows=num_rows))
        return self.down(inner, residual=residual, scale=scale, num_rows=num_rows)

    def partial(self, x: Float[Array, "T D"], *, num_rows: Int[Array, ""] | None = None) -> Float[Array, "T D"]:
        """Compute this device's part of ``mlp(x)`` in float32, for an MLP without biases; see :meth:`__call__`."""
        activation = PLAIN_ACTIVATIONS[self.activation] if isinstance(self.activation, str) else self.activation
        return self.down.partial(activation(self.up(x, num_rows=num_rows)), num_rows=num_rows)
