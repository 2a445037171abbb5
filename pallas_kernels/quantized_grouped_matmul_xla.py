"""Grouped matmul with quantized matrices in XLA: a loop over tiles of rows, each of which decodes its expert's matrix.

Matrices are kept as rows of records. Those of experts without rows are not decoded.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.quantized import Form
from pallas_kernels.quantized_linear import rounded
from pallas_kernels.quantized_linear_xla import packed_shape as packed_shape
from pallas_kernels.quantized_linear_xla import product

_TILE = 64  # rows; each tile decodes its expert's matrix once


def unsupported(
    platform: str, device_kind: str, dtype: str, *, form: Form | None = None, num_experts: int = 1
) -> str | None:
    """Return None: it runs everywhere, with every form."""
    del platform, device_kind, dtype, form, num_experts
    return None


def pack(
    records: UInt8[np.ndarray, "E outer bytes"], form: Form, is_gated: bool = False
) -> UInt8[np.ndarray, "E outer bytes"]:
    """Return the records themselves."""
    del form, is_gated
    return records


def unpack(
    packed: UInt8[np.ndarray, "E outer bytes"], outer: int, inner: int, form: Form, is_gated: bool = False
) -> UInt8[np.ndarray, "E outer bytes"]:
    """Return the records themselves."""
    assert packed.shape[1:] == packed_shape(outer, inner, form, is_gated), packed.shape
    return packed


def grouped_matmul(
    lhs: Float[Array, "T D"],
    rhs: UInt8[Array, "E outer bytes"],
    group_sizes: Int[Array, " E"],
    num_out: int,
    form: Form,
    *,
    is_gated: bool = False,
) -> Float[Array, "T F"]:
    """Compute ``lhs[t] @ matrix of t's expert.T``; see ``quantized_grouped_matmul.QuantizedGroupedMatmul``.

    An expert's last tile may reach into the rows of the next one, whose tiles then replace what it wrote there.
    """
    del num_out
    num_rows, outer = lhs.shape[0], rhs.shape[1]
    tile = min(_TILE, num_rows)
    rows = jnp.pad(rounded(lhs.astype(jnp.float32), form), ((0, tile), (0, 0)))
    num_tiles = -(-group_sizes // tile)
    ends = jnp.cumsum(num_tiles)
    starts = jnp.cumsum(group_sizes) - group_sizes

    def multiply(index: Int[Array, ""], found: Float[Array, "padded outer"]) -> Float[Array, "padded outer"]:
        expert = jnp.searchsorted(ends, index, side="right")
        start = starts[expert] + (index - (ends[expert] - num_tiles[expert])) * tile
        records = lax.dynamic_index_in_dim(rhs, expert, keepdims=False)
        part = product(lax.dynamic_slice_in_dim(rows, start, tile), records, outer, form)
        return lax.dynamic_update_slice_in_dim(found, part, start, 0)

    empty = jnp.zeros((num_rows + tile, outer), jnp.float32)
    found = lax.fori_loop(0, ends[-1], multiply, empty)[:num_rows]
    if is_gated:
        gate, up = jnp.split(found, 2, axis=1)
        found = jax.nn.silu(gate) * up
    return found.astype(lhs.dtype)
