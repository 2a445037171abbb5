"""Sums over the tokens of each row of a step.

In deterministic mode tokens are added one after the other, so that a sum has the same bits however its tokens are split
into chunks. Otherwise it is a matmul with ones: a loop would not fit into the CUDA graph of a step.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.rows import map_rows

States = Callable[[Float[Array, "T D"]], Float[Array, "T D"]]


def add_tokens(
    sums: Float[Array, "R D"],
    hidden: Float[Array, "T D"],
    first: Int[Array, " R"],
    end: Int[Array, " R"],
    states: States,
    row_tile: int | None = None,
) -> Float[Array, "R D"]:
    """Add ``states`` of each row's tokens to its sum, in float32; almost free if no row has tokens to add.

    NaN in one row's tokens affects that row's sum only.

    Args:
        sums: Sums so far.
        hidden: Hidden state of each of the step's tokens.
        first: Index of the first token to add for each row.
        end: Index after the last token to add; nothing is added unless it is larger than ``first``.
        states: Computes what is added from ``hidden``; must not communicate.
        row_tile: See ``map_rows``; None computes all at once.
    """
    if row_tile is not None:
        return _added_in_order(sums, hidden, first, end, states, row_tile)
    return lax.cond((first < end).any(), lambda: _added(sums, states(hidden), first, end), lambda: sums)


def _added(
    sums: Float[Array, "R D"], states: Float[Array, "T D"], first: Int[Array, " R"], end: Int[Array, " R"]
) -> Float[Array, "R D"]:
    tokens = jnp.arange(len(states))
    takes = (first[:, None] <= tokens) & (tokens < end[:, None])
    is_number = jnp.isfinite(states).all(1)
    numbers = jnp.where(is_number[:, None], states, 0).astype(jnp.float32)
    added = jnp.matmul(takes.astype(jnp.float32), numbers, precision=lax.Precision.HIGHEST)
    return sums + jnp.where((takes & ~is_number).any(1)[:, None], jnp.nan, added)


def _added_in_order(
    sums: Float[Array, "R D"],
    hidden: Float[Array, "T D"],
    first: Int[Array, " R"],
    end: Int[Array, " R"],
    states: States,
    row_tile: int,
) -> Float[Array, "R D"]:
    """Compute all states before adding: fusing the multiply into the addition could skip a rounding."""
    start = jnp.min(jnp.where(first < end, first, len(hidden)))
    stop = jnp.max(jnp.where(first < end, end, 0))
    computed = map_rows(states, (hidden,), stop, row_tile)

    def round_(i: Int[Array, ""], sums: Float[Array, "R D"]) -> Float[Array, "R D"]:
        tile = lax.dynamic_slice_in_dim(computed, i * row_tile, row_tile).astype(jnp.float32)
        for j in range(row_tile):
            token = i * row_tile + j
            sums = jnp.where(((first <= token) & (token < end))[:, None], sums + tile[j], sums)
        return sums

    return lax.fori_loop(start // row_tile, -(-stop // row_tile), round_, sums)
