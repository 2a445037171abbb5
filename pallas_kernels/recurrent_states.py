"""States of recurrent layers in pages: what the operations ``delta_net``, ``mamba2`` and ``short_convolution`` share.

A *state page* holds what a layer keeps of one sequence: ``tail [taps - 1, channels]``, the latest inputs of its causal
convolution, oldest first, and, where the layer has one, ``state [heads, keys, values]``, a float32 matrix per head. A
layer's arrays are ``[P, taps - 1, channels]`` and ``[P, heads, ...]``, and a page is an index into all of them. What
follows the heads is private to an implementation (``to_layout``, ``from_layout``), so that arrays of any layout can be
cut by heads, and pages be copied, without knowing it; tails are cut as the channels are.

Rows own consecutive tokens of a step, row after row from token 0 on; tokens after those are padding. A row with no
tokens is padding too and leaves its page alone. Two rows with tokens never have the same page. States are updated in
place where the caller donates them. Everything computes in float32, and sums over a context run in the order of its
tokens, so that they do not depend on how the context is cut into steps (but XLA's programs of two shapes may round
differently).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.page_writes import copy_pool_pages


class StateRows(NamedTuple):
    """The rows of a step.

    Attributes:
        starts: First token of each row: the sum of the lengths before it.
        lens: Tokens of each row; 0 for padding.
        are_new: Whether a row's state and tail begin as zeros, whatever its page holds: it starts at position 0.
        pages: State page of each row, updated in place.
        snapshot_lens: After this many of a row's tokens of this step its tail and state are also written to
            ``snapshot_pages``; 0: never.
        snapshot_pages: Pages that no row has. Those of rows without a snapshot are ignored.
    """

    starts: Int[Array, " R"]
    lens: Int[Array, " R"]
    are_new: Bool[Array, " R"]
    pages: Int[Array, " R"]
    snapshot_lens: Int[Array, " R"]
    snapshot_pages: Int[Array, " R"]

    @property
    def num_tokens(self) -> Int[Array, ""]:
        """Tokens of all rows, the first of the step."""
        return self.lens.sum(dtype=jnp.int32)


class States(NamedTuple):
    """Arrays of one layer, with its pages first; ``state`` in the layout of the implementation, float32."""

    tail: Float[Array, "P history channels"]
    state: Float[Array, "P heads ..."]


class Convolution(NamedTuple):
    """A causal convolution of each channel; the last tap multiplies the newest input."""

    weight: Float[Array, "taps channels"]
    bias: Float[Array, " channels"] | None = None


def copy_states(
    arrays: tuple[Float[Array, "P ..."], ...], sources: Int[Array, " C"], targets: Int[Array, " C"]
) -> tuple[Float[Array, "P ..."], ...]:
    """Return arrays of state pages, of any layout, with pages copied; see ``PagedAttention.copy_pages``.

    All sources are read before a target is written; nothing is written to a target that is no page.
    """
    return tuple(copy_pool_pages(array, sources, targets) for array in arrays)


# ---------------------------------------------------------------- cases


class Row(NamedTuple):
    """A row of a case: its tokens, whether it starts from zeros, and the length of its snapshot (0: none)."""

    length: int
    is_new: bool = False
    snapshot: int = 0


SPARE_PAGES = 2
"""Pages of a case that no row has."""

RAGGED = (
    Row(5),
    Row(1, is_new=True),
    Row(17, snapshot=9),
    Row(2, snapshot=2),
    Row(1, snapshot=1),
    Row(40, is_new=True),
)
"""Rows of several lengths with snapshots inside, at the end and after the only token."""


def num_tokens_of(rows: Sequence[Row]) -> int:
    """Return the tokens of a case's rows."""
    return sum(row.length for row in rows)


def num_pages_of(rows: Sequence[Row], spare_rows: int) -> int:
    """Return the state pages of a case: one per row, padding rows included, one per snapshot, and spare ones."""
    return len(rows) + spare_rows + sum(row.snapshot > 0 for row in rows) + SPARE_PAGES


def make_rows(rows: Sequence[Row], spare_rows: int, key: jax.Array) -> StateRows:
    """Give rows and their snapshots shuffled pages; ``spare_rows`` without tokens follow."""
    count = len(rows) + spare_rows
    padded = [*rows, *[Row(0)] * spare_rows]
    lens = np.array([row.length for row in padded], np.int32)
    pages = jax.random.permutation(key, num_pages_of(rows, spare_rows)).astype(jnp.int32)
    snapshots = np.cumsum([row.snapshot > 0 for row in padded]) - 1
    return StateRows(
        starts=jnp.asarray(np.cumsum(lens) - lens, jnp.int32),
        lens=jnp.asarray(lens),
        are_new=jnp.asarray([row.is_new for row in padded]),
        pages=pages[:count],
        snapshot_lens=jnp.asarray([row.snapshot for row in padded], jnp.int32),
        snapshot_pages=pages[count + np.maximum(snapshots, 0)] if any(row.snapshot for row in rows) else pages[:count],
    )


class Stretch(NamedTuple):
    """Consecutive tokens of a row that are computed together by a reference, and the pages to write after them."""

    first: int
    last: int
    is_new: bool
    source: Int[Array, ""]
    targets: list[Int[Array, ""]]


def stretches(rows: Sequence[Row], batch: StateRows) -> Iterator[Stretch]:
    """Cut each row of a case at its snapshot, so that a reference never sees one inside."""
    first = 0
    for index, row in enumerate(rows):
        page, is_new = batch.pages[index], row.is_new
        cuts = [row.snapshot, row.length] if 0 < row.snapshot < row.length else [row.length]
        for cut, before in zip(cuts, [0, *cuts], strict=False):
            targets = [page, batch.snapshot_pages[index]] if cut == row.snapshot else [page]
            yield Stretch(first + before, first + cut, is_new and before == 0, page, targets)
        first += row.length


def reference_convolution(
    x: Float[Array, "n channels"], tail: Float[Array, "history channels"], convolution: Convolution
) -> tuple[Float[Array, "n channels"], Float[Array, "history channels"]]:
    """Convolve some tokens of a sequence, by definition, in float32; return the next tail too."""
    inputs = jnp.concatenate([tail, x]).astype(jnp.float32)
    weight = convolution.weight.astype(jnp.float32)
    windows = jnp.stack([inputs[i : i + x.shape[0]] for i in range(weight.shape[0])])
    y = jnp.einsum("inc,ic->nc", windows, weight, precision=lax.Precision.HIGHEST)
    y = y if convolution.bias is None else y + convolution.bias.astype(jnp.float32)
    return y, jnp.concatenate([tail, x])[x.shape[0] :]


def write_stretch(pages: Float[Array, "P ..."], stretch: Stretch, value: Float[Array, "..."]) -> Float[Array, "P ..."]:
    """Return an array with the pages of a stretch written."""
    for target in stretch.targets:
        pages = pages.at[target].set(value)
    return pages
