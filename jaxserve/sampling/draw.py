"""Random sampling of tokens by weight.

The method is exponential clocks: each token gets an exponentially distributed waiting time divided by its weight, and
the shortest wins, so that each token wins in proportion to its weight. First blocks of tokens compete by the sums of
their weights, then the tokens of the winning block. The random bits come from a counter-based generator (Threefry-2x32
with 20 rounds, SC '11) keyed by seed and position, so that a row's token depends only on these and its weights.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from jaxserve.layers.parallel import VOCAB_BLOCK
from jaxserve.sampling.vocab_split import WHOLE, VocabSplit
from pallas_kernels.argmax_xla import first_largest

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def draw(
    weights: Float[Array, "R V"], seeds: Int[Array, " R"], positions: Int[Array, " R"], split: VocabSplit = WHOLE
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Sample one token per row in proportion to its weight, never one of weight zero.

    Devices that have parts of the rows exchange the blocks' sums, and the weights of the winning block.

    Returns:
        Tokens and their weights, which are not positive if all of a row's weights are zero or NaN.
    """
    rows, size = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -size % VOCAB_BLOCK))).reshape(rows, -1, VOCAB_BLOCK)
    sums = split.joined(blocks.sum(2))
    num_blocks = sums.shape[1]
    counters = jnp.arange(max(num_blocks, VOCAB_BLOCK), dtype=jnp.uint32)[None]
    key = (seeds[:, None].astype(jnp.uint32), positions[:, None].astype(jnp.uint32))
    block_bits, token_bits = threefry(key, (counters, jnp.zeros_like(counters)))
    block = first_largest(sums / _waiting_time(block_bits[:, :num_blocks]))
    inside = split.take(blocks, block[:, None])[:, 0]
    token = first_largest(inside / _waiting_time(token_bits[:, :VOCAB_BLOCK]))
    return block * VOCAB_BLOCK + token, jnp.take_along_axis(inside, token[:, None], axis=1)[:, 0]


def threefry(
    key: tuple[UInt[Array, "..."], UInt[Array, "..."]], counter: tuple[UInt[Array, "..."], UInt[Array, "..."]]
) -> tuple[UInt[Array, "..."], UInt[Array, "..."]]:
    """Return two words of random bits for each key and counter; without loops, so that it fuses into its consumer."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    first, second = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            first = first + second
            second = first ^ ((second << rotation) | (second >> (32 - rotation)))
        first, second = first + keys[(i + 1) % 3], second + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return first, second


def _waiting_time(bits: UInt[Array, "..."]) -> Float[Array, "..."]:
    """Return exponentially distributed times; short times, by which unlikely tokens win, have 32 bits of resolution."""
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))
