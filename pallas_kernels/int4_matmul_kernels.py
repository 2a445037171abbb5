"""The Triton kernel of ``int4_matmul_triton``. Imports triton: import it only through ``jax_triton.kernels``."""

from typing import no_type_check

import triton
import triton.language as tl
from triton import knobs


def nibble_ptx(float_type: str, magic: int, nibble: int) -> str:
    """Return PTX that converts nibble j of words $1 and $2 to a register $0 of two 16-bit floats, less $3, times $4.

    The nibbles are put after the exponent of a number whose last place is worth 1; zero points in $3 stand there too.

    Args:
        float_type: ``bf16x2`` or ``f16x2``.
        magic: That number's bits: of 128 in bfloat16, of 1024 in float16.
        nibble: j; 0 is the lowest four bits.
    """
    halves = "0x5410" if nibble < 4 else "0x7632"
    steps = [
        ".reg .b32 t;",
        f"prmt.b32 t, $1, $2, {halves};",
        f"shr.u32 t, t, {4 * (nibble % 4)};" if nibble % 4 else "",
        f"lop3.b32 t, t, 0x000f000f, {magic * 0x10001:#010x}, 0xea;",
        f"sub.rn.{float_type} t, t, $3;",
        f"mul.rn.{float_type} $0, t, $4;",
    ]
    return "{ " + " ".join(step for step in steps if step) + " }"


BF16_MAGIC = tl.constexpr(0x4300)
F16_MAGIC = tl.constexpr(0x6400)
_BF16_PTX = tl.constexpr(tuple(nibble_ptx("bf16x2", 0x4300, nibble) for nibble in range(8)))
_F16_PTX = tl.constexpr(tuple(nibble_ptx("f16x2", 0x6400, nibble) for nibble in range(8)))
_USE_PTX = tl.constexpr(not knobs.runtime.interpret)  # Triton's interpreter has no PTX


@triton.jit
@no_type_check
def _lifted(nibble, FLOAT: tl.constexpr):
    """Return 128 + nibble in bfloat16, 1024 + nibble in float16, the nibble itself in float32."""
    if FLOAT == tl.bfloat16:
        return (nibble | BF16_MAGIC).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif FLOAT == tl.float16:
        return (nibble | F16_MAGIC).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return nibble.to(tl.float32)


@triton.jit
@no_type_check
def _plane_weights(words, zero, scale, NIBBLE: tl.constexpr, FLOAT: tl.constexpr):
    """Return [32, columns]: a nibble of each word less the zero point, exact, times the scale, rounded once."""
    if _USE_PTX and FLOAT == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _BF16_PTX[NIBBLE], "=r,r,r,r,r", [words, zero, scale], tl.bfloat16, is_pure=True, pack=2
        )
    elif _USE_PTX and FLOAT == tl.float16:
        return tl.inline_asm_elementwise(
            _F16_PTX[NIBBLE], "=r,r,r,r,r", [words, zero, scale], tl.float16, is_pure=True, pack=2
        )
    else:
        return (_lifted((words >> (4 * NIBBLE)) & 15, FLOAT) - zero) * scale


@triton.jit
@no_type_check
def int4_matmul_kernel(
    x_ptr,  # [T, IN] activations
    words_ptr,  # [tiles of IN * 32, OUT] int32
    scales_ptr,  # [IN / GROUP, OUT]
    zeros_ptr,  # [IN / GROUP, OUT] uint8; not read without HAS_ZEROS
    num_rows,  # T
    out_ptr,  # [splits, T, OUT]
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a tile of the result, over one split of the input features; grid (row tiles, column tiles, splits)."""
    FLOAT: tl.constexpr = x_ptr.dtype.element_ty
    PLANE: tl.constexpr = 32
    TILE: tl.constexpr = 8 * PLANE
    NUM_TILES: tl.constexpr = (IN + TILE - 1) // TILE
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    plane = tl.arange(0, PLANE)
    is_row = (rows < num_rows)[:, None]
    is_column = (columns < OUT) | (OUT % BLOCK_N == 0)
    tiles = tl.cdiv(NUM_TILES, tl.num_programs(2))
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * IN
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(split * tiles, tl.minimum((split + 1) * tiles, NUM_TILES)):
        word_rows = (tile * PLANE + plane).to(tl.int64)[:, None] * OUT
        words = tl.load(words_ptr + word_rows + columns[None, :], mask=is_column[None, :], other=0)
        for nibble in tl.static_range(8):
            first = tile * TILE + nibble * PLANE
            if (nibble * PLANE) % GROUP == 0:  # a group begins
                group = tl.minimum(first, IN - 1) // GROUP * OUT + columns  # x is 0 after the last
                scale = tl.load(scales_ptr + group, mask=is_column, other=0).to(FLOAT)
                scale = tl.broadcast_to(scale[None, :], [PLANE, BLOCK_N])
                zero = tl.full([BLOCK_N], 8, tl.int32)
                if HAS_ZEROS:
                    zero = tl.load(zeros_ptr + group, mask=is_column, other=0).to(tl.int32)
                zero = tl.broadcast_to(_lifted(zero, FLOAT)[None, :], [PLANE, BLOCK_N])
            features = first + plane
            is_feature = (features < IN) | (IN % TILE == 0)
            x = tl.load(x_rows + features[None, :], mask=is_row & is_feature[None, :], other=0)
            weights = _plane_weights(words, zero, scale, nibble, FLOAT)
            total = tl.dot(x, weights, total, input_precision="ieee")
    out_rows = (split * num_rows + rows).to(tl.int64)[:, None] * OUT
    tl.store(out_ptr + out_rows + columns[None, :], total, mask=is_row & is_column[None, :])
