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
        snapshot_tokens: Tokens of the step after which a row's tail and state are also written to another page, in any
            order, each once; a number that is no token of a row stands for none.
        snapshot_pages: Those pages, which no row has; of the rest any number.
    """

    starts: Int[Array, " R"]
    lens: Int[Array, " R"]
    are_new: Bool[Array, " R"]
    pages: Int[Array, " R"]
    snapshot_tokens: Int[Array, " N"]
    snapshot_pages: Int[Array, " N"]

    @property
    def num_tokens(self) -> Int[Array, ""]:
        """Tokens of all rows, the first of the step."""
        return self.lens.sum(dtype=jnp.int32)

    def pages_after(self, num_tokens: int) -> Int[Array, " T"]:
        """Return the page that is also written after each of ``num_tokens`` tokens; -1 for none."""
        none = jnp.full(num_tokens, -1, jnp.int32)
        return none.at[self.snapshot_tokens].set(self.snapshot_pages.astype(jnp.int32), mode="drop")


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
    """A row of a case: its tokens, whether it starts from zeros, and the lengths of its snapshots, ascending."""

    length: int
    is_new: bool = False
    snapshots: tuple[int, ...] = ()


SPARE_PAGES = 2
"""Pages of a case that no row has."""
_NO_TOKEN = 1 << 20  # of any case

RAGGED = (
    Row(5),
    Row(1, is_new=True),
    Row(17, snapshots=(9,)),
    Row(2, snapshots=(2,)),
    Row(1, snapshots=(1,)),
    Row(40, is_new=True, snapshots=(1, 16, 17, 32, 39)),
)
"""Rows of several lengths with snapshots inside, several in a row, at the end and after the only token."""


def num_tokens_of(rows: Sequence[Row]) -> int:
    """Return the tokens of a case's rows."""
    return sum(row.length for row in rows)


def num_pages_of(rows: Sequence[Row], spare_rows: int) -> int:
    """Return the state pages of a case: one per row, padding rows included, one per snapshot, and spare ones."""
    return len(rows) + spare_rows + sum(len(row.snapshots) for row in rows) + SPARE_PAGES


def make_rows(rows: Sequence[Row], spare_rows: int, key: jax.Array) -> StateRows:
    """Give rows and their snapshots shuffled pages; ``spare_rows`` without tokens follow."""
    count = len(rows) + spare_rows
    padded = [*rows, *[Row(0)] * spare_rows]
    lens = np.array([row.length for row in padded], np.int32)
    pages = jax.random.permutation(key, num_pages_of(rows, spare_rows)).astype(jnp.int32)
    starts = np.cumsum(lens) - lens
    tokens = [start + length - 1 for start, row in zip(starts, padded, strict=True) for length in row.snapshots]
    return StateRows(
        starts=jnp.asarray(starts, jnp.int32),
        lens=jnp.asarray(lens),
        are_new=jnp.asarray([row.is_new for row in padded]),
        pages=pages[:count],
        snapshot_tokens=jnp.asarray([*tokens, _NO_TOKEN, _NO_TOKEN], jnp.int32),
        snapshot_pages=jnp.concatenate([pages[count : count + len(tokens)], pages[:2]]),
    )


class Stretch(NamedTuple):
    """Consecutive tokens of a row that are computed together by a reference, and the pages to write after them."""

    first: int
    last: int
    is_new: bool
    source: Int[Array, ""]
    targets: list[Int[Array, ""]]


def stretches(rows: Sequence[Row], batch: StateRows) -> Iterator[Stretch]:
    """Cut each row of a case at its snapshots, so that a reference never sees one inside."""
    first = num_snapshots = 0
    for index, row in enumerate(rows):
        page, is_new = batch.pages[index], row.is_new
        cuts = [*row.snapshots, *([] if row.length in row.snapshots else [row.length])]
        for cut, before in zip(cuts, [0, *cuts], strict=False):
            targets = [page]
            if cut in row.snapshots:
                targets.append(batch.snapshot_pages[num_snapshots])
                num_snapshots += 1
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
