"""Linear layers, whole or split over a mesh axis (Megatron-LM, arXiv:1909.08053)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.parallel import DtypePolicy
from pallas_kernels.linear import Fused, LinearKernel, Norm
from pallas_kernels.registry import load
from sharding.collectives import all_reduce


class PlainWeight(NamedTuple):
    """A weight as checkpoints have it: its global shape, its logical axes, and the implementation that packs it."""

    shape: tuple[int, int]
    axes: tuple[str, str]
    kernel: str
    is_gated: bool


def linear_kernel(name: str) -> LinearKernel:
    """An implementation of the operation ``linear``."""
    return load("linear", name)


def packed_param(
    shape: tuple[int, int],
    axes: tuple[str, str],
    parts: tuple[int, int],
    policy: DtypePolicy,
    is_gated: bool = False,
) -> nnx.Param[Any]:
    """A weight [out, in] as the policy's implementation stores it, each device's part packed on its own.

    Args:
        shape: Of the whole weight.
        axes: Logical axes of outputs and features.
        parts: Devices that each of them is split over.
        policy: Names the implementation and the dtype.
        is_gated: Whether it is multiplied with an activation.
    """
    outer, inner = (size // count for size, count in zip(shape, parts, strict=True))
    first, second, *rest = linear_kernel(policy.linear).packed_shape(outer, inner, policy.weights, is_gated)
    return nnx.Param(
        jnp.zeros((first * parts[0], second * parts[1], *rest), policy.weights),
        axes=(*axes, *[None] * len(rest)),
        plain=PlainWeight(shape, axes, policy.linear, is_gated),
    )


class ColumnParallelLinear(nnx.Module):
    """``x @ W.T + b`` with the outputs of W split: each device computes its own.

    Args:
        inner: Features.
        outer: Outputs on all devices.
        outer_axis: Logical axis of the outputs.
        parts: Devices that they are split over.
        bias: Whether there is one.
        activation: Of gates, the first half of each device's outputs, which multiply the other half; None for no gates.
        policy: Element types.
    """

    def __init__(
        self,
        inner: int,
        outer: int,
        *,
        outer_axis: str,
        parts: int = 1,
        bias: bool,
        activation: str | None = None,
        policy: DtypePolicy,
    ):
        is_gated = activation is not None
        self.weight = packed_param((outer, inner), (outer_axis, "embed"), (parts, 1), policy, is_gated)
        self.bias = nnx.Param(jnp.zeros((outer,), policy.weights), axes=(outer_axis,)) if bias else None
        self.outer, self.activation = outer // parts, activation
        self.dtype, self.kernel = policy.activations_dtype, policy.linear

    def __call__(
        self, x: Float[Array, "T inner"], *, norm: RMSNorm | None = None, num_rows: Int[Array, ""] | None = None
    ) -> Float[Array, "T results"]:
        """Compute a device's outputs from the normed rows; of ``num_rows`` rows alone where that is given."""
        bias = None if self.bias is None else self.bias[...]
        fused = Fused(norm=fused_norm(norm), bias=bias, activation=self.activation)
        kernel = linear_kernel(self.kernel)
        return kernel.matmul(x, self.weight[...], self.outer, fused=fused, num_rows=num_rows).astype(self.dtype)


class RowParallelLinear(nnx.Module):
    """``x @ W.T + b`` with the features of W split: devices' partial sums are added up.

    Args:
        inner: Features on all devices.
        outer: Outputs.
        inner_axis: Logical axis of the features.
        mesh_axis: Mesh axis that they are split over; None for none.
        parts: Devices along it.
        bias: Whether there is one.
        policy: Element types.
    """

    def __init__(
        self,
        inner: int,
        outer: int,
        *,
        inner_axis: str,
        mesh_axis: str | None,
        parts: int = 1,
        bias: bool,
        policy: DtypePolicy,
    ):
        self.weight = packed_param((outer, inner), ("embed", inner_axis), (1, parts), policy)
        self.bias = nnx.Param(jnp.zeros((outer,), policy.weights), axes=("embed",)) if bias else None
        self.outer, self.mesh_axis = outer, mesh_axis
        self.dtype, self.kernel = policy.activations_dtype, policy.linear

    def __call__(
        self,
        x: Float[Array, "T inner"],
        *,
        residual: Float[Array, "T outer"] | None = None,
        scale: float = 1.0,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "T outer"]:
        """Compute ``residual + scale * (x @ W.T + b)``, of ``num_rows`` rows alone where that is given."""
        bias = None if self.bias is None else self.bias[...]
        kernel, weight = linear_kernel(self.kernel), self.weight[...]
        if self.mesh_axis is None:
            fused = Fused(bias=bias, scale=scale, residual=residual)
            return kernel.matmul(x, weight, self.outer, fused=fused, num_rows=num_rows).astype(self.dtype)
        partial = kernel.matmul(x, weight, self.outer, fused=Fused(), num_rows=num_rows)
        y = all_reduce(partial, self.mesh_axis)
        y = (y if bias is None else y + bias.astype(jnp.float32)).astype(self.dtype)
        y = y if scale == 1.0 else y * scale
        return y if residual is None else residual + y


def fused_norm(norm: RMSNorm | None) -> Norm | None:
    """What a kernel needs of a norm."""
    return None if norm is None else Norm(norm.weight[...], norm.eps)
