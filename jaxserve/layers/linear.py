"""Linear layers, whole or split over a mesh axis (Megatron-LM, arXiv:1909.08053)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.layers.parallel import DtypePolicy
from pallas_kernels.registry import load
from sharding.collectives import all_reduce


def project(
    x: Float[Array, "T inner"], weight: Float[Array, "outer inner"], kernel: str = "xla"
) -> Float[Array, "T outer"]:
    """Compute ``x @ weight.T`` in float32, by an implementation of the operation ``linear``."""
    return load("linear", kernel).matmul(x, weight)


class ColumnParallelLinear(nnx.Module):
    """``x @ W.T + b`` with the rows of W, stored [out, in], split: each device computes its own outputs."""

    def __init__(self, inner: int, outer: int, *, outer_axis: str, bias: bool, policy: DtypePolicy):
        self.weight = nnx.Param(jnp.zeros((outer, inner), policy.weights), axes=(outer_axis, "embed"))
        self.bias = nnx.Param(jnp.zeros((outer,), policy.weights), axes=(outer_axis,)) if bias else None
        self.dtype, self.kernel = policy.activations_dtype, policy.linear

    def __call__(self, x: Float[Array, "T inner"]) -> Float[Array, "T outer"]:
        y = project(x, self.weight[...], self.kernel)
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)
        return y.astype(self.dtype)


class RowParallelLinear(nnx.Module):
    """``x @ W.T + b`` with the columns of W, stored [out, in], split: devices' partial sums are added up."""

    def __init__(
        self, inner: int, outer: int, *, inner_axis: str, mesh_axis: str | None, bias: bool, policy: DtypePolicy
    ):
        self.weight = nnx.Param(jnp.zeros((outer, inner), policy.weights), axes=("embed", inner_axis))
        self.bias = nnx.Param(jnp.zeros((outer,), policy.weights), axes=("embed",)) if bias else None
        self.mesh_axis = mesh_axis
        self.dtype, self.kernel = policy.activations_dtype, policy.linear

    def __call__(self, x: Float[Array, "T inner"]) -> Float[Array, "T outer"]:
        y = all_reduce(project(x, self.weight[...], self.kernel), self.mesh_axis)
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)
        return y.astype(self.dtype)
