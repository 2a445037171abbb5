"""Verifies draft tokens against sampled ones (speculative decoding).

A row of a step may carry drafts: tokens that are predicted to follow its latest token. The step samples after the
latest token and after each draft, all at once. A token sampled after a draft is kept only if sampling one by one would
have led there: if each draft up to it equals the token sampled before that draft.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

NOWHERE = int(np.iinfo(np.int32).max)
"""An index out of range of every array, which scatters drop."""


class Verification(NamedTuple):
    """Row and preceding token of each sample of a step.

    Attributes:
        rows: Row of each sample, ascending; the number of rows for an unused sample.
        followed: The token before each sample: its row's latest for the first sample of a row, otherwise a draft.
    """

    rows: Int[Array, " samples"]
    followed: Int[Array, " samples"]

    def drafts_before(self, max_drafts: int) -> Int[Array, "samples drafts"]:
        """Return the drafts of the same row up to each sample, at most ``max_drafts``, padded with ``NOWHERE``."""
        index, first = jnp.arange(len(self.rows)), self._firsts()
        drafts = index[:, None] - jnp.arange(max_drafts)
        return jnp.where(drafts > first[:, None], self.followed[jnp.maximum(drafts, 0)], NOWHERE)

    def keep(self, tokens: Int[Array, " samples"]) -> "KeptTokens":
        """Return which of the sampled ``tokens`` are kept; a failed sample (below 0) and those after it are not."""
        first = self._firsts()
        is_first = first == jnp.arange(len(tokens))
        is_rejected = (tokens < 0) | (~is_first & (self.followed != jnp.roll(tokens, 1)))
        num_rejected = jnp.cumsum(is_rejected, dtype=jnp.int32)
        is_kept = num_rejected == (num_rejected - is_rejected)[first]
        has_next = jnp.roll(is_kept & ~is_first, -1).at[-1].set(False)
        return KeptTokens(is_kept, (is_kept | is_first) & ~has_next)

    def _firsts(self) -> Int[Array, " samples"]:
        """Return the index of the first sample of each sample's row."""
        index = jnp.arange(len(self.rows), dtype=jnp.int32)
        starts = jnp.append(True, self.rows[1:] != self.rows[:-1])
        return lax.cummax(jnp.where(starts, index, 0))


class KeptTokens(NamedTuple):
    """The result of a verification.

    Attributes:
        is_kept: Whether each sampled token is kept.
        is_latest: Whether it is the last kept token of its row; the first sample of a row where none is kept.
    """

    is_kept: Bool[Array, " samples"]
    is_latest: Bool[Array, " samples"]
