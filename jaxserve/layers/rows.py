"""Per-token work in tiles of a fixed number of rows, so that a row's result does not depend on how many rows there are.

Compilers choose the order of sums by an operation's shape, so that the same row gets other last bits among 4 rows than
among 400. In a loop over tiles the operations always have one shape. The loop's trip count is only known when it runs,
so that no compiler takes the body out of the loop, and all programs of an engine run the same one.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

ROW_TILE = 8
"""Rows of a tile in the deterministic mode, and of the sampler's on CPUs."""

Rows = TypeVar("Rows", bound=PyTree)


def map_rows(
    function: Callable[..., Rows], arrays: tuple[Array, ...], num_rows: Int[Array, ""] | int, tile: int | None
) -> Rows:
    """``function(*arrays)``, computed a tile of rows at a time where ``tile`` is given.

    Args:
        function: Takes one array for each of ``arrays`` and gives arrays in any tree; row r of its results depends on
            row r of its arguments alone. It may communicate: every device runs the same number of tiles.
        arrays: Arrays with T rows.
        num_rows: Rows in use, the first of the T; the same on every device. Results behind their tiles are zero.
        tile: Rows of a tile, which divides T; None calls the function once, with all rows.
    """
    if tile is None:
        return function(*arrays)
    size = arrays[0].shape[0]
    assert size % tile == 0 and all(array.shape[0] == size for array in arrays)
    if size == tile:  # one tile would be sliced from itself, which a compiler takes out of the loop
        arrays = tuple(jnp.concatenate([array, jnp.zeros_like(array)]) for array in arrays)

    def part(array: Array, i: Int[Array, ""] | int) -> Array:
        return lax.dynamic_slice_in_dim(array, i * tile, tile)

    def round_(i: Int[Array, ""], filled: Rows) -> Rows:
        found = function(*(part(array, i) for array in arrays))
        return jax.tree.map(lambda all_, some: lax.dynamic_update_slice_in_dim(all_, some, i * tile, 0), filled, found)

    shapes = jax.eval_shape(function, *(part(array, 0) for array in arrays))
    empty = jax.tree.map(lambda shape: jnp.zeros((arrays[0].shape[0], *shape.shape[1:]), shape.dtype), shapes)
    filled = lax.fori_loop(0, -(-jnp.asarray(num_rows, jnp.int32) // tile), round_, empty)
    return jax.tree.map(lambda array: array[:size], filled)
