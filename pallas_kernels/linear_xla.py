"""Matrix multiplication by XLA. Runs anywhere; operands are rounded to the weight's dtype."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def unsupported(platform: str, device_kind: str, dtype: str, **sizes: int) -> str | None:
    """Return None: it runs everywhere."""
    del platform, device_kind, dtype, sizes
    return None


def matmul(x: Float[Array, "T inner"], weight: Float[Array, "outer inner"]) -> Float[Array, "T outer"]:
    """Compute ``x @ weight.T`` in float32; see ``linear.LinearKernel``."""
    return lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
