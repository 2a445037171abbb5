"""Scores, masks and softmax of attention in plain XLA."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_parts import Part, as_partial


class Softmax(NamedTuple):
    """A softmax in progress: running maximum, sum and weighted values."""

    maximum: Float[Array, "..."]
    total: Float[Array, "..."]
    values: Float[Array, "... V"]


class Seen(NamedTuple):
    """Tokens of the pools that each query sees: from ``first``, which None stands for the first of all, to before
    ``stop``."""

    first: Int[Array, " R"] | None
    stop: Int[Array, " R"]

    def mask(self, token: Int[Array, "*shape"]) -> Bool[Array, "R *shape"]:
        """Return whether each query sees each token."""
        shape = (-1, *[1] * token.ndim)
        seen = token < self.stop.reshape(shape)
        return seen if self.first is None else seen & (token >= self.first.reshape(shape))


class Scoring(NamedTuple):
    """Settings of scores and of their softmax.

    Attributes:
        scale: Factor of the scores.
        window: Sliding window in tokens, or None.
        soft_cap: Bound of the scores, or None.
        value_dim: Features of a value.
        sinks: Logits of the softmax without values, or None.
        part: The part of every context that the pools hold, for partial attention; None: they hold all of it.
    """

    scale: float
    window: int | None
    soft_cap: float | None
    value_dim: int
    sinks: Float[Array, "K G"] | None = None
    part: Part | None = None

    def __call__(self, products: Float[Array, "..."]) -> Float[Array, "..."]:
        scores = products * self.scale
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    @property
    def result_dim(self) -> int:
        """Features of a query's result."""
        return self.value_dim if self.part is None else self.value_dim + 2

    def before(self, position: Int[Array, "*R"]) -> Int[Array, "*R"]:
        """Return how many tokens of the pools are before a position."""
        return position if self.part is None else self.part.tokens_before(position)

    def seen(self, visible: Int[Array, " R"]) -> Seen:
        """Return the tokens of the pools that queries see, each of which is the last of ``visible`` tokens."""
        first = None if self.window is None else self.before(jnp.maximum(visible - self.window, 0))
        return Seen(first, self.before(visible))

    def finish(self, state: Softmax, sinks: Float[Array, "..."] | None) -> Float[Array, "... result"]:
        """Return the weighted mean of the values, in which sinks take part as if their values were zero, or partial
        attention."""
        if self.part is not None:
            return as_partial(state.values, state.total, state.maximum)
        total = state.total if sinks is None else state.total + jnp.exp(sinks - state.maximum)
        return state.values / jnp.maximum(total, 1e-30)[..., None]
