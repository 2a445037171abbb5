"""Grouped matmul in plain XLA: a loop over tiles of rows on CPUs, ``lax.ragged_dot`` elsewhere.

XLA computes ``ragged_dot`` as a masked product of all rows with all experts, on CPUs and, where it has no better form,
on GPUs. The loop reads only the matrices of experts that have rows, and its cost follows the number of rows.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.plain_experts import pack as pack
from pallas_kernels.plain_experts import packed_shape as packed_shape
from pallas_kernels.plain_experts import unpack as unpack

_TILE = 64  # rows; each tile reads its expert's matrix once
_ROWS_BY_EXPERT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)


def unsupported(platform: str, device_kind: str, dtype: str, *, num_experts: int = 1) -> str | None:
    """Return why it cannot run on such a device, or None."""
    return None


def grouped_matmul(
    lhs: Float[Array, "T D"],
    rhs: Float[Array, "E rows D"],
    group_sizes: Int[Array, " E"],
    num_out: int,
    *,
    is_gated: bool = False,
) -> Float[Array, "T F"]:
    """Compute ``lhs[t] @ rhs[expert of t].T``; see ``grouped_matmul.GroupedMatmul``."""
    del num_out
    rows = lhs.astype(rhs.dtype)
    product = lax.platform_dependent(rows, rhs, group_sizes, cpu=_by_tiles, default=_ragged)
    if is_gated:
        gate, up = jnp.split(product, 2, axis=1)
        product = jax.nn.silu(gate) * up
    return product.astype(lhs.dtype)


def _ragged(
    lhs: Float[Array, "T D"], rhs: Float[Array, "E rows D"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T rows"]:
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    return lax.ragged_dot_general(
        lhs, rhs, group_sizes, _ROWS_BY_EXPERT, precision=precision, preferred_element_type=jnp.float32
    )


def _by_tiles(
    lhs: Float[Array, "T D"], rhs: Float[Array, "E rows D"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T rows"]:
    """Multiply the tiles of each expert's rows in order.

    An expert's last tile may reach into the rows of the next one, whose tiles then replace what it wrote there.
    """
    num_rows, num_out = lhs.shape[0], rhs.shape[1]
    tile = min(_TILE, num_rows)
    lhs = jnp.pad(lhs, ((0, tile), (0, 0)))
    num_tiles = -(-group_sizes // tile)
    ends = jnp.cumsum(num_tiles)
    starts = jnp.cumsum(group_sizes) - group_sizes

    def multiply(index: Int[Array, ""], product: Float[Array, "padded rows"]) -> Float[Array, "padded rows"]:
        expert = jnp.searchsorted(ends, index, side="right")
        start = starts[expert] + (index - (ends[expert] - num_tiles[expert])) * tile
        rows = lax.dynamic_slice_in_dim(lhs, start, tile)
        part = lax.dot_general(
            rows,
            lax.dynamic_index_in_dim(rhs, expert, keepdims=False),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        return lax.dynamic_update_slice_in_dim(product, part, start, 0)

    empty = jnp.zeros((num_rows + tile, num_out), jnp.float32)
    return lax.fori_loop(0, ends[-1], multiply, empty)[:num_rows]
