"""Which tokens min-p, top-k and top-p keep, without sorting the vocabulary.

In the order vLLM applies them: min-p, then top-k, then top-p over what those two keep. Each keeps the tokens at or
above a threshold; tokens that tie with the threshold are all kept. Thresholds come from the largest candidates; where
those do not reach far enough, from bisection over the order-preserving integers of the scores, exact in 32 passes.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_NUM_CANDIDATES = 1024


def truncate(
    scores: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"], min_p: Float[Array, " R"]
) -> Bool[Array, "R V"]:
    """The tokens each row keeps.

    Args:
        scores: Logits over temperature; -inf for tokens that are not allowed.
        top_k: Candidates kept; 0 keeps all.
        top_p: Probability mass kept; 1 keeps all.
        min_p: Probability kept at least, relative to the likeliest token's; 0 keeps all.
    """
    floor = jnp.where(min_p > 0, scores.max(1) + jnp.log(jnp.maximum(min_p, 1e-30)), -jnp.inf)
    cuts = (top_k > 0) | (top_p < 1)
    floor = lax.cond(cuts.any(), lambda: _cut(scores, floor, top_k, top_p), lambda: floor)
    return (scores >= floor[:, None]) & (scores > -jnp.inf)


def _cut(
    scores: Float[Array, "R V"], floor: Float[Array, " R"], top_k: Int[Array, " R"], top_p: Float[Array, " R"]
) -> Float[Array, " R"]:
    """The floor raised to what top-k and top-p keep."""
    count = min(_NUM_CANDIDATES, scores.shape[1])
    candidates = lax.top_k(scores, count)[0]
    kth = jnp.take_along_axis(candidates, jnp.clip(top_k - 1, 0, count - 1)[:, None], axis=1)[:, 0]
    if count < scores.shape[1]:
        wide_k = top_k > count
        kth = lax.cond(wide_k.any(), lambda: jnp.where(wide_k, _kth_by_bisection(scores, top_k), kth), lambda: kth)
    floor = jnp.where(top_k > 0, jnp.maximum(floor, kth), floor)

    best = candidates[:, :1]
    mass = jnp.where(scores >= floor[:, None], jnp.exp(scores - best), 0.0).sum(1)
    wanted = top_p * mass
    cumulative = jnp.cumsum(jnp.where(candidates >= floor[:, None], jnp.exp(candidates - best), 0.0), axis=1)
    reached = cumulative >= wanted[:, None]
    is_reached = reached.any(1)
    nucleus = jnp.take_along_axis(candidates, jnp.argmax(reached, axis=1)[:, None], axis=1)[:, 0]
    nucleus = jnp.where(is_reached, nucleus, -jnp.inf)
    is_cut = top_p < 1
    if count < scores.shape[1]:
        wide_p = is_cut & ~is_reached
        nucleus = lax.cond(
            wide_p.any(),
            lambda: jnp.where(wide_p, _nucleus_by_bisection(scores, floor, best, wanted), nucleus),
            lambda: nucleus,
        )
    return jnp.where(is_cut, jnp.maximum(floor, nucleus), floor)


def _kth_by_bisection(scores: Float[Array, "R V"], top_k: Int[Array, " R"]) -> Float[Array, " R"]:
    def enough(threshold: Float[Array, " R"]) -> Bool[Array, " R"]:
        return (scores >= threshold[:, None]).sum(1) >= top_k

    return _largest_threshold(enough, scores.shape[0])


def _nucleus_by_bisection(
    scores: Float[Array, "R V"], floor: Float[Array, " R"], best: Float[Array, "R 1"], wanted: Float[Array, " R"]
) -> Float[Array, " R"]:
    def enough(threshold: Float[Array, " R"]) -> Bool[Array, " R"]:
        kept = scores >= jnp.maximum(threshold, floor)[:, None]
        return jnp.where(kept, jnp.exp(scores - best), 0.0).sum(1) >= wanted

    return _largest_threshold(enough, scores.shape[0])


def _largest_threshold(enough: Callable[[Float[Array, " R"]], Bool[Array, " R"]], num_rows: int) -> Float[Array, " R"]:
    """The largest float at which ``enough``, true below some point of each row, still holds; else -inf."""

    def round_(_, bounds):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        holds = enough(_from_order(middle))
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    low = jnp.full(num_rows, _to_order(jnp.float32(-jnp.inf)), jnp.int32)
    high = jnp.full(num_rows, _to_order(jnp.float32(jnp.inf)), jnp.int32)
    return _from_order(lax.fori_loop(0, 32, round_, (low, high))[0])


def _to_order(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_order(order: Int[Array, "..."]) -> Float[Array, "..."]:
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)
