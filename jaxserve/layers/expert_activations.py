"""Activations of experts that the grouped matmul does not fuse."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.linear import ACTIVATIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """``gate * sigmoid(alpha * gate) * (up + 1)``, with bounded gate and up (GPT-OSS).

    Attributes:
        alpha: Slope of the sigmoid.
        limit: Bound of gate from above, and of up from both sides.
    """

    alpha: float
    limit: float

    def __call__(self, gate: Float[Array, "T F"], up: Float[Array, "T F"]) -> Float[Array, "T F"]:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@dataclasses.dataclass(frozen=True)
class SquaredReLU:
    """``max(x, 0) ** 2`` of experts without gates (Nemotron-H)."""

    def __call__(self, x: Float[Array, "T F"]) -> Float[Array, "T F"]:
        return jnp.square(jax.nn.relu(x))


@dataclasses.dataclass(frozen=True)
class ActivationGLU:
    """``activation(gate) * up`` (Gemma 4).

    Attributes:
        name: One of ``pallas_kernels.linear.ACTIVATIONS``.
    """

    name: str

    def __call__(self, gate: Float[Array, "T F"], up: Float[Array, "T F"]) -> Float[Array, "T F"]:
        return ACTIVATIONS[self.name](gate) * up
