"""Per-token work in tiles of a fixed number of rows, so that a row's result does not depend on how many rows there are.

Compilers choose the order of sums by an operation's shape, so that a row's last bits differ between a batch of 4 rows
and one of 400. In a loop over tiles the operations always have the same shape. The loop's trip count is known only at
run time, so that no compiler hoists the body out of the loop, and all programs of an engine run the same body.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

ROW_TILE = 8
"""Rows per tile in deterministic mode, and of the sampler on CPUs."""

Rows = TypeVar("Rows", bound=PyTree)


def map_rows(
    function: Callable[..., Rows],
    arrays: tuple[Array, ...],
    num_rows: Int[Array, ""] | int,
    tile: int | None,
    size: int | None = None,
) -> Rows:
    """Compute ``function(*arrays)``, one tile of rows at a time if ``tile`` is given.

    Args:
        function: Takes one array for each of ``arrays`` and returns a tree of arrays; row r of its results depends
            only on row r of its arguments. It may communicate.
        arrays: Arrays with T rows.
        num_rows: Rows in use, the first of the T; the same on all devices that ``function`` communicates with. Results
            after their tiles are zero.
        tile: Rows per tile, which divides T; None calls the function once, with all rows.
        size: T, if some arrays and results have only this device's part of each tile; None: all have T rows.
    """
    if tile is None:
        return function(*arrays)
    size = arrays[0].shape[0] if size is None else size
    num_tiles = size // tile
    assert size % tile == 0 and all(size % len(array) == 0 == len(array) % num_tiles for array in arrays)
    count = max(num_tiles, 2)
    if num_tiles == 1:  # a single tile would be a full slice, which a compiler hoists out of the loop
        arrays = tuple(jnp.concatenate([array, jnp.zeros_like(array)]) for array in arrays)

    def part(array: Array, i: Int[Array, ""] | int) -> Array:
        rows = len(array) // count
        return lax.dynamic_slice_in_dim(array, i * rows, rows)

    def round_(i: Int[Array, ""], filled: Rows) -> Rows:
        found = function(*(part(array, i) for array in arrays))
        return jax.tree.map(
            lambda all_, some: lax.dynamic_update_slice_in_dim(all_, some, i * len(some), 0), filled, found
        )

    shapes = jax.eval_shape(function, *(part(array, 0) for array in arrays))
    empty = jax.tree.map(lambda tile: jnp.zeros((count * tile.shape[0], *tile.shape[1:]), tile.dtype), shapes)
    filled = lax.fori_loop(0, -(-jnp.asarray(num_rows, jnp.int32) // tile), round_, empty)
    return jax.tree.map(lambda array: array[: len(array) // count * num_tiles], filled)
