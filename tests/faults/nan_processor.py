"""A logits processor that makes the scores of a request NaN from a position on."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class NanFrom:
    """Scores behind position ``nan_from`` of a context are NaN; 0 for never."""

    @property
    def arguments(self) -> Mapping[str, float]:
        """One number."""
        return {"nan_from": 0.0}

    def __call__(
        self, logits: Float[Array, "R V"], arguments: dict[str, Float[Array, " R"]], positions: Int[Array, " R"]
    ) -> Float[Array, "R V"]:
        """See ``LogitsProcessor``."""
        start = arguments["nan_from"]
        is_poisoned = (start > 0) & (positions >= start)
        return jnp.where(is_poisoned[:, None], jnp.nan, logits)


NAN_FROM = NanFrom()
