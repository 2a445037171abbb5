"""Shared by Pallas-Triton attention kernels: tiles of paged keys and values, and a softmax over them.

Every array inside such a kernel has a power of two of elements; heads of other widths are padded by masked loads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_scores import LOG2_E, MASKED

_LEAST_WIDTH = 16  # of an operand of a matmul


class Scoring(NamedTuple):
    """Scale, window and soft cap of attention scores, in units of log 2."""

    scale: float
    window: int | None
    soft_cap: float | None

    def __call__(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        if self.soft_cap is None:
            return products * (self.scale * LOG2_E)
        return jnp.tanh(products * (self.scale / self.soft_cap)) * (self.soft_cap * LOG2_E)


class Softmax(NamedTuple):
    """A softmax in progress (online softmax, arXiv:1805.02867): running maximum, sum and weighted values."""

    maximum: Float[Array, " rows"]
    total: Float[Array, " rows"]
    values: Float[Array, "rows H"]

    @classmethod
    def empty(cls, num_rows: int, width: int) -> "Softmax":
        """Return the softmax of no tokens."""
        lines = jnp.full((num_rows,), MASKED, jnp.float32), jnp.zeros((num_rows,), jnp.float32)
        return cls(*lines, jnp.zeros((num_rows, width), jnp.float32))

    def seeing(self, scores: Float[Array, "rows S"], values: Float[Array, "S H"]) -> "Softmax":
        """Return the softmax with one more tile."""
        maximum = jnp.maximum(self.maximum, jnp.max(scores, axis=1))
        kept = jnp.exp2(self.maximum - maximum)
        weights = jnp.exp2(scores - maximum[:, None])
        added = dot(weights.astype(values.dtype), values, 0)
        total = self.total * kept + jnp.sum(weights, axis=1)
        return Softmax(maximum, total, self.values * kept[:, None] + added)

    def mean(self, sinks: Float[Array, " rows"] | None = None) -> Float[Array, "rows H"]:
        """Return the weighted mean of the values; zero if nothing was seen. ``sinks`` are logits without values."""
        total = self.total if sinks is None else self.total + jnp.exp2(sinks * LOG2_E - self.maximum)
        return self.values / jnp.where(total == 0, 1, total)[:, None]


class Pages(NamedTuple):
    """How a row's context is read: ``tile`` tokens at a time, from one page or several.

    Attributes:
        page_size: Tokens per page.
        num_columns: Pages that a row of the page table names.
        head_dim: Width of a head.
        tile: Tokens that are read at once.
    """

    page_size: int
    num_columns: int
    head_dim: int
    tile: int

    @property
    def width(self) -> int:
        """Return the head's width, padded."""
        return padded(self.head_dim)

    def walk(
        self,
        refs: tuple[Any, Any, Any],
        row: Int[Array, ""],
        head: Int[Array, ""],
        tiles: tuple[Int[Array, ""], Int[Array, ""]],
        begun: Softmax,
        score: Callable[[Int[Array, ""], Float[Array, "S H"]], Float[Array, "rows S"]],
    ) -> Softmax:
        """Return a softmax with some more tiles of a row's context.

        Args:
            refs: The page table, the pool of keys and that of values.
            row: Row of the page table.
            head: Key/value head.
            tiles: The first tile, and the one after the last.
            begun: The softmax so far.
            score: Scores of a tile, from its number and its keys.
        """
        table_ref, key_ref, value_ref = refs

        def see(i: Int[Array, ""], state: tuple[Softmax, Int[Array, "..."]]) -> tuple[Softmax, Int[Array, "..."]]:
            softmax, ids = state
            following = self._ids(table_ref, row, i + 1)  # one iteration ahead: the load of a page needs its id
            keys, values = self._load(key_ref, ids, head, i), self._load(value_ref, ids, head, i)
            return softmax.seeing(score(i, keys), values), following

        start, stop = tiles
        return lax.fori_loop(start, stop, see, (begun, self._ids(table_ref, row, start)))[0]

    def _ids(self, table_ref: Any, row: Int[Array, ""], i: Int[Array, ""]) -> Int[Array, "..."]:
        """Return the page of each of tile i's tokens, or the one page of all; after the table its last column."""
        first = i * self.tile
        position = first if self.page_size % self.tile == 0 else first + jnp.arange(self.tile)
        return table_ref[row, jnp.minimum(lax.div(position, self.page_size), self.num_columns - 1)]

    def _load(self, pool_ref: Any, ids: Int[Array, "..."], head: Int[Array, ""], i: Int[Array, ""]) -> Array:
        """Load keys or values of tile i: [tile, width]."""
        offsets = lax.rem(i * self.tile, self.page_size) + jnp.arange(self.tile)
        if self.page_size % self.tile:
            offsets = lax.rem(i * self.tile + jnp.arange(self.tile), self.page_size)
        pages = jnp.broadcast_to(ids, (self.tile,))
        if self.width == self.head_dim:
            return pool_ref[pages, head, offsets]
        columns = jnp.arange(self.width)[None, :]
        place = pool_ref.at[pages[:, None], head, offsets[:, None], columns]
        return pltriton.load(place, mask=jnp.broadcast_to(columns < self.head_dim, (self.tile, self.width)), other=0)


def require_indexable(*pools: Any) -> None:
    """Reject pools whose elements Pallas-Triton would address with 32-bit integers that overflow.

    JAX's lowering counts offsets in elements and makes them 64 bits wide only for arrays of more than 2**32 bytes:
    between 2**31 and 2**32 elements of one byte they would wrap around.

    Args:
        pools: Arrays or their shapes.

    Raises:
        NotImplementedError: A pool is of that size.
    """
    for pool in pools:
        if 1 << 31 < pool.size and pool.size * pool.dtype.itemsize <= 1 << 32:
            raise NotImplementedError(
                f"pools of {pool.shape} {pool.dtype} have {pool.size} elements of one byte, and Pallas-Triton "
                f"addresses at most {1 << 31} of them; use fewer pages, or another attention backend"
            )


def padded(width: int) -> int:
    """Return the least power of two that holds ``width`` and is wide enough for a matmul."""
    return max(_LEAST_WIDTH, pl.next_power_of_2(width))


def dot(left: Float[Array, "M C"], right: Float[Array, "..."], contracted: int) -> Float[Array, "M N"]:
    """Multiply over the right side's axis ``contracted``, in float32; float32 operands are not rounded."""
    return lax.dot_general(
        left,
        right,
        (((1,), (contracted,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def load_heads(
    ref: Any, index: tuple[Int[Array, "..."], ...], is_used: Bool[Array, " rows"], head_dim: int
) -> Float[Array, "rows H"]:
    """Load rows of ``ref`` at ``index``, with zeros for unused rows and beyond the head's width."""
    columns = jnp.arange(padded(head_dim))[None, :]
    mask = is_used[:, None] & (columns < head_dim)
    return pltriton.load(ref.at[*index, columns], mask=mask, other=0)


def store_heads(
    ref: Any,
    index: tuple[Int[Array, "..."], ...],
    value: Float[Array, "rows H"],
    is_used: Bool[Array, " rows"],
    head_dim: int,
) -> None:
    """Store the used rows of ``value`` at ``index`` of ``ref``."""
    columns = jnp.arange(padded(head_dim))[None, :]
    mask = is_used[:, None] & (columns < head_dim)
    pltriton.store(ref.at[*index, columns], value.astype(ref.dtype), mask=mask)


def ceil_div(dividend: jax.Array, divisor: jax.Array | int) -> jax.Array:
    """Divide non-negative integers, rounding up."""
    return lax.div(dividend + divisor - 1, divisor)
