"""Hidden states between blocks, whose rows the devices of a mesh axis may share (arXiv:2205.05198).

A block, attention or an MLP, needs all rows. If devices share them, they normalize their own rows and gather them
before the block. The sum of what the devices compute in the block is scattered: each device adds its rows of the sum to
those it has.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.norm import RMSNorm
from sharding.collectives import all_gather, all_reduce, axis_size, own_part, reduce_scatter


def block_input(
    x: Float[Array, "rows D"], norm: RMSNorm | None, axis: str | None
) -> tuple[Float[Array, "T D"], RMSNorm | None]:
    """Return all rows of a block's input, and the norm that the block has yet to apply to them.

    Args:
        x: All rows, or this device's.
        norm: Norm before the block; None for none.
        axis: Mesh axis of the devices that share rows; None if each has all.
    """
    if axis is None:
        return x, norm
    return all_gather(x if norm is None else norm(x), axis, 0), None


def block_output(y: Float[Array, "T D"], summed_axes: tuple[str, ...], axis: str | None) -> Float[Array, "rows D"]:
    """Return the sum of what devices computed in a block: all rows, or this device's.

    Args:
        y: This device's part of the sum, for all rows.
        summed_axes: Mesh axes of the devices whose parts add up, among them ``axis``.
        axis: Mesh axis of the devices that share rows; None if each has all.
    """
    others = tuple(each for each in summed_axes if each != axis)
    return all_reduce(reduce_scatter(y, axis, 0), others)


def own_rows(x: Float[Array, "T D"], axis: str | None, tile: int | None) -> Float[Array, "rows D"]:
    """Return this device's rows of hidden states, from all rows: the inverse of :func:`whole_rows`."""
    if axis is None or tile is None:
        return own_part(x, axis, 0)
    return own_part(jnp.reshape(x, (-1, tile, x.shape[1])), axis, 1).reshape(-1, x.shape[1])


def whole_rows(x: Float[Array, "rows D"], axis: str | None, tile: int | None) -> Float[Array, "T D"]:
    """Return all rows of hidden states, from the rows of each device.

    Args:
        x: This device's rows: its part of all rows, or of each tile, one after the other.
        axis: Mesh axis of the devices that share rows; None if each has all.
        tile: Rows per tile; None for one tile of all rows.
    """
    if axis is None or tile is None:
        return all_gather(x, axis, 0)
    parts = jnp.reshape(x, (-1, tile // axis_size(axis), x.shape[1]))
    return all_gather(parts, axis, 1).reshape(-1, x.shape[1])
