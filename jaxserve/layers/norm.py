"""Norms: root mean square (arXiv:1910.07467), over features of one device or over a split width, and layer norm."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from checkpoints import whole
from jaxserve.layers.parallel import Scope
from jaxserve.layers.params import Rows, stack_rows, vector
from sharding.collectives import all_reduce, axis_size


class RMSNorm(nnx.Module):
    """``x / rms(x) * (weight + offset)`` over the last axis, in float32.

    Args:
        features: Number of features on all devices, without copies.
        eps: Added to the mean square.
        scope: Scope of the module.
        axis: Logical axis of the features.
        unit: Features that stay together when devices share them, such as a head's; None if each device has all
            features.
        offset: Added to the weight (Gemma: 1).
        has_weight: Whether there is a weight; it is 1 otherwise.
        tensor: Name of the weight.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float,
        scope: Scope,
        axis: str = "embed",
        unit: int | None = None,
        offset: float = 0.0,
        has_weight: bool = True,
        tensor: str = "weight",
    ):
        if unit is None:
            recipe = whole(scope.at(tensor).module, (features,))
        else:
            recipe = stack_rows(scope, [Rows("", features, unit)], tensor)
        self.weight = vector(recipe, axis, scope, fill=1.0 - offset) if has_weight else None
        self.eps, self.offset, self.features, self.dtype = eps, offset, features, scope.policy.weights

    @property
    def gain(self) -> Float[Array, " D"]:
        """The factor of each feature: as stored, or in float32 where an offset is added."""
        if self.weight is None:
            return jnp.ones(self.features, self.dtype)
        weight = self.weight[...]
        return weight if self.offset == 0.0 else weight.astype(jnp.float32) + self.offset

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return self.scaled(x, jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True))

    def scaled(self, x: Float[Array, "*B D"], mean_square: Float[Array, "*B 1"]) -> Float[Array, "*B D"]:
        """Normalize with a mean square computed elsewhere."""
        normed = x.astype(jnp.float32) * lax.rsqrt(mean_square + self.eps)
        return (normed * self.gain.astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """``(x - mean(x)) / std(x) * (weight + offset) + bias`` over the last axis, in float32 (arXiv:1607.06450).

    Args:
        features: Number of features.
        eps: Added to the variance.
        scope: Scope of the module.
        has_bias: Whether there is a bias.
        offset: Added to the weight (Nemotron: 1).
    """

    def __init__(self, features: int, *, eps: float, scope: Scope, has_bias: bool = True, offset: float = 0.0):
        self.weight = vector(whole(scope.at("weight").module, (features,)), "embed", scope, fill=1.0 - offset)
        self.bias = vector(whole(scope.at("bias").module, (features,)), "embed", scope) if has_bias else None
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        normed = centred * lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + self.eps)
        scaled = normed * (self.weight[...].astype(jnp.float32) + self.offset)
        return (scaled if self.bias is None else scaled + self.bias[...].astype(jnp.float32)).astype(x.dtype)


def split_mean_squares(
    first: Float[Array, "T A"], second: Float[Array, "T C"], mesh_axis: str | None
) -> tuple[Float[Array, "T 1"], Float[Array, "T 1"]]:
    """Compute mean squares of two arrays whose last axis is split over a mesh axis, with one all-reduce."""
    sums = jnp.stack([jnp.sum(jnp.square(x.astype(jnp.float32)), -1) for x in (first, second)], -1)
    sums = all_reduce(sums, mesh_axis)
    devices = axis_size(mesh_axis)
    return sums[:, :1] / (first.shape[1] * devices), sums[:, 1:] / (second.shape[1] * devices)
