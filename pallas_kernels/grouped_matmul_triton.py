"""Grouped matmul in a Triton kernel: one launch over tiles of all experts, including the SwiGLU of gated ones.

The grid has as many row tiles as any split of the rows among experts can need; each program finds its expert from the
group sizes itself, and those left over own no row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import jax_triton
from pallas_kernels.plain_experts import pack as pack
from pallas_kernels.plain_experts import packed_shape as packed_shape
from pallas_kernels.plain_experts import unpack as unpack

_MOST_EXPERTS = 4096


class Tiling(NamedTuple):
    """Sizes of tiles; follow from the types and from how many rows an expert has on average."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def unsupported(platform: str, device_kind: str, dtype: str, *, num_experts: int = 1) -> str | None:
    """Return why it cannot run on such a device, or None."""
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"operands are bfloat16, float16 or float32, not {dtype}"
    if num_experts > _MOST_EXPERTS:
        return f"at most {_MOST_EXPERTS} experts, not {num_experts}"
    return jax_triton.unsupported(platform, device_kind)


def grouped_matmul(
    lhs: Float[Array, "T D"],
    rhs: Float[Array, "E rows D"],
    group_sizes: Int[Array, " E"],
    num_out: int,
    *,
    is_gated: bool = False,
) -> Float[Array, "T F"]:
    """Compute ``lhs[t] @ rhs[expert of t].T``; see ``grouped_matmul.GroupedMatmul``. Rows after all experts get
    zeros."""
    num_rows, num_in = lhs.shape
    num_experts = rhs.shape[0]
    tiling = choose_tiling(num_rows, num_experts, is_gated=is_gated, is_single=lhs.dtype == jnp.float32)
    row_tiles = num_rows // tiling.block_m + min(num_experts + 1, num_rows)
    return jax_triton.call(
        jax_triton.kernels("grouped_matmul_kernels").grouped_matmul_kernel,
        lhs.astype(rhs.dtype),
        rhs,
        group_sizes,
        num_rows,
        out_type=jax.ShapeDtypeStruct((num_rows, num_out), lhs.dtype),
        grid=(row_tiles * -(-num_out // tiling.block_n),),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        DEPTH=num_in,
        WIDTH=num_out,
        EXPERTS=num_experts,
        GATED=is_gated,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
    )


def choose_tiling(num_rows: int, num_experts: int, *, is_gated: bool, is_single: bool) -> Tiling:
    """Choose row tiles that fit most experts' rows, up to 128."""
    if is_single:
        return Tiling(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
    usual = 1.5 * num_rows / num_experts
    block_m = next((block for block in (16, 32, 64) if usual <= block), 128)
    if block_m <= 32:
        return Tiling(block_m, block_n=32 if is_gated else 64, block_k=128, num_warps=4, num_stages=4)
    return Tiling(block_m, block_n=64 if is_gated else 128, block_k=64, num_warps=block_m // 16, num_stages=4)
