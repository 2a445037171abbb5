"""Grouped matmul in plain XLA: ``lax.ragged_dot``. Runs anywhere; on NVIDIA GPUs XLA makes a masked dense product."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_ROWS_BY_EXPERT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)


def unsupported(platform: str, device_kind: str, dtype: str, *, num_experts: int = 1) -> str | None:
    """Return why it cannot run on such a device, or None."""
    return None


def grouped_matmul(
    lhs: Float[Array, "T D"], rhs: Float[Array, "E rows D"], group_sizes: Int[Array, " E"], *, is_gated: bool = False
) -> Float[Array, "T F"]:
    """Compute ``lhs[t] @ rhs[expert of t].T``; see ``grouped_matmul.GroupedMatmul``."""
    product = lax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        _ROWS_BY_EXPERT,
        precision=lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    if is_gated:
        gate, up = jnp.split(product, 2, axis=1)
        product = jax.nn.silu(gate) * up
    return product.astype(lhs.dtype)
