"""Truncation in Pallas-Triton: a few passes over the scores, whatever they are.

Rows are cut into chunks of one size, each a program's. The first passes count tokens and weights above sixteen edges
at once; between two neighbouring edges stands what a row looks for, and the next pass puts its edges between those.
The last pass gathers the few scores that are left, in order of their tokens, and one program a row finds the floor
among them by bisection over order-preserving integers. All sums have an order that depends on the vocabulary alone, so
that a row's floor depends neither on its neighbours nor on their number.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.truncation import from_order, min_p_floor, to_order

_CHUNK = 4096
_NUM_EDGES = 16
_ROUNDS = 2
_CANDIDATES = 2048  # that the last program of a row processes at once
_DROPS = np.float32(0.1) * np.float32(2.0) ** np.arange(_NUM_EDGES - 2, dtype=np.float32)
"""Distances of the first edges below the largest score."""


class _Rows(NamedTuple):
    """The state of each row's search: vectors, and in a kernel their references.

    Attributes:
        top_k: Tokens to keep; 0 where top-k keeps all that min-p keeps.
        top_p: Weight to keep, as a fraction of what those two keep; 1 keeps all.
        best: The largest score.
        mass: Weight of what min-p keeps.
        top: The floor is below it.
        bottom: The floor is at or above it.
        num_above: Tokens at or above ``top``.
        mass_above: Their weight.
        num_between: Tokens below ``top`` and at or above ``bottom``.
    """

    top_k: Any
    top_p: Any
    best: Any
    mass: Any
    top: Any
    bottom: Any
    num_above: Any
    mass_above: Any
    num_between: Any


@dataclasses.dataclass(frozen=True)
class TritonTruncation:
    """The kernels, compiled for NVIDIA GPUs or interpreted anywhere."""

    is_interpreted: bool = False

    def unsupported(self, platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
        """Return why it cannot run on such a device, or None."""
        del sizes
        if not self.is_interpreted and (platform not in ("gpu", "cuda") or "NVIDIA" not in device_kind):
            return "needs an NVIDIA GPU"
        return None if dtype == "float32" else f"scores must be float32, not {dtype}"

    def floor(
        self, scores: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"], min_p: Float[Array, " R"]
    ) -> Float[Array, " R"]:
        """Return the lowest score each row keeps; see ``Truncation.floor``."""
        best = scores.max(1)
        is_sound = jnp.isfinite(best)  # other rows are not truncated
        top_k, top_p = jnp.where(is_sound, top_k, 0), jnp.where(is_sound, top_p, 1.0)
        lowest = min_p_floor(best, min_p)
        rows, starts = self._narrowed(scores, best, lowest, top_k, top_p)
        is_cut = (rows.top_k > 0) | (rows.top_p < 1)
        number = jax.ShapeDtypeStruct(best.shape, jnp.float32)
        between = (is_cut.astype(jnp.int32), rows.top, rows.bottom, starts)
        candidates = self._call(_gather_kernel, starts.shape, scores, between, scores)
        found = self._call(_find_kernel, best.shape, candidates, rows, number)
        return jnp.where(is_cut, jnp.maximum(found, lowest), lowest)

    def _narrowed(
        self,
        scores: Float[Array, "R V"],
        best: Float[Array, " R"],
        lowest: Float[Array, " R"],
        top_k: Int[Array, " R"],
        top_p: Float[Array, " R"],
    ) -> tuple[_Rows, Int[Array, "R chunks"]]:
        """Narrow top and bottom of rows, and count the scores between them before each of a row's chunks."""
        is_cut = ((top_k > 0) | (top_p < 1)).astype(jnp.int32)
        shape = len(best), pl.cdiv(scores.shape[1], _CHUNK), _NUM_EDGES
        sums = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
        edges = _edges(jnp.full_like(best, jnp.inf), best, lowest, jnp.broadcast_to(_DROPS, (len(best), len(_DROPS))))
        mass, upper, lower = best, top_k, top_k  # placeholders of the right shapes: the first iteration replaces them
        chunk_counts, counts, masses = jnp.zeros(shape, jnp.int32), edges, edges
        for i in range(_ROUNDS):
            if i > 0:
                edges = _edges(_at(edges, upper), best, _at(edges, lower), None)
            chunk_counts, chunk_masses = self._call(_sum_kernel, shape[:2], scores, (is_cut, best, edges), sums)
            counts, masses = chunk_counts.sum(1), _in_order(chunk_masses)
            if i == 0:
                mass = masses[:, -1]
                top_k, top_p = jnp.where(top_k < counts[:, -1], top_k, 0), jnp.where(mass > 0, top_p, 1.0)
            upper, lower = _bracket(counts, masses, top_k, top_p, mass)
        between = _at(chunk_counts, lower) - _at(chunk_counts, upper)
        ends = jnp.cumsum(between, axis=1)
        above = _at(counts, upper), _at(masses, upper), ends[:, -1]
        return _Rows(top_k, top_p, best, mass, _at(edges, upper), _at(edges, lower), *above), ends - between

    def _call(self, kernel: Any, grid: tuple[int, ...], array: Float[Array, "R V"], numbers: Any, out: Any) -> Any:
        """Run a kernel, a program for each row or for each chunk of a row."""
        return pl.pallas_call(
            kernel,
            out_shape=jax.tree.map(lambda struct: jax.ShapeDtypeStruct(struct.shape, struct.dtype), out),
            grid=grid,
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=self.is_interpreted,
            name=f"truncation{kernel.__name__.removesuffix('_kernel')}",
        )(array, numbers)


def _edges(
    top: Float[Array, " R"],
    best: Float[Array, " R"],
    bottom: Float[Array, " R"],
    drops: Float[Array, "R _"] | None,
) -> Float[Array, "R edges"]:
    """Return edges from the top of each row to its bottom, descending: drops below the best, or equal ones."""
    start = jnp.minimum(top, best)[:, None]
    if drops is None:
        last = _NUM_EDGES - 1
        drops = (start / last - bottom[:, None] / last) * jnp.arange(1.0, last)
    return jnp.concatenate([top[:, None], jnp.maximum(start - drops, bottom[:, None]), bottom[:, None]], axis=1)


def _bracket(
    counts: Int[Array, "R edges"],
    masses: Float[Array, "R edges"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    mass: Float[Array, " R"],
) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Return two edges: every score still to be searched is below the first and not below the second.

    Where top-p cuts depends on the weight of what top-k keeps, which is only known to lie between that of two edges.
    """
    is_k, is_p = top_k > 0, top_p < 1
    upper_k = _num_short(counts, top_k)
    most, least = (jnp.where(is_k, _at(masses, edge), mass) for edge in (upper_k + 1, upper_k))
    upper_p, lower_p = _num_short(masses, top_p * least), _num_short(masses, top_p * most) + 1
    return jnp.where(is_p, upper_p, upper_k), jnp.where(is_k, upper_k + 1, lower_p)


def _num_short(sums: Array, wanted: Array) -> Int[Array, " R"]:
    """Return the last edge of each row whose sum falls short of what is wanted; never the last of all."""
    return jnp.clip((sums < wanted[:, None]).sum(1) - 1, 0, _NUM_EDGES - 2)


def _at(array: Array, edge: Int[Array, " R"]) -> Array:
    """Select each row's value at its edge."""
    return jnp.take_along_axis(array, edge.reshape(-1, *[1] * (array.ndim - 1)), axis=-1)[..., 0]


def _in_order(masses: Float[Array, "R chunks edges"]) -> Float[Array, "R edges"]:
    """Sum over chunks, one after the other: a compiler chooses the order of a reduction by the number of rows."""
    return functools.reduce(jnp.add, (masses[:, i] for i in range(masses.shape[1])))


def _chunk(scores_ref: Any, row: Int[Array, ""], chunk: Int[Array, ""]) -> Float[Array, " C"]:
    """Return a chunk's scores, -inf after the end of the row."""
    token = chunk * _CHUNK + jnp.arange(_CHUNK)
    place = jnp.broadcast_to(row, token.shape), token
    return plt.load(scores_ref.at[place], mask=token < scores_ref.shape[1], other=-jnp.inf)


def _sum_kernel(
    scores_ref: Any,  # [R, V]
    numbers: Any,  # is_cut [R], best [R], edges [R, E]
    counts_ref: Any,  # [R, chunks, E]
    masses_ref: Any,  # [R, chunks, E]
) -> None:
    """Count a chunk's tokens at or above each edge, and their weight; zero for rows that are not truncated."""
    is_cut_ref, best_ref, edges_ref = numbers
    row, chunk = pl.program_id(0), pl.program_id(1)

    @pl.when(is_cut_ref[row] > 0)
    def _() -> None:
        scores = _chunk(scores_ref, row, chunk)
        weights = jnp.exp(scores - best_ref[row])

        def sum_above(edge: Int[Array, ""], _: None) -> None:
            is_in = scores >= edges_ref[row, edge]
            counts_ref[row, chunk, edge] = jnp.sum(is_in.astype(jnp.int32))
            masses_ref[row, chunk, edge] = jnp.sum(jnp.where(is_in, weights, 0.0))

        lax.fori_loop(0, _NUM_EDGES, sum_above, None)


def _gather_kernel(
    scores_ref: Any,  # [R, V]
    numbers: Any,  # is_cut [R], top [R], bottom [R], starts [R, chunks]
    candidates_ref: Any,  # [R, V]
) -> None:
    """Store the scores of a chunk that are between a row's top and bottom after those of the chunks before it."""
    is_cut_ref, top_ref, bottom_ref, starts_ref = numbers
    row, chunk = pl.program_id(0), pl.program_id(1)

    @pl.when(is_cut_ref[row] > 0)
    def _() -> None:
        scores = _chunk(scores_ref, row, chunk)
        is_between = (scores < top_ref[row]) & (scores >= bottom_ref[row])
        place = starts_ref[row, chunk] + jnp.cumsum(is_between.astype(jnp.int32)) - 1
        place = jnp.broadcast_to(row, place.shape), jnp.where(is_between, place, candidates_ref.shape[1])
        plt.store(candidates_ref.at[place], scores, mask=is_between)


def _find_kernel(
    candidates_ref: Any,  # [R, V]
    rows: Any,  # a _Rows of [R]
    floor_ref: Any,  # [R]
) -> None:
    """Find the threshold of a truncated row among the scores between its top and its bottom."""
    row = pl.program_id(0)
    top_k, top_p, best, mass, top, bottom, num_above, mass_above, num_between = (ref[row] for ref in rows)

    def sums(floor: Float[Array, ""]) -> tuple[Int[Array, ""], Float[Array, ""]]:
        """Return the number of tokens at or above a threshold, and their weight."""

        def round_(i: Int[Array, ""], found: tuple[Array, Array]) -> tuple[Array, Array]:
            token = i * _CANDIDATES + jnp.arange(_CANDIDATES)
            place = jnp.broadcast_to(row, token.shape), token
            scores = plt.load(candidates_ref.at[place], mask=token < num_between, other=-jnp.inf)
            is_in = (scores >= floor) & (token < num_between)
            weights = jnp.where(is_in, jnp.exp(scores - best), 0.0)
            return found[0] + jnp.sum(is_in.astype(jnp.int32)), found[1] + jnp.sum(weights)

        return lax.fori_loop(0, pl.cdiv(num_between, _CANDIDATES), round_, (num_above, mass_above))

    def largest(is_asked: Bool[Array, ""], reaches: Callable[[Array, Array], Array]) -> Float[Array, ""]:
        """Return the largest floor that reaches, as all below it do; the bottom where it is not asked for."""

        def halved(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            holds = reaches(*sums(from_order(middle)))
            return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

        bounds = to_order(bottom), to_order(jnp.where(is_asked, top, bottom))
        return from_order(lax.while_loop(lambda bounds: bounds[0] + 1 < bounds[1], halved, bounds)[0])

    @pl.when((top_k > 0) | (top_p < 1))
    def _() -> None:
        kth = largest(top_k > 0, lambda count, _: count >= top_k)
        kept = jnp.where(top_k > 0, sums(kth)[1], mass)
        wanted = top_p * kept
        last = largest(wanted < kept, lambda _, weight: weight >= wanted)
        floor_ref[row] = jnp.maximum(kth, last)


TRITON = TritonTruncation()
INTERPRETED = TritonTruncation(is_interpreted=True)
