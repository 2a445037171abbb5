"""Collectives that do nothing when the layout maps them to no mesh axis."""

import jax
from jax import lax
from jaxtyping import Array, Float, Int, Shaped


def all_reduce(x: Float[Array, "..."], axis: str | None) -> Float[Array, "..."]:
    """Return the sum of ``x`` over the devices along a mesh axis."""
    return x if axis is None else lax.psum(x, axis)


def all_gather(x: Shaped[Array, "..."], axis: str | None, dimension: int) -> Shaped[Array, "..."]:
    """Concatenate ``x`` of all devices along a mesh axis, in device order, along ``dimension``."""
    return x if axis is None else lax.all_gather(x, axis, axis=dimension, tiled=True)


def axis_index(axis: str | None) -> Int[Array, ""] | int:
    """Return this device's index along a mesh axis; 0 without an axis."""
    return 0 if axis is None else lax.axis_index(axis)


def axis_size(axis: str | None) -> int:
    """Return the number of devices along a mesh axis; 1 without an axis."""
    return 1 if axis is None else jax.lax.axis_size(axis)
