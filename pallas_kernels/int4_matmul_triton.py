"""4-bit weights in a Triton kernel: read packed, and converted to 16-bit floats in registers.

Few rows are bound by the bytes of the weights: a program owns 64 or 128 output columns and a share of the input
features (split-K), and the shares' partial sums in float32 are added in a fixed order. From ``_MOST_ROWS`` rows on the
matmul is bound by arithmetic; then the weights are dequantized once and XLA's own matmul is used.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import int4_matmul_xla, jax_triton
from pallas_kernels.int4_matmul import TILE, PackedInt4, unsupported_group

_MOST_ROWS = 512
_PROCESSORS = 132  # of an H100 or H200
_LEAST_TILES = 2  # tiles of input features that a split is worth


class Tiling(NamedTuple):
    """The tiling of a matmul, chosen from its widths and its tile of rows."""

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int


def unsupported(platform: str, device_kind: str, dtype: str, *, group_size: int = 128) -> str | None:
    """Return why it cannot run on such a device, or None."""
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"activations are bfloat16, float16 or float32, not {dtype}"
    return unsupported_group(group_size) or jax_triton.unsupported(platform, device_kind)


def matmul(x: Float[Array, "T D"], weights: PackedInt4) -> Float[Array, "T F"]:
    """Compute ``x @ weights`` in x's dtype, accumulated in float32."""
    num_rows, num_in = x.shape
    num_out = weights.words.shape[1]
    if num_rows >= _MOST_ROWS:
        return int4_matmul_xla.matmul(x, weights)
    tiling = choose_tiling(num_rows, num_in, num_out)
    partial_type = x.dtype if tiling.splits == 1 else jnp.float32
    sums = jax_triton.call(
        jax_triton.kernels("int4_matmul_kernels").int4_matmul_kernel,
        x,
        weights.words,
        weights.scales,
        weights.scales if weights.zeros is None else weights.zeros,
        num_rows,
        out_type=jax.ShapeDtypeStruct((tiling.splits, num_rows, num_out), partial_type),
        grid=(-(-num_rows // tiling.block_m), -(-num_out // tiling.block_n), tiling.splits),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        IN=num_in,
        OUT=num_out,
        GROUP=num_in // weights.scales.shape[0],
        HAS_ZEROS=weights.zeros is not None,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
    )
    return sums[0] if tiling.splits == 1 else sums.sum(0).astype(x.dtype)


def choose_tiling(num_rows: int, num_in: int, num_out: int) -> Tiling:
    """Choose tiles of 16 to 128 rows, and enough splits to occupy the chip."""
    block_m = next((block for block in (16, 32, 64) if num_rows <= block), 128)
    block_n = 128 if num_out >= 8192 or block_m >= 64 else 64
    tiles = -(-num_in // TILE)
    programs = _PROCESSORS if block_m >= 64 else 2 * _PROCESSORS
    wanted = programs // -(-num_out // block_n)
    splits = max(1, min(wanted, tiles // _LEAST_TILES))
    splits = -(-tiles // -(-tiles // splits))  # none of them empty
    num_stages = {16: 4, 32: 4, 64: 3, 128: 2}[block_m]
    return Tiling(block_m, block_n, splits, num_warps=8 if block_m == 128 else 4, num_stages=num_stages)
