"""Argmax of each row, in plain XLA."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return None: it runs everywhere."""
    del platform, device_kind, dtype, sizes
    return None


def argmax(scores: Float[Array, "R V"], num_rows: Int[Array, ""] | None = None) -> Int[Array, " R"]:
    """Return the places; see ``argmax.ArgmaxKernel``."""
    del num_rows
    best = first_largest(scores)
    return jnp.where(_broken_rows(scores, best), -1, best)


def first_largest(scores: Float[Array, "R n"]) -> Int[Array, " R"]:
    """Return the first of each row's largest; XLA on CPUs finds it three times faster by ``top_k`` than by
    ``argmax``."""
    return lax.platform_dependent(
        scores, cpu=lambda x: lax.top_k(x, 1)[1][:, 0], default=lambda x: jnp.argmax(x, axis=1).astype(jnp.int32)
    )


def _broken_rows(scores: Float[Array, "R V"], chosen: Int[Array, " R"]) -> Bool[Array, " R"]:
    """Return whether a row has NaN, or nothing above -inf; ``chosen`` is the row's ``first_largest``.

    ``argmax`` selects a NaN if there is one, so that the selected score shows it and nothing is read twice. On CPUs
    ``top_k`` puts NaNs with a minus sign last, as x86 makes them, and XLA's maximum of many numbers passes over NaNs;
    a sum does not, and costs a tenth of a percent of a step. It takes a row with both infinities for one with NaN.
    """
    score = jnp.take_along_axis(scores, chosen[:, None], axis=1)[:, 0]
    sums = lax.platform_dependent(scores, score, cpu=lambda x, _: x.sum(1), default=lambda _, score: score)
    return jnp.isnan(sums) | ~(score > -jnp.inf)
