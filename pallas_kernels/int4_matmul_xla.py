"""4-bit weights in plain XLA: dequantized to the activations' dtype, then one matmul. Runs anywhere."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.int4_matmul import PackedInt4, dequantise, unsupported_group


def unsupported(platform: str, device_kind: str, dtype: str, *, group_size: int = 128) -> str | None:
    """Return why it cannot run on such a device, or None."""
    return unsupported_group(group_size)


def matmul(x: Float[Array, "T D"], weights: PackedInt4) -> Float[Array, "T F"]:
    """Compute ``x @ weights`` in x's dtype, accumulated in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    weight = dequantise(weights, x.shape[1]).astype(x.dtype)
    return jnp.dot(x, weight, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)
