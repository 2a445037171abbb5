"""Linear layers, whole or split over a mesh axis (Megatron-LM, arXiv:1909.08053)."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from checkpoints import whole
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows, stack_rows, vector, weight
from jaxserve.layers.residual import block_output
from jaxserve.layers.storage import matmul
from pallas_kernels.linear import Fused, Norm


class ColumnParallelLinear(nnx.Module):
    """``x @ W.T + b`` with the outputs of W split: each device computes its own outputs.

    Args:
        inner: Number of input features.
        rows: The checkpoint's modules that these outputs come from.
        outer_axis: Logical axis of the outputs.
        mesh_axis: Mesh axis that the outputs are split over; None for none.
        bias: Whether there is a bias.
        activation: Activation of gates, the first half of each device's outputs, which multiply the second half; None
            for no gates.
        scope: Scope that the modules' names are relative to.
        order: Indices of each device's outputs, in checkpoints' order, where they are kept in another one.
    """

    def __init__(
        self,
        inner: int,
        rows: Sequence[Rows],
        *,
        outer_axis: str | None,
        mesh_axis: str | None,
        bias: bool,
        activation: str | None = None,
        scope: Scope,
        order: tuple[int, ...] | None = None,
    ):
        scope = scope.over(mesh_axis)
        recipe, parts = stack_rows(scope, rows, "weight", inner), (scope.parallel.size, 1)
        self.weight = weight(recipe, (outer_axis, "embed"), parts, scope, activation is not None)
        self.bias = vector(stack_rows(scope, rows, "bias"), outer_axis or "embed", scope) if bias else None
        if order is not None:
            for param in (self.weight, self.bias):
                if param is not None:
                    param.set_metadata(order=order)
        self.activation, self.dtype = activation, scope.policy.activations_dtype

    def __call__(
        self, x: Float[Array, "T inner"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T results"]:
        """Compute this device's outputs from normalized rows; rows from ``num_rows`` on are undefined."""
        return self.in_float32(x, norm=norm, num_rows=num_rows).astype(self.dtype)

    def in_float32(
        self, x: Float[Array, "T inner"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T results"]:
        """Compute the same, not rounded to the activations' dtype."""
        bias = None if self.bias is None else self.bias[...]
        fused = Fused(norm=fused_norm(norm), bias=bias, activation=self.activation)
        return matmul(self.weight, x, fused=fused, num_rows=num_rows).astype(jnp.float32)


def replicated_linear(
    hidden_size: int, module: str, num_outputs: int, scope: Scope, bias: bool = False
) -> ColumnParallelLinear:
    """Build a small projection that every device computes whole: a router, or the gate of a shared expert."""
    return ColumnParallelLinear(
        hidden_size,
        [Rows(module, num_outputs)],
        outer_axis=None,
        mesh_axis=None,
        bias=bias,
        scope=scope.unsplit(),
    )


class RowParallelLinear(nnx.Module):
    """``x @ W.T + b`` with the input features of W split: the devices' partial sums are added.

    Partial sums are exchanged in the activations' dtype. Each device gets all rows of the sum, or those that it has of
    the hidden states between blocks.

    Args:
        inner: Number of input features on all devices.
        outer: Number of outputs.
        inner_axis: Logical axis of the input features.
        mesh_axis: Mesh axis that they are split over; None for none.
        bias: Whether there is a bias.
        scope: Scope of the module.
        is_transposed: Whether checkpoints have the weight as ``[in, out]``.
    """

    def __init__(
        self,
        inner: int,
        outer: int,
        *,
        inner_axis: str,
        mesh_axis: str | None,
        bias: bool,
        scope: Scope,
        is_transposed: bool = False,
    ):
        recipe, parts = whole(scope.at("weight").module, (outer, inner), is_transposed), scope.parallel.parts(mesh_axis)
        self.weight = weight(recipe, ("embed", inner_axis), (1, parts), scope)
        self.bias = vector(whole(scope.at("bias").module, (outer,)), "embed", scope) if bias else None
        self.mesh_axis, self.dtype = mesh_axis, scope.policy.activations_dtype
        self.residual_axis = scope.parallel.residual_axis

    def __call__(
        self,
        x: Float[Array, "T inner"],
        *,
        residual: Float[Array, "rows outer"] | None = None,
        scale: float = 1.0,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "rows outer"]:
        """Compute ``residual + scale * (x @ W.T + b)``; rows from ``num_rows`` on are undefined."""
        bias = None if self.bias is None else self.bias[...]
        if self.mesh_axis is None:
            fused = Fused(bias=bias, scale=scale, residual=residual)
            return matmul(self.weight, x, fused=fused, num_rows=num_rows).astype(self.dtype)
        part = self.partial(x, num_rows=num_rows).astype(self.dtype)
        y = block_output(part, (self.mesh_axis,), self.residual_axis)
        y = y if bias is None else y + bias.astype(jnp.float32)
        return add_branch(y.astype(self.dtype), residual, scale)

    def partial(self, x: Float[Array, "T inner"], *, num_rows: Int[Array, ""] | None = None) -> Float[Array, "T outer"]:
        """Compute this device's ``x @ W.T`` in float32, without the bias; rows from ``num_rows`` on are undefined."""
        return matmul(self.weight, x, fused=Fused(), num_rows=num_rows)


def add_branch(y: Float[Array, "T D"], residual: Float[Array, "T D"] | None, scale: float) -> Float[Array, "T D"]:
    """Compute ``residual + scale * y``."""
    y = y if scale == 1.0 else y * scale
    return y if residual is None else residual + y


def fused_norm(norm: RMSNorm | None) -> Norm | None:
    """Return a norm in the form that the linear kernels take."""
    return None if norm is None else Norm(norm.gain, norm.eps)
