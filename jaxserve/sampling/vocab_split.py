"""Operations on rows of logits of which each device has the columns of its part of the vocabulary.

Only what is small next to the rows is exchanged. Sums over devices are added in the order of the devices, which an
all-reduce does not promise: so a row's result does not depend on where in the batch it is.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxserve.sampling.verification import NOWHERE
from pallas_kernels.argmax import ArgmaxKernel
from sharding.collectives import all_gather, all_max, all_reduce, axis_index, axis_size


@dataclasses.dataclass(frozen=True)
class VocabSplit:
    """How rows of logits are split over devices; by default each device has whole rows.

    A device's part has as many columns as every other's: the last ones may be padding, with logits of -inf.

    Attributes:
        axis: Mesh axis that the columns are split over.
        size: Tokens of the vocabulary; used only with an axis.
    """

    axis: str | None = None
    size: int = 0

    def width(self, part_width: int) -> int:
        """Return the number of columns of whole rows, padding included."""
        return axis_size(self.axis) * part_width

    def whole(self, scores: Float[Array, "R part"]) -> Float[Array, "R V"]:
        """Return whole rows, without padding."""
        return scores if self.axis is None else all_gather(scores, self.axis, 1)[:, : self.size]

    def part(self, rows: Shaped[Array, "R all"], width: int, fill: float = 0) -> Shaped[Array, "R part"]:
        """Return this device's ``width`` columns of whole rows; those beyond their end are ``fill``."""
        if self.axis is None:
            return rows
        padded = jnp.pad(rows, ((0, 0), (0, self.width(width) - rows.shape[1])), constant_values=fill)
        return lax.dynamic_slice_in_dim(padded, axis_index(self.axis) * width, width, 1)

    def columns(self, tokens: Int[Array, "..."], width: int) -> Int[Array, "..."]:
        """Return the columns of tokens in this device's part; ``NOWHERE`` for those of other parts."""
        if self.axis is None:
            return tokens
        columns = tokens - axis_index(self.axis) * width
        return jnp.where((columns >= 0) & (columns < width), columns, NOWHERE)

    def take(self, parts: Float[Array, "R n *rest"], indices: Int[Array, "R k"]) -> Float[Array, "R k *rest"]:
        """Return elements of each row by their indices in the whole row; 0 for an index that no device has."""
        columns = self.columns(indices, parts.shape[1]).reshape(*indices.shape, *[1] * (parts.ndim - 2))
        if self.axis is None:
            return jnp.take_along_axis(parts, columns, axis=1)
        is_here = columns != NOWHERE
        found = jnp.take_along_axis(parts, jnp.where(is_here, columns, 0), axis=1)
        return all_reduce(jnp.where(is_here, found, 0), self.axis)

    def joined(self, parts: Shaped[Array, "R n"]) -> Shaped[Array, "R all"]:
        """Return what all devices have of each row, one after the other."""
        return all_gather(parts, self.axis, 1)

    def largest(self, found: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the largest of what the devices found."""
        return all_max(found, self.axis)

    def total(self, found: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Return the sum of what the devices found."""
        return found if self.axis is None else all_gather(found[None], self.axis, 0).sum(0, dtype=found.dtype)

    def candidates(self, top: Float[Array, "R part"], count: int) -> Float[Array, "R top"]:
        """Return the largest ``count`` scores of whole rows, in order, from as many of each part."""
        return top if self.axis is None else lax.top_k(self.joined(top), count)[0]

    def top(
        self, top: Float[Array, "R found"], columns: Int[Array, "R found"], width: int, count: int
    ) -> tuple[Float[Array, "R count"], Int[Array, "R count"]]:
        """Return the largest ``count`` scores of whole rows and their tokens, as ``lax.top_k``.

        Args:
            top: The largest of this device's scores, in order.
            columns: Their columns.
            width: Columns of the device's part.
            count: Number of scores, at most ``size``.
        """
        if self.axis is None or count == 0:
            return top, columns
        pairs = jnp.stack([lax.bitcast_convert_type(top, jnp.int32), columns + axis_index(self.axis) * width])
        pairs = all_gather(pairs, self.axis, 2)
        best, places = lax.top_k(lax.bitcast_convert_type(pairs[0], jnp.float32), count)
        return best, jnp.take_along_axis(pairs[1], places, axis=1)

    def argmax(
        self, kernel: ArgmaxKernel, scores: Float[Array, "R part"], num_rows: Int[Array, ""] | None = None
    ) -> Int[Array, " R"]:
        """Return each row's argmax, as ``ArgmaxKernel.argmax`` of whole rows: -1 if a device has NaN, or all -inf."""
        column = kernel.argmax(scores, num_rows)
        if self.axis is None:
            return column
        best = jnp.take_along_axis(scores, jnp.maximum(column, 0)[:, None], axis=1)[:, 0]
        best = jnp.where(column < 0, jnp.where(jnp.isnan(scores).any(1), jnp.nan, -jnp.inf), best)
        pairs = jnp.stack([lax.bitcast_convert_type(best, jnp.int32), column + axis_index(self.axis) * scores.shape[1]])
        pairs = all_gather(pairs[:, :, None], self.axis, 2)
        found = lax.bitcast_convert_type(pairs[0], jnp.float32)
        device = jnp.argmax(found, axis=1)
        token = jnp.take_along_axis(pairs[1], device[:, None], axis=1)[:, 0]
        return jnp.where(jnp.isnan(found).any(1) | (found == -jnp.inf).all(1), -1, token)


WHOLE = VocabSplit()
