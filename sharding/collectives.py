"""Collectives that a layout may turn off: with no mesh axis, each returns what it was given."""

import jax
from jax import lax
from jaxtyping import Array, Float, Int, Shaped


def all_reduce(x: Float[Array, "..."], axis: str | None) -> Float[Array, "..."]:
    """Sum of ``x`` over the devices along a mesh axis."""
    return x if axis is None else lax.psum(x, axis)


def all_gather(x: Shaped[Array, "..."], axis: str | None, dimension: int) -> Shaped[Array, "..."]:
    """``x`` of all devices along a mesh axis, concatenated in device order along ``dimension``."""
    return x if axis is None else lax.all_gather(x, axis, axis=dimension, tiled=True)


def axis_index(axis: str | None) -> Int[Array, ""] | int:
    """This device's index along a mesh axis; 0 without one."""
    return 0 if axis is None else lax.axis_index(axis)


def axis_size(axis: str | None) -> int:
    """Devices along a mesh axis; 1 without one."""
    return 1 if axis is None else jax.lax.axis_size(axis)
