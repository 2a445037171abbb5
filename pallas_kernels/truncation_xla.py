"""Truncation in plain XLA: the path for CPUs.

Top-k and top-p are the same search with different weights: where the weights of the tokens, in order of score, reach
a target. Thresholds come from the largest candidates; if these do not suffice, from bisection over
the order-preserving integers of the scores, exact in 32 passes.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.truncation import Parts, WholeRows, from_order, min_p_floor, to_order

_NUM_CANDIDATES = 1024


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return None: it runs everywhere."""
    del platform, device_kind, sizes
    return None if dtype == "float32" else f"scores must be float32, not {dtype}"


def floor(
    scores: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"], min_p: Float[Array, " R"]
) -> Float[Array, " R"]:
    """Return the lowest score each row keeps; see ``Truncation.floor``."""
    return floor_of_parts(scores, scores.max(1), top_k, top_p, min_p, WholeRows())


def floor_of_parts(
    scores: Float[Array, "R V"],
    best: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    min_p: Float[Array, " R"],
    parts: Parts,
) -> Float[Array, " R"]:
    """Return the lowest score each row keeps, where each device has a part of its scores.

    Args:
        scores: The device's scores.
        best: Largest score of each whole row.
        top_k: See ``Truncation.floor``.
        top_p: See ``Truncation.floor``.
        min_p: See ``Truncation.floor``.
        parts: Combines what the devices find.
    """
    weights = jnp.exp(scores - best[:, None])
    lowest = min_p_floor(best, min_p)
    first, last = jnp.where((top_k > 0).any(), 0, 1), jnp.where((top_p < 1).any(), 2, 1)

    def cut() -> Float[Array, " R"]:
        width = scores.shape[1]
        top = lax.top_k(scores, min(_NUM_CANDIDATES, width))[0]
        candidates = parts.candidates(top, min(_NUM_CANDIDATES, parts.width(width)))
        candidate_weights = jnp.exp(candidates - best[:, None])

        def phase(i: Int[Array, ""], floor: Float[Array, " R"]) -> Float[Array, " R"]:
            is_top_p = i == 1
            counted = jnp.where(is_top_p, weights, 1.0), jnp.where(is_top_p, candidate_weights, 1.0)
            share = jnp.where(is_top_p, top_p, jnp.where(top_k > 0, top_k, jnp.inf))
            return _raised(floor, (scores, counted[0]), (candidates, counted[1]), share, is_top_p, parts)

        return lax.fori_loop(first, last, phase, lowest)

    return lax.cond(first < last, cut, lambda: lowest)


def _raised(
    floor: Float[Array, " R"],
    tokens: tuple[Float[Array, "R V"], Float[Array, "R V"]],
    candidates: tuple[Float[Array, "R C"], Float[Array, "R C"]],
    wanted: Float[Array, " R"],
    is_share: Bool[Array, ""],
    parts: Parts,
) -> Float[Array, " R"]:
    """Return the score at which the weights from the largest down reach ``wanted``, at least the floor.

    Args:
        floor: Scores below it are ignored.
        tokens: Scores and weights.
        candidates: The largest scores in order, and their weights.
        wanted: Weight to reach; with ``is_share``, a fraction of the total weight.
        is_share: Whether ``wanted`` is a fraction.
        parts: Combines the masses of the devices' tokens.
    """
    scores, weights = tokens

    def mass_from(lowest: Float[Array, " R"]) -> Float[Array, " R"]:
        return parts.total(jnp.where(scores >= lowest[:, None], weights, 0.0).sum(1))

    def reaches(threshold: Float[Array, " R"]) -> Bool[Array, " R"]:
        return mass_from(jnp.maximum(threshold, floor)) >= wanted

    mass = mass_from(floor)
    wanted = jnp.where(is_share, wanted * mass, wanted)
    cumulative = jnp.cumsum(jnp.where(candidates[0] >= floor[:, None], candidates[1], 0.0), axis=1)
    num_short = (cumulative < wanted[:, None]).sum(1)
    count = candidates[0].shape[1]
    found = jnp.take_along_axis(candidates[0], jnp.minimum(num_short, count - 1)[:, None], axis=1)[:, 0]
    is_cut = wanted < mass
    if count < parts.width(scores.shape[1]):
        is_wide = is_cut & (num_short >= count)
        found = lax.cond(
            is_wide.any(), lambda: jnp.where(is_wide, _largest_threshold(reaches, floor.shape[0]), found), lambda: found
        )
    return jnp.where(is_cut, jnp.maximum(floor, found), floor)


def _largest_threshold(reaches: Callable[[Float[Array, " R"]], Bool[Array, " R"]], num_rows: int) -> Float[Array, " R"]:
    """Return the largest float at which ``reaches``, true below some point of each row, still holds; else -inf."""

    def round_(_, bounds):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        holds = reaches(from_order(middle))
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    low = jnp.full(num_rows, to_order(jnp.float32(-jnp.inf)), jnp.int32)
    high = jnp.full(num_rows, to_order(jnp.float32(jnp.inf)), jnp.int32)
    return from_order(lax.fori_loop(0, 32, round_, (low, high))[0])
