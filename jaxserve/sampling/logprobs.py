"""Log-probabilities of tokens."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.sampling.vocab_split import WHOLE, VocabSplit

MAX_LOGPROBS = 20
_BLOCK = 256


class TokenLogprobs(NamedTuple):
    """Log-probabilities, or logits, of some tokens of each row.

    Attributes:
        chosen: Value of the row's token.
        ranks: Its rank from 1: one plus the number of tokens that score higher.
        top_ids: The most likely tokens, in order.
        top: Their values; -inf beyond the vocabulary size.
        tracked: Values of the tokens that the row's request tracks.
    """

    chosen: Float[Array, " R"]
    ranks: Int[Array, " R"]
    top_ids: Int[Array, "R top"]
    top: Float[Array, "R top"]
    tracked: Float[Array, "R tracked"]


def token_logprobs(
    scores: Float[Array, "R V"],
    tokens: Int[Array, " R"],
    tracked_ids: Int[Array, "R tracked"],
    max_logprobs: int = MAX_LOGPROBS,
    is_normalized: bool = True,
    split: VocabSplit = WHOLE,
) -> TokenLogprobs:
    """Return log-probabilities of given tokens and of the most likely ones, ranked by logits: logprobs can tie.

    Args:
        scores: Logits.
        tokens: The token of each row.
        tracked_ids: Further tokens of each row.
        max_logprobs: Number of most likely tokens.
        is_normalized: Whether to return log-probabilities; otherwise the logits.
        split: Where the logits are.
    """
    named = split.take(scores, jnp.concatenate([tokens[:, None], tracked_ids], axis=1))
    chosen, tracked = named[:, :1], named[:, 1:]
    ranks = 1 + split.total(jnp.sum(scores > chosen, axis=1, dtype=jnp.int32))
    width = scores.shape[1]
    count = min(max_logprobs, width if split.axis is None else split.size)
    top, top_ids = split.top(*_top(scores, min(count, width)), width, count)
    if is_normalized:
        best = split.largest(scores.max(1, keepdims=True))
        log_total = jnp.log(split.total(jnp.sum(jnp.exp(scores - best), axis=1, keepdims=True)))
        chosen, top, tracked = (part - best - log_total for part in (chosen, top, tracked))
    padding = ((0, 0), (0, max_logprobs - count))
    top = jnp.pad(top, padding, constant_values=-jnp.inf)
    return TokenLogprobs(chosen[:, 0], ranks, jnp.pad(top_ids, padding), top, tracked)


def _top(scores: Float[Array, "R V"], count: int) -> tuple[Float[Array, "R count"], Int[Array, "R count"]]:
    """Return the largest values of each row and their indices, as ``lax.top_k``, the fast way on each platform."""
    top, ids = lax.platform_dependent(
        scores, cpu=lambda x: tuple(lax.top_k(x, count)), default=lambda x: top_by_blocks(x, count)
    )
    return top, ids


def top_by_blocks(scores: Float[Array, "R V"], count: int) -> tuple[Float[Array, "R count"], Int[Array, "R count"]]:
    """Return the largest values of each row and their indices, as ``lax.top_k``, without sorting the row.

    The largest ``count`` values are in the ``count`` blocks with the largest maxima, earlier blocks first on ties.
    """
    rows, size = scores.shape
    if count * _BLOCK >= size:
        top, ids = lax.top_k(scores, count)
        return top, ids
    padded = jnp.pad(scores, ((0, 0), (0, -size % _BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(rows, -1, _BLOCK)
    chosen = jnp.sort(lax.top_k(blocks.max(2), count)[1], axis=1)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1)
    top, indices = lax.top_k(candidates, count)
    ids = jnp.take_along_axis(chosen, indices // _BLOCK, axis=1) * _BLOCK + indices % _BLOCK
    return top, ids


def no_logprobs(num_rows: int, max_logprobs: int, num_tracked: int) -> TokenLogprobs:
    """Return zeros in place of logprobs."""
    return TokenLogprobs(
        jnp.zeros(num_rows),
        jnp.zeros(num_rows, jnp.int32),
        jnp.zeros((num_rows, max_logprobs), jnp.int32),
        jnp.zeros((num_rows, max_logprobs)),
        jnp.zeros((num_rows, num_tracked)),
    )
