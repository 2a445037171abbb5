"""Matmul with 4-bit weights (W4A16): interface, packing, cases and a plain reference.

A weight is ``(value - zero) * scale``: values are 0..15, and each group of consecutive input features has a scale and a
separate zero point per output feature (AWQ and GPTQ checkpoints). ``pack`` converts them once, when a model is loaded,
to the layout that all implementations read:

A word of 32 bits holds eight values of one output feature; nibble j of word r of a tile of 256 input features is input
feature ``32 * j + r`` of that tile. So a shift and a mask give a whole plane of 32 neighbouring features, and nothing
has to be moved between lanes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer, UInt8

from pallas_kernels.operation import Comparison, Cost, Tolerance, add_twins, compare_rows, in_pieces

PLANE = 32  # input features that one nibble of a tile's words holds
TILE = 8 * PLANE  # input features of a tile
SYMMETRIC_ZERO = 8  # zero point of weights that have none of their own


class PackedInt4(NamedTuple):
    """Packed weights.

    Attributes:
        words: Eight values per word, as the module describes; rows are padded to whole tiles with value 0.
        scales: One per group and output feature.
        zeros: Likewise; None means 8 everywhere.
    """

    words: Int[Array, "words F"]
    scales: Float[Array, "groups F"]
    zeros: UInt8[Array, "groups F"] | None


@runtime_checkable
class Int4Matmul(Protocol):
    """The functions of an implementation module."""

    def unsupported(self, platform: str, device_kind: str, dtype: str, *, group_size: int = 128) -> str | None:
        """Return why it cannot run on such a device, or None."""
        ...

    def matmul(self, x: Float[Array, "T D"], weights: PackedInt4) -> Float[Array, "T F"]:
        """``x @ weights`` in x's type, accumulated in float32.

        A row's result depends only on that row, the weights and the tile chosen for the number of rows.
        """
        ...


def pack(
    values: Integer[Array | np.ndarray, "rows out"],
    scales: Float[Array | np.ndarray, "_ _"],
    zeros: Integer[Array | np.ndarray, "_ _"] | None = None,
    g_idx: Integer[Array | np.ndarray, " _"] | None = None,
) -> PackedInt4:
    """Pack weights from the neutral form into the layout of the kernels.

    Args:
        values: 0..15, one per element ([in, out], int8 or uint8), or eight per 32-bit word along the input features,
            lowest bits first ([in / 8, out], int32 or uint32).
        scales: [in / group, out].
        zeros: Zero points, 0..127, [in / group, out]; None means 8 everywhere.
        g_idx: The group of each input feature, if the checkpoint has it.

    Raises:
        ValueError: Shapes that do not match, a group size that no kernel supports, or groups in activation
            order.
    """
    values = jnp.asarray(values)
    if values.dtype.itemsize == 4:
        nibbles = (values[:, None, :] >> (4 * jnp.arange(8, dtype=values.dtype))[:, None]) & 15
        values = nibbles.reshape(-1, values.shape[1])
    elif values.dtype.itemsize != 1:
        raise ValueError(f"values must be 8-bit elements or 32-bit words, not {values.dtype}")
    num_in, num_out = values.shape
    num_groups = scales.shape[0]
    if scales.shape[1] != num_out or num_in % num_groups or (zeros is not None and zeros.shape != scales.shape):
        found = f"values {values.shape}, scales {scales.shape}, zeros {None if zeros is None else zeros.shape}"
        raise ValueError(f"scales and zeros must be [in / group, out] for values [in, out]; got {found}")
    reason = unsupported_group(num_in // num_groups)
    if reason is not None:
        raise ValueError(reason)
    if g_idx is not None and not np.array_equal(g_idx, np.arange(num_in) // (num_in // num_groups)):
        raise ValueError("groups in activation order (g_idx, act-order / desc_act) are not supported: got a g_idx")
    padded = jnp.pad(values, ((0, -num_in % TILE), (0, 0))).astype(jnp.uint32).reshape(-1, 8, PLANE, num_out)
    shifted = padded << (4 * jnp.arange(8, dtype=jnp.uint32))[:, None, None]
    words = lax.bitcast_convert_type(shifted.sum(1, dtype=jnp.uint32), jnp.int32).reshape(-1, num_out)
    return PackedInt4(words, jnp.asarray(scales), None if zeros is None else jnp.asarray(zeros).astype(jnp.uint8))


def unsupported_group(group_size: int) -> str | None:
    """Return why a group size cannot be packed, or None."""
    if group_size in (PLANE, 2 * PLANE, 4 * PLANE) or (group_size and group_size % TILE == 0):
        return None
    return f"groups of 32, 64, 128 or a multiple of 256 input features are supported, not {group_size}"


def dequantise(weights: PackedInt4, num_in: int) -> Float[Array, "D F"]:
    """Return the weights themselves, in float32."""
    num_out = weights.words.shape[1]
    words = weights.words.reshape(-1, 1, PLANE, num_out)
    values = ((words >> (4 * jnp.arange(8, dtype=jnp.int32))[:, None, None]) & 15).reshape(-1, num_out)[:num_in]
    group = num_in // weights.scales.shape[0]
    grouped = values.reshape(-1, group, num_out).astype(jnp.float32)
    zeros = SYMMETRIC_ZERO if weights.zeros is None else weights.zeros[:, None].astype(jnp.float32)
    return ((grouped - zeros) * weights.scales[:, None].astype(jnp.float32)).reshape(num_in, num_out)


class Case(NamedTuple):
    """A matmul of [num_rows, num_in] with weights [num_in, num_out]."""

    num_rows: int
    num_in: int = 256
    num_out: int = 128
    group_size: int = 128
    is_symmetric: bool = False
    dtype: str = "bfloat16"


IS_IN_PLACE = False
_PIECE = 128  # columns of a result that are compared together
CASES: Mapping[str, Case] = {
    **{f"rows_{num_rows}": Case(num_rows) for num_rows in (1, 3, 16, 17, 33, 128)},
    "rows_300": Case(300),
    "group_32": Case(5, group_size=32),
    "group_64": Case(17, group_size=64, dtype="float16"),
    "group_is_all": Case(5, num_in=768, group_size=768),
    "symmetric": Case(4, is_symmetric=True),
    "symmetric_group_32": Case(33, 512, 192, 32, is_symmetric=True, dtype="float16"),
    "half": Case(16, dtype="float16"),
    "single": Case(7, 384, 96, 64, dtype="float32"),
    "single_symmetric": Case(33, 128, 32, 32, is_symmetric=True, dtype="float32"),
    "odd_in": Case(3, num_in=928, num_out=176, group_size=32),
    "many_splits": Case(2, num_in=4096, num_out=64),
    "odd_splits": Case(65, num_in=2944, num_out=80),
}

DEVICE_CASES: Mapping[str, Case] = {
    **add_twins(CASES, {"bf16": {"dtype": "bfloat16"}}),
    # Outputs wide enough for the tiles of real layers, at each of their row counts.
    **{f"wide_rows_{num_rows}": Case(num_rows, num_in=1024, num_out=8192) for num_rows in (2, 17, 64, 256)},
}

_LAYERS = {
    "llama_8b_qkv": (4096, 6144),
    "llama_8b_out": (4096, 4096),
    "llama_8b_gate_up": (4096, 28672),
    "llama_8b_down": (14336, 4096),
    "qwen_14b_qkv": (5120, 7168),
    "qwen_14b_out": (5120, 5120),
    "qwen_14b_gate_up": (5120, 27648),
    "qwen_14b_down": (13824, 5120),
}
BENCHES: Mapping[str, Case] = {
    f"{layer}_{num_rows}": Case(num_rows, num_in, num_out)
    for layer, (num_in, num_out) in _LAYERS.items()
    for num_rows in (2, 16, 64, 256)
}


class Inputs(NamedTuple):
    """Activations, and weights in the neutral form."""

    x: Float[Array, "T D"]
    values: UInt8[Array, "D F"]
    scales: Float[Array, "groups F"]
    zeros: UInt8[Array, "groups F"] | None


def make_inputs(case: Case, key: jax.Array) -> Inputs:
    """Make random inputs."""
    keys = jax.random.split(key, 4)
    groups = (case.num_in // case.group_size, case.num_out)
    scales = jax.random.uniform(keys[2], groups, jnp.float32, 0.5, 1.5) / 8 * case.num_in**-0.5
    zeros = None if case.is_symmetric else jax.random.randint(keys[3], groups, 0, 17, jnp.uint8)
    return Inputs(
        x=jax.random.normal(keys[0], (case.num_rows, case.num_in), jnp.float32).astype(case.dtype),
        values=jax.random.randint(keys[1], (case.num_in, case.num_out), 0, 16, jnp.uint8),
        scales=scales.astype(case.dtype),
        zeros=zeros,
    )


def prepare(implementation: Any, case: Case, inputs: Inputs) -> tuple[Float[Array, "T D"], PackedInt4]:
    """Pack the weights."""
    return inputs.x, pack(inputs.values, inputs.scales, inputs.zeros)


def run(implementation: Any, case: Case, prepared: tuple[Float[Array, "T D"], PackedInt4]) -> Float[Array, "T F"]:
    """Return the product."""
    return implementation.matmul(*prepared)


def expected(case: Case, inputs: Inputs) -> Float[Array, "T F"]:
    """Dequantize the neutral form, then multiply, in float32."""
    zeros = SYMMETRIC_ZERO if inputs.zeros is None else jnp.repeat(inputs.zeros.astype(jnp.float32), case.group_size, 0)
    scales = jnp.repeat(inputs.scales.astype(jnp.float32), case.group_size, 0)
    weights = (inputs.values.astype(jnp.float32) - zeros) * scales
    return jnp.dot(inputs.x.astype(jnp.float32), weights, precision=lax.Precision.HIGHEST)


def compare(case: Case, inputs: Inputs, found: Float[Array, "T F"], expected: Float[Array, "T F"]) -> Comparison:
    """Compare each row of the result in pieces of 128 columns; none is padding."""
    del inputs
    is_real = np.ones((case.num_rows, 1), bool)
    pieces = in_pieces(found, _PIECE), in_pieces(expected, _PIECE)
    return compare_rows(("product",), *pieces, is_real, tolerance(case))


def tolerance(case: Case) -> Tolerance:
    """Allow for half a unit in the last place of the result, and of each weight that is rounded before the matmul."""
    return Tolerance(
        {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[case.dtype], floor=1e-3 * min(_PIECE, case.num_out) ** 0.5
    )


def cost(case: Case) -> Cost:
    """Count packed weights once, activations in and out."""
    itemsize = jnp.dtype(case.dtype).itemsize
    groups = case.num_in // case.group_size * case.num_out * (itemsize + (not case.is_symmetric))
    num_bytes = case.num_in * case.num_out // 2 + groups + case.num_rows * (case.num_in + case.num_out) * itemsize
    return Cost(num_bytes, 2 * case.num_rows * case.num_in * case.num_out)


def sizes(case: Case) -> dict[str, int]:
    """Return the group's size."""
    return {"group_size": case.group_size}


def dtype(case: Case) -> str:
    """Return the dtype of activations and scales."""
    return case.dtype
