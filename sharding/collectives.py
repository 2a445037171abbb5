"""Collectives that do nothing when the layout maps them to no mesh axis."""

import jax
from jax import lax
from jaxtyping import Array, Float, Int, Shaped


def all_reduce(x: Float[Array, "..."], axis: str | tuple[str, ...] | None) -> Float[Array, "..."]:
    """Return the sum of ``x`` over the devices along a mesh axis, or along several."""
    return lax.psum(x, axis) if axis else x


def all_max(x: Shaped[Array, "..."], axis: str | tuple[str, ...] | None) -> Shaped[Array, "..."]:
    """Return the largest ``x`` of the devices along a mesh axis, or along several."""
    return lax.pmax(x, axis) if axis else x


def all_gather(x: Shaped[Array, "..."], axis: str | None, dimension: int) -> Shaped[Array, "..."]:
    """Concatenate ``x`` of all devices along a mesh axis, in device order, along ``dimension``."""
    return x if axis is None else lax.all_gather(x, axis, axis=dimension, tiled=True)


def reduce_scatter(x: Float[Array, "..."], axis: str | None, dimension: int) -> Float[Array, "..."]:
    """Return this device's part, along ``dimension``, of the sum of ``x`` over the devices along a mesh axis."""
    return x if axis is None else lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)


def own_part(x: Shaped[Array, "..."], axis: str | None, dimension: int) -> Shaped[Array, "..."]:
    """Return this device's part, along ``dimension``, of an array that all devices along a mesh axis have."""
    if axis is None:
        return x
    size = x.shape[dimension] // axis_size(axis)
    return lax.dynamic_slice_in_dim(x, axis_index(axis) * size, size, dimension)


def all_to_all(x: Shaped[Array, "..."], axis: str | None) -> Shaped[Array, "..."]:
    """Send ``x[d]`` to device d along a mesh axis; ``result[d]`` is what device d sent."""
    return x if axis is None else lax.all_to_all(x, axis, 0, 0)


def axis_index(axis: str | None) -> Int[Array, ""] | int:
    """Return this device's index along a mesh axis; 0 without an axis."""
    return 0 if axis is None else lax.axis_index(axis)


def axis_size(axis: str | None) -> int:
    """Return the number of devices along a mesh axis; 1 without an axis."""
    return 1 if axis is None else jax.lax.axis_size(axis)
