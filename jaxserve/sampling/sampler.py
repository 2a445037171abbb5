"""Choosing tokens from logits, inside the step.

A row's choice depends on its logits, its numbers and the pair (seed, position) alone, never on other rows: random
numbers come from a counter-based generator (Threefry, SC '11) keyed by that pair.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, UInt

from jaxserve.sampling.truncation import truncate

VARIANTS = ("greedy", "sampled", "full")
MAX_LOGPROBS = 20
_BLOCK = 256


class SamplerInputs(NamedTuple):
    """Numbers of each row; see ``jaxserve.engine.plan.Sampling``. ``positions`` are those of the tokens to come."""

    temperature: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    seeds: Int[Array, " R"]
    positions: Int[Array, " R"]


class TokenLogprobs(NamedTuple):
    """Log-probabilities before temperature and masks: of the chosen token, its rank (from 1), and the best tokens'."""

    chosen: Float[Array, " R"]
    ranks: Int[Array, " R"]
    top_ids: Int[Array, "R top"]
    top: Float[Array, "R top"]


def sample(
    logits: Float[Array, "R V"], inputs: SamplerInputs, mask: Int[Array, "R words"], variant: str
) -> tuple[Int[Array, " R"], TokenLogprobs]:
    """A token for each row.

    Args:
        logits: Scores, float32.
        inputs: Numbers of each row.
        mask: Allowed tokens as bits, used by ``full`` alone.
        variant: ``greedy`` (every row takes the likeliest token), ``sampled``, or ``full`` (masks and logprobs too).

    Returns:
        Tokens, and logprobs (zeros unless ``full``).
    """
    if variant == "greedy":
        return _likeliest(logits), _no_logprobs(logits)
    allowed = _masked(logits, mask) if variant == "full" else logits
    tokens = _sampled(allowed, inputs, _likeliest(allowed))
    return tokens, token_logprobs(logits, tokens) if variant == "full" else _no_logprobs(logits)


def sample_any(
    logits: Float[Array, "R V"], inputs: SamplerInputs, mask: Int[Array, "R words"], variant: Int[Array, ""]
) -> tuple[Int[Array, " R"], TokenLogprobs]:
    """``sample`` with the variant, an index into ``VARIANTS``, known only when the step runs."""
    is_full = variant == VARIANTS.index("full")
    allowed = lax.cond(is_full, lambda: _masked(logits, mask), lambda: logits)
    likeliest = _likeliest(allowed)
    is_greedy = variant == VARIANTS.index("greedy")
    tokens = lax.cond(is_greedy, lambda: likeliest, lambda: _sampled(allowed, inputs, likeliest))
    return tokens, lax.cond(is_full, lambda: token_logprobs(logits, tokens), lambda: _no_logprobs(logits))


def token_logprobs(logits: Float[Array, "R V"], tokens: Int[Array, " R"]) -> TokenLogprobs:
    """Log-probabilities of given tokens and of the likeliest ones, ranked by logits: two may round to one logprob."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    ranks = 1 + jnp.sum(logits > chosen, axis=1, dtype=jnp.int32)
    count = min(MAX_LOGPROBS, logits.shape[1])
    top, top_ids = lax.top_k(logits, count)
    best = top[:, :1]
    log_total = jnp.log(jnp.sum(jnp.exp(logits - best), axis=1, keepdims=True))
    padding = ((0, 0), (0, MAX_LOGPROBS - count))
    top = jnp.pad(top - best - log_total, padding, constant_values=-jnp.inf)
    return TokenLogprobs((chosen - best - log_total)[:, 0], ranks, jnp.pad(top_ids, padding), top)


def _no_logprobs(logits: Float[Array, "R V"]) -> TokenLogprobs:
    rows = logits.shape[0]
    return TokenLogprobs(
        jnp.zeros(rows),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((rows, MAX_LOGPROBS)),
    )


def _likeliest(logits: Float[Array, "R V"]) -> Int[Array, " R"]:
    """The first of the largest; XLA on CPUs finds it three times faster by ``top_k`` than by ``argmax``."""
    return lax.platform_dependent(
        logits, cpu=lambda x: lax.top_k(x, 1)[1][:, 0], default=lambda x: jnp.argmax(x, axis=1).astype(jnp.int32)
    )


def _sampled(logits: Float[Array, "R V"], inputs: SamplerInputs, likeliest: Int[Array, " R"]) -> Int[Array, " R"]:
    """A random token for rows with a temperature, the likeliest for the others."""
    is_random = inputs.temperature > 0
    scaled = logits / jnp.where(is_random, inputs.temperature, 1.0)[:, None]
    kept = truncate(scaled, inputs.top_k, inputs.top_p, inputs.min_p)
    weights = jnp.where(kept, jnp.exp(scaled - scaled.max(1, keepdims=True)), 0.0)
    return jnp.where(is_random, _draw(weights, inputs.seeds, inputs.positions), likeliest)


def _draw(weights: Float[Array, "R V"], seeds: Int[Array, " R"], positions: Int[Array, " R"]) -> Int[Array, " R"]:
    """A token of each row, in proportion to its weight: first a block of tokens, then a token of the block."""
    rows, size = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -size % _BLOCK))).reshape(rows, -1, _BLOCK)
    uniform = jax.vmap(_two_uniforms)(seeds, positions)
    block = _invert(blocks.sum(2), uniform[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _invert(inside, uniform[:, 1])


def _two_uniforms(seed: Int[Array, ""], position: Int[Array, ""]) -> Float[Array, "2"]:
    key = jnp.stack([seed, position]).astype(jnp.uint32)
    return _uniform(threefry_2x32(key, jnp.arange(2, dtype=jnp.uint32)))


def _uniform(bits: UInt[Array, " n"]) -> Float[Array, " n"]:
    """Odd multiples of 2**-24 in (0, 1): 0 would draw the first token of any weight at all, 1 the last."""
    return (bits >> 9).astype(jnp.float32) * 2.0**-23 + 2.0**-24


def _invert(weights: Float[Array, "R n"], uniform: Float[Array, " R"]) -> Int[Array, " R"]:
    """The first index whose cumulative weight exceeds ``uniform`` times the total; never one of weight zero."""
    cumulative = jnp.cumsum(weights, axis=1)
    beyond = (cumulative > uniform[:, None] * cumulative[:, -1:]) & (weights > 0)
    last = weights.shape[1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=1)
    return jnp.where(beyond.any(1), jnp.argmax(beyond, axis=1), last).astype(jnp.int32)


def _masked(logits: Float[Array, "R V"], mask: Int[Array, "R words"]) -> Float[Array, "R V"]:
    """Logits with -inf for the tokens whose bit is not set."""
    bits = (mask[:, :, None] >> jnp.arange(32)) & 1
    return jnp.where(bits.reshape(mask.shape[0], -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)
